"""PluralLLM's weights as a run keeps them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import safetensors.numpy
from flwr.app import Array, ArrayRecord
from safetensors import SafetensorError, safe_open

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file
from pluralllm.network import ModelConfig, PluralLLM
from pluralllm.training import build
from server_app.predictor.pretraining import Pretraining

PRETRAINING = "pretraining"


def save_weights(path: Path, pretraining: Pretraining) -> None:
    """Write PluralLLM's weights and how its rounds went.

    Raises:
        UserError: it cannot be written.
    """
    arrays = {name: np.ascontiguousarray(array.numpy()) for name, array in pretraining.weights.items()}
    # One entry: safetensors writes several in the order of a hash, and the same weights would be other bytes.
    known = {"losses": pretraining.losses, "validation": pretraining.validation}
    replace_file(path, safetensors.numpy.save(arrays, metadata={PRETRAINING: json.dumps(known)}))


def load_weights(path: Path, start: ArrayRecord) -> Pretraining | None:
    """Weights as `save_weights` wrote them; None where nothing is. `start` has the names and shapes that are expected.

    Raises:
        UserError: it cannot be read, or holds other names or shapes.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, "np") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            known = json.loads((file.metadata() or {})[PRETRAINING])
            losses, validation = tuple(known["losses"]), known["validation"]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({str(error).partition(chr(10))[0]}); without it PluralLLM is trained anew"
        ) from None
    expected = {name: tuple(array.shape) for name, array in start.items()}
    if {name: array.shape for name, array in arrays.items()} != expected:
        raise UserError(f"{path}: holds other weights than PluralLLM's of this config; without it it is trained anew")
    return Pretraining(ArrayRecord({name: Array(arrays[name]) for name in start}), losses, validation)


def network(config: Config, weights: ArrayRecord) -> PluralLLM:
    """The network of these weights."""
    model = build(ModelConfig.of(config.pluralllm.architecture))
    model.load_state_dict(weights.to_torch_state_dict())
    return model
