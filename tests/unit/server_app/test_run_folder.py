"""The files of a run: what the launcher and the report find while it runs and after it failed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource

import pytest
from fakes import tiny_causal_lm

from appa_flwr import files
from appa_flwr.config import Config
from appa_flwr.errors import UserError
from appa_flwr.launch.progress import Tail, read_progress
from appa_flwr.report import artifacts
from appa_flwr.survey.types import Question
from server_app import run_folder as run_folders
from server_app.models.tiny import TinyRecipe, build_tokenizer
from server_app.run_folder import RunFolder, replaced_folder


def config_in(folder, **keys):
    return Config.load({"run.output-dir": str(folder), "run-name": "r", **keys})


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(run_folders.time, "monotonic", lambda: now[0])
    return now


def test_the_config_reads_back(tmp_path):
    config = config_in(tmp_path / "a" / "b", rule="alpha", **{"appa.alpha": float("-inf")})
    folder = RunFolder(config)
    assert folder.path == tmp_path / "a" / "b" / "r"
    assert Config.load(json.loads((folder.path / "config.json").read_text())) == config


def test_phases_are_timed_and_their_steps_reach_the_launcher(tmp_path, clock, capsys):
    folder = RunFolder(config_in(tmp_path))
    with folder.phase("sft") as phase:
        clock[0] += 30.0
        phase.step(1, 4, "loss 2.0")
        clock[0] += 12.5
        phase.step(2, 4, "loss 1.0 für „Österreich“")
    with folder.phase("ppo"):
        clock[0] += 1.0
    records = list(read_progress(Tail(folder.path / "progress.jsonl")))
    assert [(r.phase, r.step, r.of) for r in records] == [("sft", 0, 1), ("sft", 1, 4), ("sft", 2, 4), ("ppo", 0, 1)]
    # no step done: unknown; then 30 s a step and 3 to come; then 42.5 / 2 s a step and 2 to come
    assert [r.seconds_left for r in records] == [None, 90.0, 42.5, None]
    assert records[2].message == "loss 1.0 für „Österreich“"
    assert json.loads((folder.path / "phases.json").read_text()) == [
        {"phase": "sft", "seconds": 42.5},
        {"phase": "ppo", "seconds": 1.0},
    ]
    log = (folder.path / "run.log").read_text()
    assert "[  30.0 s] sft 1/4: loss 2.0, 1.5 min left\n" in log
    assert capsys.readouterr().out == log


def test_a_phase_that_fails_is_not_counted_as_done(tmp_path):
    folder = RunFolder(config_in(tmp_path))
    with pytest.raises(ZeroDivisionError), folder.phase("sft"):
        raise ZeroDivisionError
    assert not (folder.path / "phases.json").exists()


def test_whole_files_are_replaced_as_a_whole(tmp_path):
    folder = RunFolder(config_in(tmp_path))
    folder.write_json("summary.json", [1, float("nan")])
    with pytest.raises(TypeError):
        folder.write_json("summary.json", [object()])
    read = json.loads((folder.path / "summary.json").read_text())
    assert read[0] == 1
    assert read[1] != read[1]
    assert not list(folder.path.glob(".*"))


def test_lines_are_there_as_soon_as_they_are_written(tmp_path):
    folder = RunFolder(config_in(tmp_path))
    assert (folder.path / "metrics.jsonl").read_text() == ""
    for value in (1, 2):
        folder.append_json("metrics.jsonl", {"reward": value})
        lines = (folder.path / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[-1]) == {"reward": value}
        assert len(lines) == value


def test_the_reason_of_a_failure_is_one_line(tmp_path):
    folder = RunFolder(config_in(tmp_path))
    folder.fail("no such\n  model")
    assert (folder.path / "error.txt").read_text() == "no such model\n"
    assert "failed: no such" in (folder.path / "run.log").read_text()


def test_an_earlier_run_in_the_same_folder_leaves_nothing_behind(tmp_path):
    earlier = RunFolder(config_in(tmp_path, seed=1))
    with earlier.phase("ppo"):
        earlier.append_json("metrics.jsonl", {"iteration": 1})
    for name in ("summary.json", "pluralllm.json", "examples.json"):
        earlier.write_json(name, [])
    (earlier.path / "checkpoint.pt").touch()
    (earlier.path / "pluralllm.safetensors").touch()
    for name in ("sft-model", "policy"):
        (earlier.path / name).mkdir()
    earlier.fail("a mistake of yesterday")
    with pytest.raises(UserError, match=f"^{earlier.path}: another run is writing here"):
        RunFolder(config_in(tmp_path, seed=2))
    assert (earlier.path / "error.txt").exists()
    with earlier:  # closes it
        pass
    later = RunFolder(config_in(tmp_path, seed=2))
    lines = {"metrics.jsonl", "progress.jsonl", "run.log"}
    assert {p.name for p in later.path.iterdir()} == {"config.json", *lines}
    assert not any((later.path / name).read_text() for name in lines)
    assert not (later.path / "error.txt").exists()
    assert artifacts.read_run(later.path).config["seed"] == 2


def test_a_folder_that_cannot_be_made_is_the_user_s_to_know(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"/file/deeper/r: cannot be written \(Not a directory\)"):
        RunFolder(config_in(tmp_path / "file" / "deeper"))


def test_a_folder_is_replaced_once_the_new_one_is_whole(tmp_path):
    target = tmp_path / "policy"
    with replaced_folder(target) as beside:
        (beside / "first").write_text("1")
        assert not target.exists()
    with (
        pytest.raises(UserError, match=r"policy: cannot be written \(Is a directory\)"),
        replaced_folder(target) as beside,
    ):
        (beside / "half").mkdir() or (beside / "half").write_text("fails")
    assert [path.name for path in target.iterdir()] == ["first"]
    with replaced_folder(target) as beside:
        (beside / "second").write_text("2")
        assert [path.name for path in target.iterdir()] == ["first"]
    assert [path.name for path in target.iterdir()] == ["second"]
    assert list(tmp_path.iterdir()) == [target]


class Killed(BaseException):
    """Ends the process as far as the run can tell."""


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_folder_survives_a_kill_at_any_moment_of_its_replacement(tmp_path, monkeypatch, renames):
    config = config_in(tmp_path)
    with RunFolder(config) as folder, replaced_folder(folder.path / "policy") as beside:
        (beside / "weights").write_text("old")
    rename, left = os.rename, [renames]

    def killed(source, target):
        if not left[0]:
            raise Killed
        left[0] -= 1
        rename(source, target)

    monkeypatch.setattr(run_folders.os, "rename", killed)
    monkeypatch.setattr(run_folders.shutil, "rmtree", lambda *args, **kwargs: None)  # a dead process tidies nothing up
    with contextlib.suppress(Killed), replaced_folder(folder.path / "policy") as beside:
        (beside / "weights").write_text("new")
    monkeypatch.undo()
    with RunFolder(Config.load({**config.flat(), "run.resume": True})) as again:
        assert (again.path / "policy" / "weights").read_text() == ("new" if renames == 2 else "old")
        assert not list(again.path.glob(".*"))


@contextlib.contextmanager
def files_of_at_most(size):
    """Within, the system itself refuses to write a file longer than that; to root too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_takes_no_more_of_a_model_is_one_line_and_leaves_the_last_one(tmp_path):
    tokenizer = build_tokenizer(TinyRecipe("dpa"), [Question("q", "What?", ("a", "b"))])
    for part in (tiny_causal_lm(), tokenizer):  # written by two libraries, each with an exception of its own
        with replaced_folder(tmp_path / "policy") as beside:
            (beside / "whole").touch()
        with (
            files_of_at_most(2000),
            pytest.raises(UserError, match=rf"^{tmp_path}/policy: cannot be written \(.*File too large.*\)$"),
            replaced_folder(tmp_path / "policy") as beside,
        ):
            part.save_pretrained(beside)
        assert [path.name for path in (tmp_path / "policy").iterdir()] == ["whole"]
    assert list(tmp_path.iterdir()) == [tmp_path / "policy"]


