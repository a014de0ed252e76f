"""A user's mistake on the command line, by the installed command as a process: one line, and nothing is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

APPA = Path(sys.executable).with_name("appa")


def test_the_command_ends_with_one_line_and_starts_nothing(tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    flags = [f"model={tmp_path}", "sft.learning-rate=0.001", f"run.output-dir={tmp_path}/runs"]
    done = subprocess.run([str(APPA), "run", *flags], cwd=here, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("appa: ")
    assert "cannot be loaded" in line  # which a process of the server finds out
    assert not (tmp_path / "runs").exists()
    assert list(here.iterdir()) == []
