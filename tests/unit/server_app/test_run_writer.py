"""The files of a run: what the launcher and the report find while it runs and after it failed."""

import errno
import os
import threading

import pytest
import torch
from fakes import raising
from report_runs import iteration
from small import config_in
from surveys import refused

from appa_flwr.config import Config
from appa_flwr.core import files
from appa_flwr.core.errors import UserError
from appa_flwr.run import schema as files_of_run
from appa_flwr.run.schema import METRICS_FILE
from server_app import log, run_writer
from server_app.checkpoint import Checkpoint, load, save
from server_app.federation import groups
from server_app.policy import base, limits
from server_app.run_writer import RunWriter


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(run_writer.time, "monotonic", lambda: now[0])
    return now


def test_the_steps_of_phases_reach_the_launcher_with_the_time_left(tmp_path, clock, capsys):
    folder = RunWriter(config_in(tmp_path))
    phase = folder.phase("sft")
    clock[0] += 30.0
    phase.step(1, 4, "loss 2.0")
    clock[0] += 12.5
    phase.step(2, 4, "loss 1.0 für „Österreich“")
    folder.phase("ppo")
    records = files_of_run.PROGRESS.read(folder.path)
    assert [(r.phase, r.step, r.of) for r in records] == [("sft", 0, 1), ("sft", 1, 4), ("sft", 2, 4), ("ppo", 0, 1)]
    # no step done: unknown; then 30 s a step and 3 to come; then 42.5 / 2 s a step and 2 to come
    assert [r.seconds_left for r in records] == [None, 90.0, 42.5, None]
    assert records[2].message == "loss 1.0 für „Österreich“"
    log = (folder.path / "run.log").read_text()
    assert "[  30.0 s] sft 1/4: loss 2.0, 1.5 min left\n" in log
    assert capsys.readouterr().out == log


def test_what_simulated_nodes_store_goes_with_the_run_and_before_another_begins(tmp_path):
    config = config_in(tmp_path)
    (stored := config.run_folder / "survey.memory").mkdir(parents=True)  # of a killed run
    (stored / "1-2.sqlite").touch()
    with RunWriter(config):
        assert not stored.exists()
        stored.mkdir()
    assert not stored.exists()


def test_messages_of_every_part_of_the_server_stand_in_the_run_s_log_while_the_run_goes_on(tmp_path, clock):
    with RunWriter(config_in(tmp_path)) as folder:
        groups.log.warning("group %s counts as missing:\n no votes", "Avaria")
        limits.log.warning("out of memory")
        base.log.info("unpacking %s", "a model")
        base.log.debug("nothing worth a line")
    groups.log.warning("of another run")
    assert [line.partition("] ")[2] for line in (folder.path / "run.log").read_text().splitlines()] == [
        "warning: group Avaria counts as missing: no votes",
        "warning: out of memory",
        "unpacking a model",
    ]


def test_a_run_that_the_launcher_announced_can_begin_or_be_resumed_and_no_other_can(tmp_path):
    config = config_in(tmp_path, seed=1)
    config.run_folder.mkdir()
    files_of_run.write_config(config.run_folder, config)
    (config.run_folder / "flower.log").write_text("refused by Flower")
    with pytest.raises(UserError, match="holds a run already"):
        RunWriter(config_in(tmp_path, seed=2))
    assert len(list(config.run_folder.iterdir())) == 2
    for resume in (False, True):
        again = config_in(tmp_path, seed=1, **{"run.resume": resume})
        with RunWriter(again) as folder:
            assert files_of_run.read_config(folder.path) == config


def test_a_run_that_is_still_written_is_not_resumed(tmp_path):
    config = config_in(tmp_path)
    with (
        RunWriter(config) as folder,
        pytest.raises(UserError, match=f"^{folder.path}: another run is writing here"),
    ):
        RunWriter(config_in(tmp_path, **{"run.resume": True}))


