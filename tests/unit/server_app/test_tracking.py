"""A run's tracker gets the numbers of each line of metrics.jsonl at its iteration."""

import pytest
from accelerate import tracking as trackers
from report_runs import iteration
from small import config_in

from appa_flwr.core.errors import UserError
from appa_flwr.launch import checks
from appa_flwr.run.schema import METRICS_FILE, PROGRESS
from server_app import preflight, tracking
from server_app.run_writer import RunWriter


def tracked(folder, tracker):
    return config_in(folder, **{"run.tracker": tracker})


TWO = (
    iteration(1, weights={"a": 0.25, "b": 0.75}, fell_back=True, seconds={"update": 1.5}),
    iteration(2, rewards={"a": None, "b": 0.5}, missing_groups=("a",), kl=0.125),
)


@pytest.fixture
def tracker(monkeypatch):
    """A tracker in the place of wandb's and TensorBoard's; the settings and calls of all of its kind."""
    calls = []

    class Tracker(trackers.GeneralTracker):
        name, requires_logging_directory, tracker = "wandb", False, None

        def __init__(self, **settings):
            calls.append(settings)

        def start(self):
            calls.append("start")

        def log(self, values, step):
            calls.append((step, values))

        def finish(self):
            calls.append("finish")

    for kind in ("wandb", "tensorboard"):
        monkeypatch.setitem(trackers.LOGGER_TYPE_TO_CLASS, kind, Tracker)
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: ["wandb"])
    return calls


def test_each_line_reaches_the_tracker_at_its_iteration(tmp_path, tracker):
    with RunWriter(tracked(tmp_path, "wandb")) as folder:
        folder.progress("ppo", 0, 1, "begins", None)
        assert tracker == []
        for written in TWO:
            folder.append(METRICS_FILE, written)
    settings, started, (one, first), (two, second), finished = tracker
    assert settings["config"]["run.tracker"] == "wandb"
    assert (settings["dir"], settings["mode"]) == (folder.path, "offline")
    assert (started, one, two, finished) == ("start", 1, 2, "finish")
    assert {type(value) for value in (first | second).values()} == {float}
    assert (first["weights/a"], first["weights/b"], first["fell_back"], first["seconds/update"]) == (0.25, 0.75, 1, 1.5)
    assert (second["rewards/b"], second["kl"]) == (0.5, 0.125)
    assert {"fell_back", "rewards/a", "missing_groups"}.isdisjoint(second)
    assert METRICS_FILE.read(folder.path) == TWO
    assert len(PROGRESS.read(folder.path)) == 1


def test_tensorboard_writes_to_a_folder_of_the_run(tmp_path, tracker):
    with RunWriter(tracked(tmp_path, "tensorboard")) as folder:
        folder.append(METRICS_FILE, TWO[0])
    assert tracker[0] == {"run_name": "tensorboard", "logging_dir": folder.path}


def test_without_a_tracker_nothing_is_tracked(tmp_path, tracker):
    with RunWriter(tracked(tmp_path, "")) as folder:
        folder.append(METRICS_FILE, TWO[0])
    assert tracker == []


def test_a_missing_package_is_named_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "get_available_trackers", list)
    preflight.check(tracked(tmp_path, ""), say=print)
    with pytest.raises(UserError, match=r"^run.tracker = .*pip install wandb$"):
        preflight.check(tracked(tmp_path, "wandb"), say=print)
    # the launcher asks the server's code, which sees what is installed
    if "trackio" not in map(str, trackers.get_available_trackers()):
        with pytest.raises(UserError, match=r"^run.tracker = .*pip install trackio$"):
            checks.check_server(tracked(tmp_path, "trackio"))
