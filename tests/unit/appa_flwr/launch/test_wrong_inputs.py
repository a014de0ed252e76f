"""Wrong inputs of every command: one line that names the key, file or number, and exit code 2.

No program is started and no file written. `FILES` lie where the command runs.
"""

import re
import shlex
import socket
import subprocess
import sys
from contextlib import closing

import pytest
from small import cases

import appa_flwr.report  # noqa: F401  (matplotlib, when it is first loaded, lists fonts by a program)
from appa_flwr.config import Config
from appa_flwr.launch import deploy
from appa_flwr.run.schema import write_config

TABLE = cases("wrong_inputs")
FILES = TABLE["files"] | {"nested.toml": "seed = " + "[" * 9999}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder in which commands run, with `FILES`, surveys and run folders."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "half").mkdir()
    write_config(tmp_path / "half", Config.load({"run-name": "half"}))
    (tmp_path / "half" / "metrics.jsonl").touch()  # as its server does first
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(deploy, "bundle_hash", lambda: "ab" * 32)
    for name in ("APPA_URL", "APPA_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def written(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("command", "says"), TABLE["commands"].items(), ids=[key[:60] for key in TABLE["commands"]])
def test_a_wrong_input_is_one_line_that_names_it_and_nothing_is_started_or_written(
    here, monkeypatch, appa, command, says
):
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = written(here)
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        (line,) = appa(*shlex.split(command.replace("{}", str(port))), code=2).splitlines()
    assert line.startswith("appa: ")
    assert len(line) < 600  # it can be read
    assert re.search(says.replace("{}", str(port)), line), line
    assert written(here) == before