def test_a_resumed_run_goes_on_where_the_files_end(tmp_path, clock):
    config = config_in(tmp_path)
    with RunWriter(config) as folder, (folder.path / "progress.jsonl").open("a") as file:
        file.write('{"half a li')
    with RunWriter(Config.load({**config.flat(), "run.resume": True})) as again:
        phase = again.phase("ppo", done=2)
        phase.step(2, 5, "resumed")
        clock[0] += 4.0
        phase.step(3, 5, "")
        records = files_of_run.PROGRESS.read(again.path)
    assert [(r.phase, r.step, r.seconds_left) for r in records] == [("ppo", 0, None), ("ppo", 2, None), ("ppo", 3, 8)]


def test_fewer_iterations_than_the_checkpoint_counts_are_an_error(tmp_path):
    folder = RunWriter(config_in(tmp_path))
    folder.append(METRICS_FILE, iteration(1))
    with pytest.raises(UserError, match=r"metrics\.jsonl: .* 1 .* 2"):
        folder.keep_iterations(2)


def test_on_a_full_disk_lines_are_the_user_s_to_know_and_the_failure_tells_nothing_new(tmp_path, monkeypatch):
    folder = RunWriter(config_in(tmp_path))
    monkeypatch.setattr(files.os, "fsync", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(UserError, match=r"metrics\.jsonl: .*No space left"):
        folder.append(METRICS_FILE, iteration(1))
    folder.fail("the disk is full")
    assert not (folder.path / "error.txt").exists()


def test_the_log_of_a_run_inside_another_has_the_messages_of_its_own_thread(tmp_path):
    config = config_in(tmp_path, **{"run-name": "outer"})
    inner_config = Config.load({**config.flat(), "run.output-dir": str(tmp_path / "outer"), "run-name": "inner"})
    with RunWriter(config) as outer, RunWriter(inner_config, above=outer) as inner:
        for folder in (outer, inner):
            folder.log_this_thread()
        log.warning("of ours")
        thread = threading.Thread(target=log.warning, args=("of another",))
        thread.start()
        thread.join()
    texts = [(folder.path / "run.log").read_text() for folder in (outer, inner)]
    assert [("of ours" in text, "of another" in text) for text in texts] == [(True, True), (True, False)]


@pytest.mark.parametrize("phases", ["all", "serve"])
def test_only_a_run_that_serves_has_a_file_of_served_rounds(phases, tmp_path):
    folder = RunWriter(config_in(tmp_path, **{"run.phases": phases}))
    assert (folder.path / "served.jsonl").exists() == (phases == "serve")


def test_a_token_is_made_once_for_its_owner_alone_and_never_empty(tmp_path):
    folder = RunWriter(config_in(tmp_path, **{"run.phases": "serve"}))
    path, token = folder.path / "token", folder.token()
    assert (folder.token(), path.read_text(), path.stat().st_mode & 0o777) == (token, token + "\n", 0o600)
    path.write_text(" \n")
    with pytest.raises(UserError, match="there is no token"):
        folder.token()
    path.write_bytes(b"\xff\n")
    assert folder.token() == "\ufffd"  # bytes that are no text are no token that anyone has, and no traceback


def test_an_earlier_checkpoint_is_read(tmp_path):
    torch.save({"iteration": 40, "questions": 320, "rule": {}, "engine": {}}, path := tmp_path / "checkpoint.pt")
    assert vars(load(path)) == {"iteration": 40, "rule": {}, "engine": {}}


@pytest.mark.parametrize("spoil", ["cut", "text", "empty", "code", "other", "list"])
def test_a_spoilt_checkpoint_is_the_user_s_to_know(spoil, tmp_path):
    save(path := tmp_path / "checkpoint.pt", Checkpoint(40, {}, {"weights": [torch.ones(2)]}))
    whole = path.read_bytes()
    path.with_name("checkpoint.pt.sha256").unlink()  # one without a hash is read too
    if spoil in ("code", "other", "list"):  # a pickle that would run something, and two that are no checkpoint
        torch.save({"code": {"run": os.system}, "other": {"iteration": 1}, "list": [1]}[spoil], path)
    else:
        path.write_bytes({"cut": whole[: len(whole) // 2], "text": b"no checkpoint", "empty": b""}[spoil])
    refused(r"^/.*checkpoint\.pt: cannot be read", load, path)
