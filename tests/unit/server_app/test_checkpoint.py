"""What is kept of PluralLLM and PPO reads back as it was, and nothing else is taken for it."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord

from appa_flwr.core.errors import UserError
from server_app.checkpoint import Checkpoint, load, save
from server_app.predictor.checkpoint import load_weights, save_weights
from server_app.predictor.pretraining import Pretraining

RULE = {"history_G": {"A": 0.1, "B": 1 / 3}, "answered_G": {"A": True, "B": False}, "completed": ("f0",)}
ENGINE = {"weights": [torch.tensor([1 / 3, 2.0])], "steps": 7, "rng": {"state": 2**120 + 1}, "name": "x"}


@pytest.fixture
def path(tmp_path):
    save(tmp_path / "checkpoint.pt", Checkpoint(40, 320, RULE, ENGINE))
    return tmp_path / "checkpoint.pt"


def test_a_checkpoint_reads_back(path):
    assert load(path.with_name("none.pt")) is None
    found = load(path)
    assert (found.iteration, found.questions, found.rule) == (40, 320, RULE)
    assert found.engine["rng"] == ENGINE["rng"]


@pytest.mark.parametrize("spoil", ["cut", "text", "empty", "code", "other", "list"])
def test_a_spoilt_checkpoint_is_the_user_s_to_know(path, spoil):
    whole = path.read_bytes()
    if spoil in ("code", "other", "list"):  # a pickle that would run something, and two that are no checkpoint
        torch.save({"code": {"run": os.system}, "other": {"iteration": 1}, "list": [1]}[spoil], path)
    else:
        path.write_bytes({"cut": whole[: len(whole) // 2], "text": b"no checkpoint", "empty": b""}[spoil])
    with pytest.raises(UserError, match=r"^/.*checkpoint\.pt: cannot be read") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def record(**arrays: np.ndarray) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def test_weights_and_losses_read_back_in_their_order(tmp_path):
    rng = np.random.default_rng(0)
    weights = record(z=rng.normal(size=(2, 3)).astype(np.float32), a=rng.normal(size=4).astype(np.float32).T)
    losses = (1 / 3, 0.1 + 0.2)
    assert load_weights(tmp_path / "w.safetensors", weights) is None
    save_weights(tmp_path / "w.safetensors", Pretraining(weights, losses, 0.25))
    found = load_weights(tmp_path / "w.safetensors", record(z=np.zeros((2, 3)), a=np.zeros(4)))
    assert (found.losses, found.validation) == (losses, 0.25)
    read = found.weights
    assert list(read) == ["z", "a"]
    for name in weights:
        assert read[name].numpy().dtype == np.float32
        assert np.array_equal(read[name].numpy(), weights[name].numpy())


@pytest.mark.parametrize("other", [{"a": (3,)}, {"b": (2,)}, {"a": (2,), "b": (1,)}, {}])
def test_weights_of_other_names_or_shapes_are_refused(tmp_path, other):
    save_weights(tmp_path / "w.safetensors", Pretraining(record(a=np.zeros(2))))
    expected = record(**{name: np.zeros(shape) for name, shape in other.items()})
    with pytest.raises(UserError, match=r"w\.safetensors: holds other weights than"):
        load_weights(tmp_path / "w.safetensors", expected)


def test_spoilt_weights_are_the_user_s_to_know(tmp_path):
    save_weights(tmp_path / "w.safetensors", Pretraining(record(a=np.zeros(2))))
    whole = (tmp_path / "w.safetensors").read_bytes()
    for spoilt in (whole[:-3], b""):
        (tmp_path / "w.safetensors").write_bytes(spoilt)
        with pytest.raises(UserError, match=r"w\.safetensors: cannot be read"):
            load_weights(tmp_path / "w.safetensors", record(a=np.zeros(2)))
