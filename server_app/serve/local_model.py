"""A model of this machine, asked as a run asks its own policy: with its own chat template.

No axis letters: there are no arrays here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from appa_flwr.config import Config
from server_app.models import exports
from server_app.ppo.rollouts import Decoding, sample

BATCH = 16


class LocalModel:
    """A folder, perhaps of an adapter, or a name on the hub.

    Raises:
        UserError: it cannot be loaded.
    """

    def __init__(self, source: str) -> None:
        self._base, self._model = exports.opened(Config.load({}), source)

    @torch.inference_mode()
    def answers(self, prompts: Sequence[str], *, answer_tokens: int, temperature: float) -> Iterator[str]:
        """The answer to each prompt, one at a time."""
        decoding = Decoding.fitting(
            self._model,
            max_new_tokens=answer_tokens,
            temperature=temperature,
            stop_ids=self._base.stop_ids,
            pad_id=self._base.pad_id,
        )
        generator = torch.Generator(self._model.device).manual_seed(len(prompts))
        for start in range(0, len(prompts), BATCH):
            ids = [self._base.ids(self._base.asked(text)) for text in prompts[start : start + BATCH]]
            decoded = sample(self._model, ids, decoding, generator=generator).sequences
            yield from self._base.texts(decoded.response_JT, decoded.mask_JT)
