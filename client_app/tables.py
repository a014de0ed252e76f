"""What a group compares with, from its memory: its own answers, and its predictions.

Axis letters: Q public questions, K options.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from flwr.app import Context

from appa_flwr.config import Config
from appa_flwr.owner.owner_policy import OwnerPolicy
from appa_flwr.protocol import votes, wire
from client_app import state, survey_answers
from pluralllm.data import GroupData, option_embedding


def training_groups(memory: state.Memory, config: Config) -> list[GroupData]:
    """The training answers of each group here that trains PluralLLM."""
    return [state.data(memory, name) for name in state.groups(memory) if name not in config.unseen_group_names]


def held_out(memory: state.Memory, group: str, public: wire.Catalogue, owner_policy: OwnerPolicy) -> GroupData:
    """A group's answers to held-out questions, none where they are fewer than its owner's policy asks for."""
    from client_app import predictor

    found = predictor.held_out_answers(group, state.truth(memory, group), public.train_Q)
    return found if len(found) >= owner_policy.least_answers else found.first(0)


def side(context: Context, public: wire.Catalogue, group: str, of: str, *, draw: int = 0) -> npt.NDArray[np.float64]:
    """What answers are compared with, (Q, K): see `wire.ScoreRequest`."""
    memory = state.memory_of(context)
    if of == wire.TRUTH_SIDE:
        # Only held-out answers are ever compared with: training answers are D_g, and enough rewards tell them.
        return np.where(public.train_Q[:, None], np.nan, state.truth(memory, group))
    return _fresh_targets(context, group, draw=draw) if draw else state.targets(memory, group)


def ballot(
    memory: state.Memory, public: wire.Catalogue, group: str, *, kind: str, predicted: bool
) -> npt.NDArray[np.float64]:
    """A group's votes (Q, K): by its own answer to a training question where it has one, else by its prediction.

    `predicted` goes by predictions for every question.
    """
    truth_QK = state.truth(memory, group)
    own_Q1 = (public.train_Q & ~np.isnan(truth_QK).any(1))[:, None] & (not predicted)
    opinion_QK = np.where(own_Q1, truth_QK, state.targets(memory, group))
    return votes.cast(opinion_QK, public.option_QK, kind=kind)


def _fresh_targets(context: Context, group: str, *, draw: int) -> npt.NDArray[np.float64]:
    from client_app import predictor

    memory, config = state.memory_of(context), survey_answers.context_config(context)
    public = state.catalogue(memory)
    ours = predictor.load(config, state.weights(memory), option_embedding(public), public.train_Q)
    return ours.table(state.data(memory, group), draw=draw)
