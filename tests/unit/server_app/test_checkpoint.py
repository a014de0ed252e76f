"""What is kept of PPO reads back as it was, and nothing else is taken for it."""

import os

import pytest
import torch

from appa_flwr.core.errors import UserError
from server_app.checkpoint import Checkpoint, load, save

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