def test_a_resumed_run_goes_on_where_the_files_end(tmp_path, clock):
    config = config_in(tmp_path)
    with RunFolder(config) as folder:
        with folder.phase("sft"):
            clock[0] += 10.0
        with contextlib.suppress(Killed), folder.phase("ppo") as phase:
            for iteration in (1, 2, 3):
                folder.append_json("metrics.jsonl", {"iteration": iteration})
                clock[0] += 5.0
                phase.step(iteration, 5, "")
            phase.save_seconds()
            raise Killed
        with (folder.path / "progress.jsonl").open("a") as file:
            file.write('{"half a li')
        folder.fail("killed")
    clock[0] += 1000.0
    with RunFolder(Config.load({**config.flat(), "run.resume": True})) as again:
        assert not (again.path / "error.txt").exists()
        assert json.loads((again.path / "config.json").read_text()) == config.flat()
        again.keep_iterations(2)
        with again.phase("sft"):
            clock[0] += 1.0
        with again.phase("ppo", done=2) as phase:
            phase.step(2, 5, "resumed")
            clock[0] += 4.0
            phase.step(3, 5, "")
        records = list(read_progress(Tail(again.path / "progress.jsonl")))
    assert [(r.phase, r.step, r.seconds_left) for r in records[-3:]] == [
        ("ppo", 0, None),
        ("ppo", 2, None),
        ("ppo", 3, 8),
    ]
    assert [json.loads(line)["iteration"] for line in (folder.path / "metrics.jsonl").read_text().splitlines()] == [
        1,
        2,
    ]
    assert json.loads((folder.path / "phases.json").read_text()) == [
        {"phase": "sft", "seconds": 11.0},
        {"phase": "ppo", "seconds": 19.0},
    ]


def test_fewer_iterations_than_the_checkpoint_counts_are_an_error(tmp_path):
    folder = RunFolder(config_in(tmp_path))
    folder.append_json("metrics.jsonl", {"iteration": 1})
    with pytest.raises(UserError, match=r"metrics\.jsonl: has 1 lines, but checkpoint\.pt was written after 2"):
        folder.keep_iterations(2)


def test_on_a_full_disk_lines_are_the_user_s_to_know_and_the_failure_tells_nothing_new(tmp_path, monkeypatch):
    folder = RunFolder(config_in(tmp_path))

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be written \(No space left on device\)"):
        folder.append_json("metrics.jsonl", {})
    folder.fail("the disk is full")
    assert not (folder.path / "error.txt").exists()
