from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from appa_flwr.launch import processes
from appa_flwr.launch.endings import Stopped


@pytest.mark.parametrize("signum", processes.STOP_SIGNALS)
def test_a_signal_ends_a_home_before_its_process(signum):
    with pytest.raises(Stopped) as stopped, processes.flower_home() as home:  # noqa: PT012
        begun = subprocess.Popen(["sleep", "60"], env={**os.environ, "FLWR_HOME": str(home)}, start_new_session=True)
        signal.raise_signal(signum)
    assert stopped.value.signum == signum
    assert not psutil.pid_exists(begun.pid)
    assert not home.exists()


def test_a_process_that_shows_no_environment_at_first_is_ended(tmp_path, monkeypatch):
    # What the system shows of a process between the end of fork and the beginning of its program.
    shown = psutil.process_iter
    looks = iter([lambda *attrs: iter(())])
    monkeypatch.setattr(psutil, "process_iter", lambda *attrs: next(looks, shown)(*attrs))
    with subprocess.Popen(["sleep", "60"], env={**os.environ, "FLWR_HOME": str(tmp_path)}) as begun:
        processes.end_processes(tmp_path)
        ended = begun.poll() is not None
        begun.kill()
    assert ended


def test_a_worker_that_shows_no_environment_and_has_lost_its_parent_is_ended(tmp_path):
    # As Ray's are, where the session's leader and their parent were the first to end.
    with subprocess.Popen(["sleep", "60"], env={}, cwd=tmp_path, start_new_session=True) as begun:
        processes.end_processes(tmp_path)
        ended = begun.poll() is not None
        begun.kill()
    assert ended


def test_end_processes_ends_detached_stubborn_grandchildren_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "END_SECONDS", 0.5)
    # The leader has a session; its grandchild shows no environment, ignores SIGTERM and has lost its parent.
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    grandchild_code = f"{ignore}; print('up', flush=True); time.sleep(60)"
    child_code = f"""
import subprocess, sys
code = {grandchild_code!r}
child = subprocess.Popen([sys.executable, "-c", code], env={{}}, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
"""
    run_child = f"subprocess.run([sys.executable, '-c', {child_code!r}])"
    leader = f"import subprocess, sys, time; {run_child}; time.sleep(60)"
    ours = {**os.environ, "FLWR_HOME": str(tmp_path)}
    party = {**os.environ, "FLWR_HOME": str(tmp_path / "party")}
    other = {**os.environ, "FLWR_HOME": f"{tmp_path}-other"}
    with (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=other) as bystander,
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=party) as below,
        subprocess.Popen(
            [sys.executable, "-c", leader], env=ours, start_new_session=True, stdout=subprocess.PIPE, text=True
        ) as started,
    ):
        assert started.stdout is not None
        grandchild = int(started.stdout.readline())
        while psutil.Process(grandchild).ppid() in {p.pid for p in psutil.Process(started.pid).children()}:
            time.sleep(0.05)
        found = {process.pid for process in processes.processes_of(tmp_path)}
        assert found == {started.pid, grandchild, below.pid}
        processes.end_processes(tmp_path)
        assert processes.processes_of(tmp_path) == []
        assert not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE
        bystander_lives = bystander.poll() is None
        bystander.terminate()
    assert bystander_lives
