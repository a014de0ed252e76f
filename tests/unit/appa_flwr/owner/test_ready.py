"""One process of a node stays ready and forks for each message, which runs once, with what it was started with."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from appa_flwr.launch.sites import CLIENT_APP
from appa_flwr.owner import ready
from appa_flwr.owner.guard import NOT_PINNED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere every message imports for itself")

# Stands for the guard, whose import takes a second, and for torch; says what a message has run with.
PROGRAM = """
    import importlib.machinery, json, os, signal, sys, time, types

    class Stub(types.ModuleType):
        seeds = 0

        def main(self):
            torch = sys.modules.get("torch")
            print(
                json.dumps(
                    {
                        "pid": os.getpid(),
                        "imported_by": self.by,
                        "argv": sys.argv,
                        "environ": dict(os.environ),
                        "cwd": os.getcwd(),
                        "signal": repr(signal.getsignal(signal.SIGINT)),
                        "files": sorted(os.listdir("/proc/self/fd")),
                        "torch": torch and (torch.by, torch.seeds),
                    }
                ),
                flush=True,
            )
            if "train" in sys.argv:
                import torch
            if "stay" in sys.argv:
                time.sleep(60)
            sys.exit()

        def seed(self):
            self.seeds += 1

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name in ("appa_flwr.owner.guard", "torch"):
                return importlib.machinery.ModuleSpec(name, self)
        def create_module(self, spec):
            module = Stub(spec.name)
            module.by = os.getpid()
            return module
        def exec_module(self, module):
            pass

    sys.meta_path.insert(0, Finder())
    from appa_flwr.owner import ready
    ready.IDLE_SECONDS = float(os.environ.get("IDLE", 60))
    ready.HAND_OVER_SECONDS = float(os.environ.get("HAND_OVER", 30))
    ready.main()
"""


class Node:
    """Starts the program as a SuperNode would, which never waits for it."""

    def __init__(self, folder: Path, program: str = PROGRAM) -> None:
        self.folder, self.program = folder, textwrap.dedent(program)
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str, cwd: Path | None = None, **environment: str) -> None:
        command = [sys.executable, "-c", self.program, str(self.folder / "ready"), *arguments]
        given = {"env": os.environ | environment, "cwd": cwd, "stdin": subprocess.DEVNULL}
        with self.output(name).open("wb") as file:
            self.started[name] = subprocess.Popen(command, stdout=file, stderr=file, **given)

    def output(self, name: str) -> Path:
        return self.folder / f"{name}.out"

    def ran(self, name: str, *arguments: str, **given) -> dict[str, object]:
        self.start(name, *arguments, **given)
        return self.seen(name)

    def seen(self, name: str) -> dict[str, object]:
        """What the message ran with: said once, and no complaint."""
        until(lambda: self.output(name).read_text().endswith("\n"))
        (line,) = self.output(name).read_text().splitlines()
        return json.loads(line)


def until(happened: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    folder = tmp_path / ("a long name " * 15)  # longer than a socket's path can be
    folder.mkdir()
    node = Node(folder)
    yield node
    for process in node.started.values():
        for fork in psutil.Process(process.pid).children() if process.poll() is None else ():
            fork.kill()
        process.kill()
        process.wait()


def test_the_first_stays_and_later_messages_run_in_forks_of_it_as_they_were_started(node, tmp_path):
    first = node.ran("first", "--token", "a", ONLY="the first")
    second = node.ran("second", "--token", "b", "--insecure", cwd=tmp_path, MINE="2")
    third = node.ran("third")
    stays = node.started["first"].pid
    assert [message["imported_by"] for message in (first, second, third)] == [stays] * 3
    assert len({stays, first["pid"], second["pid"], third["pid"]}) == 4
    assert first["argv"] == ["flwr-clientapp", "--token", "a"]
    assert second["argv"] == ["flwr-clientapp", "--token", "b", "--insecure"]
    assert (first["cwd"], second["cwd"]) == (os.getcwd(), str(tmp_path))
    assert first["environ"].items() == {**third["environ"], "ONLY": "the first"}.items()
    assert second["environ"].items() == {**third["environ"], "MINE": "2"}.items()
    assert "default_int_handler" in second["signal"]
    assert "ONLY" not in third["environ"]
    assert len(first["files"]) == len(second["files"]) == len(third["files"])
    for name in ("second", "third"):
        assert node.started[name].wait(10) == 0
    time.sleep(2 * ready.LOOK_SECONDS)
    assert node.started["first"].poll() is None
    assert psutil.Process(stays).children() == []  # not even a zombie
    modes = {(node.folder / "ready" / name).stat().st_mode & 0o777 for name in ("ready.sock", "ready.lock")}
    assert modes == {0o600}
    assert (node.folder / "ready").stat().st_mode & 0o777 == 0o700
    assert ready.PROGRAM == CLIENT_APP


def test_after_a_message_that_needed_torch_the_others_find_it_there_with_numbers_of_their_own(node):
    assert [node.ran(name)["torch"] for name in ("first", "second")] == [None, None]
    assert node.ran("third", "train")["torch"] is None
    until(lambda: node.ran("later")["torch"])
    assert node.ran("last")["torch"] == [node.started["first"].pid, 1]


def test_messages_that_come_at_once_run_once_each(node):
    names = [f"message {number}" for number in range(6)]
    for name in names:
        node.start(name, NAME=name)
    messages = [node.seen(name) for name in names]
    assert [message["environ"]["NAME"] for message in messages] == names
    assert len({message["pid"] for message in messages}) == 6
    starters = {process.pid for process in node.started.values()}
    assert len({message["imported_by"] for message in messages} & starters) < 6  # some were handed over
    until(lambda: sum(process.poll() is None for process in node.started.values()) == 1)
    assert [node.seen(name) for name in names] == messages


@pytest.mark.parametrize("first", ["ended", "stay"])
def test_after_the_one_that_stays_was_killed_the_next_stays(first, node):
    """Even while a message of the killed one still runs."""
    fork = node.ran("first", first)["pid"]
    node.started["first"].kill()
    node.started["first"].wait()
    assert (node.folder / "ready" / "ready.sock").exists()
    second = node.started
    assert node.ran("second")["imported_by"] == second["second"].pid
    assert node.ran("third")["imported_by"] == second["second"].pid
    if first == "stay":
        os.kill(fork, signal.SIGKILL)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_when_told_to(node, end):
    node.ran("first")
    node.started["first"].send_signal(end)
    assert node.started["first"].wait(10) == -end
    node.seen("first")  # no traceback


def test_it_ends_with_its_node(node):
    command = [sys.executable, "-c", node.program, str(node.folder / "ready")]
    code = f"""
        import subprocess, sys
        print(subprocess.Popen({command!r}, stdout=subprocess.DEVNULL).pid, flush=True)
        sys.stdin.read()
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], **pipes)
    stays = psutil.Process(int(parent.stdout.readline()))
    time.sleep(2 * ready.LOOK_SECONDS)
    assert stays.status() != psutil.STATUS_ZOMBIE
    parent.communicate()
    until(lambda: not stays.is_running() or stays.status() == psutil.STATUS_ZOMBIE, 10)


