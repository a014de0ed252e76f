from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from appa_flwr.launch import processes
from appa_flwr.launch.terminal import Stopped


@pytest.mark.parametrize("signum", processes.STOP_SIGNALS)
def test_a_signal_ends_a_home_before_its_process(signum):
    with pytest.raises(Stopped) as stopped, processes.flower_home() as home:  # noqa: PT012
        begun = subprocess.Popen(["sleep", "60"], env={**os.environ, "FLWR_HOME": str(home)}, start_new_session=True)
        signal.raise_signal(signum)
    assert stopped.value.signum == signum
    assert not psutil.pid_exists(begun.pid)
    assert not home.exists()


def test_a_home_is_short_enough_for_ray_s_sockets_whatever_tmpdir_is(tmp_path, monkeypatch):
    (long := tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with processes.flower_home() as home:
        assert len(str(home)) <= 30


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


SHELL = """
import subprocess, sys, time
job = subprocess.Popen(["sleep", "60"])
print(job.pid, flush=True)
subprocess.run([sys.executable, "-c", sys.argv[1]])
time.sleep(60)
"""
LAUNCHER = """
import os, subprocess, sys, time
from appa_flwr.launch.processes import flower_home
print(os.getpid(), flush=True)
child = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
with flower_home() as home:
    environment = {**os.environ, "FLWR_HOME": str(home)}
    for apart in (False, True):
        command = [sys.executable, "-c", child]
        begun = subprocess.Popen(command, env=environment, start_new_session=apart, stdout=subprocess.PIPE, text=True)
        print(begun.pid, begun.stdout.readline().strip(), flush=True)
    print(home, flush=True)
    time.sleep(60)
"""


def test_of_the_launcher_s_session_only_what_the_launcher_started_is_ended():
    command = [sys.executable, "-c", SHELL, LAUNCHER]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        read = shell.stdout.readline
        job, launcher = psutil.Process(int(read())), psutil.Process(int(read()))
        ours = {int(pid) for line in (read(), read()) for pid in line.split()}
        home = Path(read().strip())
        found = {process.pid for process in processes.processes_of(home)}
        launcher.terminate()
        psutil.wait_procs([launcher], timeout=30)
        left = {pid for pid in ours if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE}
        lives = job.is_running(), shell.poll() is None
        os.killpg(shell.pid, signal.SIGKILL)
    assert found == ours
    assert len(ours) == 4
    assert left == set()
    assert lives == (True, True)
    assert not home.exists()


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
