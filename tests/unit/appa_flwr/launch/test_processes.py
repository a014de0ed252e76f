import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from appa_flwr.launch import processes
from appa_flwr.launch.terminal import Stopped


@pytest.mark.parametrize("signum", processes.STOP_SIGNALS)
def test_a_signal_ends_a_home_before_its_process(signum):
    with pytest.raises(Stopped) as stopped, processes.flower_home() as home:  # noqa: PT012
        begun = subprocess.Popen(["sleep", "60"], start_new_session=True)
        signal.raise_signal(signum)
    assert stopped.value.signum == signum
    assert begun.poll() is not None
    assert not home.exists()


def test_a_home_is_short_enough_for_ray_s_sockets_whatever_tmpdir_is(tmp_path, monkeypatch):
    (long := tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with processes.flower_home() as home:
        assert len(str(home)) <= 30


LAUNCHER = """
import os, subprocess
from appa_flwr.launch.processes import flower_home
with flower_home() as home:
    print(home, *(subprocess.Popen(["sleep", "60"], env={"FLWR_HOME": f"{home}{own}"}).pid for own in ("", "/1")))
    os.kill(os.getpid(), 9)
"""


def test_a_killed_launcher_takes_what_it_started_with_it():
    with subprocess.Popen([sys.executable, "-u", "-c", LAUNCHER], stdout=subprocess.PIPE, text=True) as launcher:
        home, *pids = launcher.stdout.readline().split()
        launcher.stdout.read()  # until nobody has it open: the launcher, what it has started, the watchdog
    left = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]  # zombies, if this process adopts
    assert psutil.wait_procs(left, timeout=5.0)[1] == []
    assert not Path(home).exists()


# A child that starts a stubborn grandchild in a session of its own, with nothing in its environment, and ends.
GRANDCHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
CHILD = f"""
import subprocess, sys
command = [sys.executable, "-c", {GRANDCHILD!r}]
grandchild = subprocess.Popen(command, env={{}}, start_new_session=True, stdout=subprocess.PIPE)
grandchild.stdout.readline()
print(grandchild.pid, flush=True)
"""


def test_detached_stubborn_orphans_are_ended_and_nothing_that_was_there_before(monkeypatch):
    monkeypatch.setattr(processes, "END_SECONDS", 0.5)
    with subprocess.Popen(["sleep", "60"]) as bystander:
        with processes.all_ended():
            made = subprocess.run([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, check=True)
            orphan = psutil.Process(int(made.stdout))
            assert orphan in processes.descendants()
            assert orphan.is_running()
        assert not psutil.pid_exists(orphan.pid)
        assert bystander.poll() is None
        bystander.kill()
