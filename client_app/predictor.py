"""A group's use of PluralLLM: its part of federated pretraining, and its target table from the frozen result.

Only this module of the groups' side imports torch. Other modules import it inside the functions that need it: on a
deployed node every message starts a fresh process, and scoring does not need torch.

Axis letters: P weights, N answered questions, K options, V choices of the views' shares.
"""

from collections import OrderedDict

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord

from appa_flwr.config import Config
from appa_flwr.config.sections import Architecture
from appa_flwr.core.arrays import FloatArray
from appa_flwr.core.seeds import child_seed
from appa_flwr.protocol.asks import Catalogue
from appa_flwr.protocol.messages import join_weights, split_weights
from pluralllm.data import GroupData
from pluralllm.network import PluralLLM
from pluralllm.prediction import Predictor
from pluralllm.scores import measure_sums
from pluralllm.training import build, choices, local_update

Weights = npt.NDArray[np.float32]


def train(
    config: Config, weight_P: Weights, data: GroupData, public: Catalogue, *, round_number: int, proximal: float = 0.0
) -> tuple[Weights, float]:
    """Train a copy of the server's joined weights (P,) on a group's answers, at least one.

    `round_number`, from 1 on, decides the step size; `proximal` is the mu of FedProx. Round, run seed and group decide
    the episodes. Returns the weights (P,) after training, and the mean loss over the steps.
    """
    torch.set_num_threads(1)
    settings, model = config.pluralllm, _model(config, weight_P)
    seed = child_seed(config.seed, "pluralllm", data.group, round_number)
    generator = torch.Generator().manual_seed(seed)
    loss = local_update(
        model, data, public, settings, round_number=round_number, proximal=proximal, generator=generator
    )
    return join_weights(ArrayRecord(OrderedDict(model.state_dict()))), loss


def load(config: Config, weight_P: Weights, public: Catalogue) -> Predictor:
    """Build the predictor of a run's config from joined weights (P,), and set torch to one thread."""
    torch.set_num_threads(1)
    model, settings = _model(config, weight_P), config.pluralllm
    return Predictor(model, public, num_context=settings.num_context_questions, seed=config.seed)


def errors(predictor: Predictor, data: GroupData, truth: GroupData, architecture: Architecture) -> FloatArray:
    """Sums (V,) of the natural Jensen-Shannon distance to a group's held-out answers, for each choice of shares.

    `data` are the group's training answers, the context.
    """
    predicted_VNK = predictor.choices(data, truth.question_N, choices(architecture))
    option_NK = predictor.public.option_QK[truth.question_N]
    sums = [measure_sums(predicted_NK, truth.answer_NK, option_NK) for predicted_NK in predicted_VNK]
    return np.array([measures["answers"] - measures["js_distance"] for measures in sums])


def _model(config: Config, weight_P: Weights) -> PluralLLM:
    model = build(config.pluralllm.architecture)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    model.load_state_dict(split_weights(weight_P, shapes).to_torch_state_dict())
    return model
