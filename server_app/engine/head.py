"""A causal LM's output head on its own, for the positions that need logits.

Axis letters: S positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from appa_flwr.core.errors import UserError

PROBE_TOKENS = 6
TOLERANCE = 0.02  # of the largest logit: rounding in 16 bits stays below, another scale does not


class NotFinite(UserError):
    """Training has made losses or logits infinite or NaN; the message names the config key to lower."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the policy's losses or logits are no longer finite; lower {key}")


def logits(model: PreTrainedModel, hidden_SH: Tensor) -> Tensor:
    """Logits from the last hidden states, by the model's own forward: (S, V)."""
    logits_SV: Tensor = model.get_output_embeddings()(hidden_SH)
    cap = getattr(model.config, "final_logit_softcapping", None)  # Gemma
    return logits_SV if cap is None else cap * torch.tanh(logits_SV / cap)


@torch.inference_mode()
def check_head(model: PreTrainedModel) -> None:
    """See on a few tokens that `logits` gives what the model's own forward does.

    Raises:
        UserError: it does not, as where an architecture scales its logits; every log-probability would be wrong.
    """
    ids_1L = _probe(model)
    expected = model(input_ids=ids_1L, use_cache=False).logits.float()
    found = logits(model, model.base_model(input_ids=ids_1L, use_cache=False).last_hidden_state).float()
    if not (found - expected).abs().max() <= TOLERANCE * expected.abs().max():
        raise UserError(
            f"{type(model).__name__} makes its logits in a way that is not known here; use Qwen3, Llama or Gemma-2"
        )


@torch.inference_mode()
def finite_logits(model: PreTrainedModel) -> bool:
    """True if a few tokens' probabilities are finite under the weights now in force."""
    return bool(model(input_ids=_probe(model), use_cache=False).logits.logsumexp(-1).isfinite().all())


def _probe(model: PreTrainedModel) -> Tensor:
    ids_L: Tensor = torch.arange(PROBE_TOKENS, device=model.device) % model.config.get_text_config().vocab_size
    return ids_L[None]
