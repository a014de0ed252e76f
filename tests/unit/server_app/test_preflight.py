"""What the server looks at before Flower starts."""

from __future__ import annotations

import io
import json

import pytest

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from server_app import preflight


@pytest.fixture
def begun(monkeypatch, capsys):
    """Look at a config with a GPU or without: what it printed, out and err."""

    def begin(*, gpu: bool, **keys: object) -> tuple[str, str]:
        monkeypatch.setattr(preflight.torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(preflight.sys, "stdin", io.StringIO(json.dumps(Config.load(keys).flat())))
        preflight.main()
        return capsys.readouterr()

    return begin


def test_a_model_that_will_compute_without_a_gpu_is_said_once(begun, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(preflight.base, "check", lambda config, say: say("looked at"))
    keys = {"model": "/models/gemma", "policy.tuning": "lora"}
    said = "looked at\ntorch sees no GPU: /models/gemma computes on CPU, by 3 threads\n"
    assert begun(gpu=False, **keys) == ("", said)
    assert begun(gpu=True, **keys) == ("", "looked at\n")
    assert begun(gpu=False) == ("", "looked at\n")  # the tiny one needs none
    assert begun(gpu=False, **keys, **{"run.phases": "pluralllm"}) == ("", "")


def test_a_step_of_adapters_for_all_weights_is_said(begun, monkeypatch):
    monkeypatch.setattr(preflight.base, "check", lambda config, say: None)
    keys = {"model": "/models/gemma", "policy.tuning": "full", "ppo.learning-rate": 4e-4}
    said = "ppo.learning-rate = 0.0004 is a step for adapters; with policy.tuning = full try 1e-5\n"
    assert begun(gpu=True, **keys) == ("", said)
    assert begun(gpu=True, **{**keys, "ppo.learning-rate": 1e-5}) == ("", "")
    assert begun(gpu=True, **{**keys, "policy.tuning": "lora"}) == ("", "")
    assert begun(gpu=True, **{**keys, "model": "tiny"}) == ("", "")  # its default step is of all its weights


def test_a_mistake_is_the_line_that_the_launcher_shows(begun, monkeypatch, capsys):
    def missing(config: Config, say: object) -> None:
        raise UserError("no such model")

    monkeypatch.setattr(preflight.base, "check", missing)
    with pytest.raises(SystemExit) as ended:
        begun(gpu=False, **{"model": "/models/gemma", "policy.tuning": "lora"})
    assert ended.value.code == 2
    assert capsys.readouterr().out == "no such model\n"
