"""What the server's code finds wrong before Flower starts, in the process that the launcher starts first."""

import io
import json
import warnings

import families
import pytest
import report_runs

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.launch import checks
from appa_flwr.launch.terminal import RunFailed
from appa_flwr.survey.types import Question
from server_app import machine, preflight


def test_a_slow_model_and_too_large_steps_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(preflight.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(preflight, "quiet", lambda **_: None)  # it would silence the other tests
    folder = families.save("qwen3", tmp_path / "model", [Question("q", "Is it?", ("Yes", "No"))])
    config = Config.load({"model": str(folder), "policy.tuning": "full", "ppo.learning-rate": 4e-4})
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(config.flat())))
    with warnings.catch_warnings():
        preflight.main()
    said = capsys.readouterr().err
    assert f"{folder} computes on CPU, by 3 threads" in said
    assert "ppo.learning-rate = 0.0004" in said


def test_a_damaged_model_is_named_by_the_process_that_the_launcher_starts(tmp_path, monkeypatch):
    folder = families.save("qwen3", tmp_path / "model", [Question("q", "Is it?", ("Yes", "No"))])
    (folder / "model.safetensors").write_bytes(b"no weights")
    keys = {"model": str(folder), "policy.tuning": "full", "ppo.learning-rate": 1e-5}
    with pytest.raises(UserError, match=f"^model = {folder}: model.safetensors is cut off or damaged"):
        checks.check_server(Config.load(keys))
    preflight.check(Config.load({**keys, "run.phases": "pluralllm"}), say=print)  # which needs no model
    (tmp_path / "server_app.py").write_text("raise OSError")
    monkeypatch.setattr(checks.bundle, "APP_FOLDER", tmp_path)
    with pytest.raises(RunFailed, match=f"the server's code in {tmp_path} cannot be started"):
        checks.check_server(Config.load(keys))
    checks.check_server(Config.load({}))  # the tiny one is built by the run


def test_a_run_that_another_version_began_says_so(tmp_path, monkeypatch):
    first = machine.machine(tmp_path)
    report_runs.progressed(tmp_path, "machine", first)
    assert machine.machine(tmp_path).count("appa-flwr") == 1
    monkeypatch.setattr(machine, "code_version", lambda: "another")
    later = machine.machine(tmp_path)
    assert later.count("appa-flwr") == 2
    assert later.endswith(first)
