"""What the server's code finds wrong before Flower starts, in the process that the launcher starts first."""

import families
import pytest

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.launch import checks
from appa_flwr.launch.terminal import RunFailed
from appa_flwr.survey.types import Question
from server_app import preflight


def test_a_model_that_is_slow_damaged_or_trained_in_too_large_steps_is_named(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    folder = families.save("qwen3", tmp_path / "model", [Question("q", "Is it?", ("Yes", "No"))])
    keys = {"model": str(folder), "policy.tuning": "full", "ppo.learning-rate": 4e-4}
    checks.check_server(Config.load(keys))
    said = capfd.readouterr().err
    assert f"torch sees no GPU: {folder} computes on CPU, by 3 threads\n" in said
    assert "ppo.learning-rate = 0.0004 is a step for adapters; with policy.tuning = full try 1e-5\n" in said
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UserError, match=f"^model folder {folder}: cannot be loaded"):
        checks.check_server(Config.load(keys))
    preflight.check(Config.load({**keys, "run.phases": "pluralllm"}), say=print)  # which needs no model
    (tmp_path / "server_app.py").write_text("raise OSError")
    monkeypatch.setattr(checks.bundle, "APP_FOLDER", tmp_path)
    with pytest.raises(RunFailed, match=f"the server's code in {tmp_path} cannot be started"):
        checks.check_server(Config.load(keys))
    checks.check_server(Config.load({}))  # the tiny one is built by the run
