"""What is on the disk after a write that failed, was killed, or met another process."""

import contextlib
import errno
import os
import resource

import pytest
from fakes import tiny_causal_lm

from appa_flwr.core import files
from appa_flwr.core.errors import UserError
from appa_flwr.survey.types import Question
from server_app.policy.tiny import TinyRecipe, build_tokenizer


@contextlib.contextmanager
def files_of_at_most(size):
    """Within, the system itself refuses to write a file longer than that; to root too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_is_replaced_as_a_whole_or_stays(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"the last one")
    with files_of_at_most(1000), pytest.raises(UserError, match=rf"^{path}: cannot be written \(File too large\)$"):
        files.replace_file(path, bytes(5000))
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        with pytest.raises(UserError, match=f"^{path}: .*No space left"):
            files.replace_file(path, b"the next")
    assert path.read_bytes() == b"the last one"
    assert list(tmp_path.iterdir()) == [path]  # the half-written file gave its space back
    files.replace_file(path, b"the next")
    assert path.read_bytes() == b"the next"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(UserError, match=r"gone/x: .*No such file"):
        files.replace_file(tmp_path / "gone" / "x", b"")
    files.replace_file(tmp_path / "gone" / "x", b"", parents=True)
    assert (tmp_path / "gone" / "x").exists()


def test_only_the_system_s_errors_are_the_user_s():
    says = r"x: cannot be written \(.* No space left on device \(os error 28\)\)"
    with pytest.raises(UserError, match=says), files.writing("x"):
        raise RuntimeError("from a library: No space left on device (os error 28)")
    with pytest.raises(RuntimeError, match="a bug"), files.writing("x"):
        raise RuntimeError("a bug")


def test_what_a_library_wrote_for_its_user_alone_is_for_all_who_may_read_the_folder(tmp_path):
    umask = os.umask(0o027)
    try:
        with files.replaced_folder(tmp_path / "policy") as beside:
            (beside / "model.safetensors").touch(mode=0o600)
    finally:
        os.umask(umask)
    assert (tmp_path / "policy" / "model.safetensors").stat().st_mode & 0o777 == 0o640


class Killed(BaseException):
    """Ends the process as far as the files can tell."""


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_folder_survives_a_kill_at_any_moment_of_its_replacement(tmp_path, monkeypatch, renames):
    with files.replaced_folder(tmp_path / "policy") as beside:
        (beside / "weights").write_text("old")
    rename, left = os.rename, [renames]

    def killed(source, target):
        if not left[0]:
            raise Killed
        left[0] -= 1
        rename(source, target)

    monkeypatch.setattr(files.os, "rename", killed)
    monkeypatch.setattr(files.shutil, "rmtree", lambda *args, **kwargs: None)  # a dead process tidies nothing up
    with contextlib.suppress(Killed), files.replaced_folder(tmp_path / "policy") as beside:
        (beside / "weights").write_text("new")
    monkeypatch.undo()
    files.recover(tmp_path)
    assert (tmp_path / "policy" / "weights").read_text() == ("new" if renames == 2 else "old")
    assert list(tmp_path.iterdir()) == [tmp_path / "policy"]


def test_a_folder_that_another_process_finished_meanwhile_can_be_kept(tmp_path):
    for keep, left in ((True, "theirs"), (False, "ours")):
        with files.replaced_folder(tmp_path / "model", keep=keep) as beside:
            (beside / "ours").touch()
            (tmp_path / "model").mkdir(exist_ok=True)
            (tmp_path / "model" / "theirs").touch()
            assert [path.name for path in beside.iterdir()] == ["ours"]
        assert [path.name for path in (tmp_path / "model").iterdir()] == [left]
        assert list(tmp_path.iterdir()) == [tmp_path / "model"]


def test_a_disk_that_takes_no_more_of_a_model_is_one_line_and_leaves_the_last_one(tmp_path):
    tokenizer = build_tokenizer(TinyRecipe("dpa", steps=1), [Question("q", "What?", ("a", "b"))])
    for part in (tiny_causal_lm(), tokenizer):  # written by two libraries, each with an exception of its own
        with files.replaced_folder(tmp_path / "policy") as beside:
            (beside / "whole").touch()
        with (
            files_of_at_most(2000),
            pytest.raises(UserError, match=f"^{tmp_path}/policy: .*File too large"),
            files.replaced_folder(tmp_path / "policy") as beside,
        ):
            part.save_pretrained(beside)
        assert [path.name for path in (tmp_path / "policy").iterdir()] == ["whole"]
    assert list(tmp_path.iterdir()) == [tmp_path / "policy"]


@pytest.mark.parametrize(
    ("content", "count", "left"),
    [
        ("a\nb\nc\n", None, "a\nb\nc\n"),
        ("a\nb\nhalf", None, "a\nb\n"),
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


def test_a_file_is_held_by_one_until_it_lets_go(tmp_path):
    path = tmp_path / "run.log"
    path.write_text("earlier\n")
    held = files.lock(path)
    with pytest.raises(UserError, match=rf"^{tmp_path}: another run is writing here \(process {os.getpid()}\)"):
        files.lock(path)
    held.release()
    files.lock(path).release()
    assert path.read_text() == "earlier\n"
