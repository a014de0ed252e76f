"""Limits of a pass: how much the memory holds, and whether the numbers are finite."""

from collections.abc import Callable
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from appa_flwr.core.errors import UserError
from server_app import log

TOKENS = "tokens (ppo.micro-batch-tokens)"
ANSWERS = "answers"
FEWEST_TOKENS = 64  # smallest limit of a pass; if memory does not hold such a pass, the run ends
PROBE_TOKENS = 6  # length of the row that `finite_logits` checks

_T = TypeVar("_T")


class NotFinite(UserError):
    """Training has made losses or logits infinite or NaN; the message names the config key to lower."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the policy's losses or logits are no longer finite; lower {key}")


class Budget:
    """Limit of a pass, in tokens or another unit, which is halved for good when GPU memory runs out."""

    def __init__(self, unit: str, size: int, *, fewest: int = FEWEST_TOKENS) -> None:
        self.size, self._unit, self._fewest = size, unit, fewest

    def run(self, passes: Callable[[int], _T]) -> _T:
        """Return `passes(size)`; when memory runs out, start again with half the size, down to `fewest`."""
        while True:
            try:
                return passes(self.size)
            except torch.OutOfMemoryError:
                if self.size < 2 * self._fewest:
                    raise
            torch.cuda.empty_cache()
            self.size //= 2
            log.warning("out of memory: from here on passes have %d %s", self.size, self._unit)


@torch.inference_mode()
def finite_logits(model: PreTrainedModel) -> bool:
    """True if the logits of a few tokens are finite under the current weights."""
    ids_1L = torch.arange(PROBE_TOKENS, device=model.device)[None]
    return bool(model(input_ids=ids_1L, use_cache=False).logits.logsumexp(-1).isfinite().all())
