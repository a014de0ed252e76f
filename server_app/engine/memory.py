"""Work that is done again in smaller parts where a GPU's memory does not hold it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

FEWEST_TOKENS = 64  # of a pass: where memory does not hold these, a smaller pass would not help

log = logging.getLogger("appa.server")

_T = TypeVar("_T")


class UnlessMemoryEnds:
    """A block that ends where the memory does, with a line in the log; what follows it is done in its place."""

    def __init__(self, otherwise: str) -> None:
        self._otherwise = otherwise

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, torch.OutOfMemoryError):
            return False
        error.__traceback__ = None  # it keeps the block's tensors alive
        torch.cuda.empty_cache()
        log.warning("%s; %s", next(iter(str(error).splitlines()), "").rstrip("."), self._otherwise)
        return True


class TokensAtOnce:
    """Most tokens in a pass: as many as given (`now`), halved for good where the memory does not hold them."""

    def __init__(self, tokens: int) -> None:
        self.now, self._given = tokens, tokens

    def within(self, passes: Callable[[], _T]) -> _T:
        """What passes of so many tokens give, done from the start again with half as many as often as it takes.

        Raises:
            torch.OutOfMemoryError: the memory does not hold the fewest, either.
        """
        while self.now >= 2 * FEWEST_TOKENS:
            half = self.now // 2
            said = f"from here on passes have {half} tokens at once, not ppo.micro-batch-tokens = {self._given}"
            with UnlessMemoryEnds(said):
                return passes()
            self.now = half
        return passes()
