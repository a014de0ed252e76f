"""Iterations reach a tracker: TensorBoard's own file, and the names and numbers that any of them gets."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import report_runs
from tensorboardX.proto.event_pb2 import Event

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.run.records import Iteration
from server_app import tracking


def iteration(number: int, **changes: object) -> Iteration:
    return Iteration.model_validate({**report_runs.line(number, planned=2, fell_back=True), **changes})


def scalars(path: Path) -> dict[tuple[str, int], float]:
    """(name, step) -> value of an event file: records of length, checksum, event and checksum."""
    data, found, at = path.read_bytes(), {}, 0
    while at < len(data):
        (length,) = struct.unpack("<Q", data[at : at + 8])
        event = Event.FromString(data[at + 12 : at + 12 + length])
        found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        at += 16 + length
    return found


def test_tensorboard_gets_every_number(tmp_path):
    config = Config.load({"run.tracker": "tensorboard", "run-name": "x"})
    tracking.check(config)  # installed here
    with tracking.tracked(config, tmp_path) as track:
        track(iteration(1, fairness_index=0.5, weights={"a": 0.25, "b": 0.75}))
        track(iteration(2, fairness_index=0.625, rewards={"a": None, "b": 0.5}, fell_back=None, missing_groups=["b"]))
    (path,) = (tmp_path / "tensorboard").glob("events*")
    found = scalars(path)
    assert found["fairness_index", 1] == 0.5
    assert found["fairness_index", 2] == 0.625
    assert found["weights/b", 1] == 0.75
    assert found["rewards/b", 2] == 0.5
    assert ("rewards/a", 2) not in found
    assert found["fell_back", 1] == found["missing_groups", 2] == 1.0
    assert not {("fell_back", 2), ("iteration", 1)} & found.keys()


def test_none_tracks_nothing(tmp_path):
    with tracking.tracked(Config.load({}), tmp_path) as track:
        track(iteration(1))
    assert not list(tmp_path.iterdir())


def test_a_tracker_that_is_not_installed_is_told_before_the_run(monkeypatch):
    monkeypatch.setattr(tracking, "get_available_trackers", list)
    tracking.check(Config.load({}))
    with pytest.raises(UserError, match=r"run.tracker.* pip install wandb"):
        tracking.check(Config.load({"run.tracker": "wandb"}))
