"""What the server looks at before Flower starts."""

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


GEMMA = {"model": "/models/gemma", "policy.tuning": "lora"}
FULL = {"model": "/models/gemma", "policy.tuning": "full", "ppo.learning-rate": 4e-4}
NO_GPU = "torch sees no GPU: /models/gemma computes on CPU, by 3 threads\n"
TOO_FAR = "ppo.learning-rate = 0.0004 is a step for adapters; with policy.tuning = full try 1e-5\n"


@pytest.mark.parametrize(
    ("gpu", "keys", "warning"),
    [
        (False, GEMMA, NO_GPU),
        (True, GEMMA, ""),
        (False, {}, ""),  # the tiny one needs no GPU
        (False, {**GEMMA, "run.phases": "pluralllm"}, None),  # and here no model is looked at
        (True, FULL, TOO_FAR),
        (True, {**FULL, "ppo.learning-rate": 1e-5}, ""),
        (True, {**FULL, "policy.tuning": "lora"}, ""),
        (True, {**FULL, "model": "tiny"}, ""),  # its default step is of all its weights
    ],
)
def test_what_makes_a_policy_slow_or_breaks_it_is_said(begun, monkeypatch, gpu, keys, warning):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(preflight.base, "check", lambda config, say: say("looked at"))
    assert begun(gpu=gpu, **keys) == ("", "" if warning is None else f"looked at\n{warning}")


def test_a_mistake_is_the_line_that_the_launcher_shows(begun, monkeypatch, capsys):
    def missing(config: Config, say: object) -> None:
        raise UserError("no such model")

    monkeypatch.setattr(preflight.base, "check", missing)
    with pytest.raises(SystemExit) as ended:
        begun(gpu=False, **GEMMA)
    assert ended.value.code == 2
    assert capsys.readouterr().out == "no such model\n"
