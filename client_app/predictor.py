"""A group's use of PluralLLM: its part of federated pretraining, and its target table from the frozen result.

Only this module of the groups' side imports torch. Other modules import it inside the functions that need it: on a
deployed node every message starts a fresh process, and scoring does not need torch.

Axis letters: P weights, N answered questions, K options, V choices of the views' shares.
"""

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord

from appa_flwr.config import Config
from appa_flwr.core.arrays import FloatArray
from appa_flwr.core.seeds import child_seed
from appa_flwr.protocol.messages import join_weights, split_weights
from appa_flwr.protocol.queries import Catalogue
from appa_flwr.protocol.rewards import js_distance
from pluralllm.data import GroupData, validation_questions
from pluralllm.network import PluralLLM
from pluralllm.prediction import GroupPredictor
from pluralllm.residual import SHARES
from pluralllm.training import build, local_update, validation_round

Weights = npt.NDArray[np.float32]


def train(
    config: Config, weight_P: Weights, data: GroupData, public: Catalogue, *, round_number: int, proximal: float = 0.0
) -> tuple[Weights, float, int]:
    """Train a copy of the server's joined weights (P,) on a group's training answers.

    `round_number`, from 1 on, decides the step size, and whether answers to validation questions count; `proximal` is
    the mu of FedProx. Round, run seed and group decide the episodes. Returns the weights (P,) after training, the mean
    loss over the steps, and the number of answers that count; without any the weights stay.
    """
    torch.set_num_threads(1)
    settings = config.pluralllm
    if round_number <= validation_round(settings):
        data = data.only(~validation_questions(public))
    if not len(data):
        return weight_P, 0.0, 0
    model = _model(config, weight_P)
    seed = child_seed(config.seed, "pluralllm", data.group, round_number)
    generator = torch.Generator().manual_seed(seed)
    loss = local_update(
        model, data, public, settings, round_number=round_number, proximal=proximal, generator=generator
    )
    return join_weights(ArrayRecord(OrderedDict(model.state_dict()))), loss, len(data)


def load(config: Config, weight_P: Weights, public: Catalogue) -> GroupPredictor:
    """Build the predictor of a run's config from joined weights (P,), and set torch to one thread."""
    torch.set_num_threads(1)
    model, settings = _model(config, weight_P), config.pluralllm
    return GroupPredictor(model, public, num_context=settings.num_context_questions, seed=config.seed)


def validation_gains(
    config: Config, weight_P: Weights, data: GroupData, public: Catalogue
) -> tuple[int, FloatArray, FloatArray]:
    """Compare predictions by each of `SHARES` with those by the first, on a group's answers to validation questions.

    Each answer is predicted from all of the group's other training answers `data`; questions with a single option are
    left out. Returns the number of answers, and sums (V,) of the gains in `js_distance` and of their squares.
    """
    validation_Q, several_Q = validation_questions(public), public.option_QK.sum(axis=1) > 1
    truth, rest = data.only(validation_Q & several_Q), replace(public, train_Q=public.train_Q & ~validation_Q)
    predicted_VNK = load(config, weight_P, rest).choices(data, truth.question_N, SHARES)
    score_VN = js_distance(predicted_VNK, truth.answer_NK, public.option_QK[truth.question_N])
    gain_VN = score_VN - score_VN[0]
    return len(truth), gain_VN.sum(axis=1), (gain_VN**2).sum(axis=1)


def _model(config: Config, weight_P: Weights) -> PluralLLM:
    model = build(config.pluralllm.architecture)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    model.load_state_dict(split_weights(weight_P, shapes).to_torch_state_dict())
    return model
