"""Nothing but a checkpoint is taken for one; that it reads back as it was, `test_resume` tells."""

import os

import pytest
import torch

from appa_flwr.core.errors import UserError
from server_app.checkpoint import Checkpoint, load, save


@pytest.mark.parametrize("spoil", ["cut", "text", "empty", "code", "other", "list"])
def test_a_spoilt_checkpoint_is_the_user_s_to_know(spoil, tmp_path):
    save(path := tmp_path / "checkpoint.pt", Checkpoint(40, 320, {}, {"weights": [torch.ones(2)]}))
    whole = path.read_bytes()
    if spoil in ("code", "other", "list"):  # a pickle that would run something, and two that are no checkpoint
        torch.save({"code": {"run": os.system}, "other": {"iteration": 1}, "list": [1]}[spoil], path)
    else:
        path.write_bytes({"cut": whole[: len(whole) // 2], "text": b"no checkpoint", "empty": b""}[spoil])
    with pytest.raises(UserError, match=r"^/.*checkpoint\.pt: cannot be read") as caught:
        load(path)
    assert "\n" not in str(caught.value)
