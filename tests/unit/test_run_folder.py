"""The files of a run: what the launcher and the report find while it runs and after it failed."""

from __future__ import annotations

import json

import pytest

from appa_flwr.config import Config
from appa_flwr.errors import UserError
from appa_flwr.launcher import Tail, read_progress
from appa_flwr.report import artifacts
from server_app import run_folder as run_folders
from server_app.run_folder import RunFolder, replaced_folder


def config_in(folder, **keys):
    return Config.load({"output-dir": str(folder), "run-name": "r", **keys})


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(run_folders.time, "monotonic", lambda: now[0])
    return now


def test_the_config_reads_back(tmp_path):
    config = config_in(tmp_path / "a" / "b", rule="alpha", alpha=float("-inf"))
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
    earlier.fail("a mistake of yesterday")
    later = RunFolder(config_in(tmp_path, seed=2))
    assert {p.name for p in later.path.iterdir() if p.stat().st_size} == {"config.json"}
    assert not (later.path / "error.txt").exists()
    assert artifacts.read_run(later.path).config["seed"] == 2


def test_a_folder_that_cannot_be_made_is_the_user_s_to_know(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"output-dir = .*/file/deeper/r: cannot be written \(Not a directory\)"):
        RunFolder(config_in(tmp_path / "file" / "deeper"))


def test_a_folder_is_replaced_once_the_new_one_is_whole(tmp_path):
    target = tmp_path / "policy"
    with replaced_folder(target) as beside:
        (beside / "first").write_text("1")
        assert not target.exists()
    with pytest.raises(IsADirectoryError), replaced_folder(target) as beside:
        (beside / "half").mkdir() or (beside / "half").write_text("fails")
    assert [path.name for path in target.iterdir()] == ["first"]
    with replaced_folder(target) as beside:
        (beside / "second").write_text("2")
        assert [path.name for path in target.iterdir()] == ["first"]
    assert [path.name for path in target.iterdir()] == ["second"]
    assert list(tmp_path.iterdir()) == [target]