def test_an_idle_one_ends_and_one_with_a_message_is_not_idle(node):
    fork = node.ran("first", "stay", IDLE="2")["pid"]
    time.sleep(4)
    assert node.started["first"].poll() is None
    os.kill(fork, signal.SIGKILL)
    assert node.started["first"].wait(20) == 0


def in_place_of_one(node: Node) -> tuple[object, object]:
    (node.folder / "ready").mkdir()
    lock = (node.folder / "ready" / "ready.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock, ready._listener(node.folder / "ready")


def test_a_message_that_is_taken_and_not_begun_runs_by_itself(node):
    lock, listener = in_place_of_one(node)
    with lock, listener:
        node.start("dies")
        node.start("hangs", HAND_OVER="1")
        listener.settimeout(30)
        both = [listener.accept()[0] for _ in range(2)]
        for taken in both:
            if b'"HAND_OVER"' not in taken.recv(1_000_000):
                taken.close()
        for name in ("dies", "hangs"):
            message = node.seen(name)
            assert message["pid"] == message["imported_by"] == node.started[name].pid


def test_a_lock_without_a_socket_does_not_keep_a_message_from_running(node):
    lock, listener = in_place_of_one(node)
    listener.close()
    with lock:
        assert node.ran("message")["pid"] == node.started["message"].pid


def test_a_folder_that_cannot_be_made_does_not_either(node):
    (node.folder / "ready").write_text("a file")
    assert node.ran("message")["pid"] == node.started["message"].pid


def test_each_message_is_held_against_the_policy_of_its_own_time(tmp_path):
    program = """
        from flwr.supernode.runtime import run_clientapp
        from appa_flwr.owner import guard, ready

        run_clientapp.install_from_fab = lambda content, **kwargs: print("unpacked", flush=True)
        guard.flwr_clientapp = lambda: run_clientapp.install_from_fab(b"a bundle", skip_prompt=True)
        ready.main()
    """
    node, policy = Node(tmp_path, program), tmp_path / "policy.toml"
    given = {"APPA_POLICY": str(policy), "FLWR_HOME": str(tmp_path / "home")}
    policy.write_text("")
    node.start("first", **given)
    until(lambda: node.output("first").read_text() == "unpacked\n")
    policy.write_text(f'bundle = "{"0" * 64}"\n')
    node.start("second", **given)
    until(lambda: node.output("second").read_text().endswith(f"UserError: {NOT_PINNED}\n"))
    assert "unpacked" not in node.output("second").read_text()
    assert node.started["second"].wait(10) == 0  # it was handed over
    node.started["first"].kill()
    node.started["first"].wait()


def test_handing_over_imports_next_to_nothing():
    code = "import sys; from appa_flwr.owner import ready; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"flwr", "numpy", "pydantic", "torch"} & set(done.stdout.split())
