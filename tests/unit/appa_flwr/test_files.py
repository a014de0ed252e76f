"""What is on the disk after a write that failed, was killed, or met another process."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import textwrap

import pytest

from appa_flwr import files
from appa_flwr.errors import UserError

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def full_disk(monkeypatch):
    """Everything is full when a file is to be stored."""

    def fail(handle):
        raise FULL

    monkeypatch.setattr(files.os, "fsync", fail)


def test_a_file_is_replaced_as_a_whole_or_stays(tmp_path, full_disk, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"the last one")
    with pytest.raises(UserError, match=r"^/.*/checkpoint\.pt: cannot be written \(No space left on device\)$"):
        files.replace_file(path, b"the next")
    assert path.read_bytes() == b"the last one"
    assert list(tmp_path.iterdir()) == [path]  # the half-written file gave its space back
    monkeypatch.undo()
    files.replace_file(path, b"the next")
    assert path.read_bytes() == b"the next"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_has_gone_is_named(tmp_path):
    with pytest.raises(UserError, match=r"gone/x\.json: cannot be written \(No such file or directory\)"):
        files.replace_file(tmp_path / "gone" / "x.json", b"")


def test_a_real_limit_on_the_size_of_files_leaves_the_old_one(tmp_path):
    """The system itself refuses in the middle of the file; by root too."""
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"the last one")
    code = f"""
        import resource
        from pathlib import Path
        from appa_flwr.files import replace_file
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, {resource.RLIM_INFINITY}))
        replace_file(Path({str(path)!r}), bytes(5000))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith(f"UserError: {path}: cannot be written (File too large)")
    assert path.read_bytes() == b"the last one"
    assert list(tmp_path.iterdir()) == [path]


def test_only_the_system_s_errors_are_the_user_s():
    with (
        pytest.raises(UserError, match=r"x: cannot be written \(.* No space left on device \(os error 28\)\)"),
        files.writing("x"),
    ):
        raise RuntimeError("from a library: No space left on device (os error 28)")
    with pytest.raises(RuntimeError, match="a bug"), files.writing("x"):
        raise RuntimeError("a bug")


@pytest.mark.parametrize(
    ("content", "count", "left"),
    [
        ("a\nb\nc\n", None, "a\nb\nc\n"),
        ("a\nb\nhalf", None, "a\nb\n"),
        ("half", None, ""),
        ("a\nb\nc\n", 2, "a\nb\n"),
        ("a\nb\nhalf", 5, "a\nb\n"),
        ("a\n", 0, ""),
        (None, None, ""),
    ],
)
def test_a_file_is_cut_to_complete_lines(tmp_path, content, count, left):
    path = tmp_path / "lines"
    if content is not None:
        path.write_text(content)
    assert files.keep_lines(path, count) == len(left.splitlines())
    assert path.read_text() == left


def test_a_file_is_held_by_one_process_until_it_ends_however_it_ends(tmp_path):
    path = tmp_path / "run.log"
    path.write_text("earlier\n")
    code = f"""
        import time
        from pathlib import Path
        from appa_flwr.files import lock
        held = lock(Path({str(path)!r}))
        print("held", flush=True)
        time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(UserError, match=f"^{tmp_path}: another run is writing here"):
            files.lock(path)
        other.kill()
        files.lock(path, patience=10).close()
    files.lock(path).close()
    assert path.read_text() == "earlier\n"
