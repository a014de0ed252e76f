"""PluralLLM's federated pretraining by one of Flower's strategies (`pluralllm.strategy`).

Axis letters: G groups that trained, P weights, V choices of the views' shares.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx, FedYogi
from flwr.serverapp.strategy.fedopt import FedOpt

from appa_flwr.config import Config
from appa_flwr.core.arrays import FloatArray
from appa_flwr.core.errors import UserError
from appa_flwr.core.seeds import child_seed
from appa_flwr.protocol import queries
from appa_flwr.protocol.messages import join_weights, split_weights
from appa_flwr.protocol.queries import Query
from appa_flwr.run.records import Means
from pluralllm.residual import SHARES, SHARES_KEY, Shares
from pluralllm.training import build, step_size_factor, validation_round
from server_app import flower_quiet
from server_app.federation.groups import Groups
from server_app.predictor.updates import Updates

PROXIMAL_MU = 0.01  # smallest but one of the values that FedProx's authors tried (Li et al. 2020, section 5.3)
# Step size, moments and adaptivity floor of the server's Adam and Yogi. Adam's usual step for a network of this size;
# Reddi et al. 2021 have the same moments. With their floor of 1e-3, small gradients of the context path would vanish.
ADAPTIVE = {"eta": 3e-3, "beta_1": 0.9, "beta_2": 0.99, "tau": 1e-6}
# By which a choice of the views' shares must be better than the default; not by one, since there are six others.
STANDARD_ERRORS = 2.0

Progress = Callable[[int, int, float], None]


def initial_weights(config: Config) -> ArrayRecord:
    """PluralLLM before any training, by the run's seed."""
    torch.manual_seed(child_seed(config.seed, "pluralllm"))
    return ArrayRecord(build(config.pluralllm.architecture).state_dict())


class GroupRounds(FedAvg):
    """Rounds over the groups' numbers, averaged as by FedAvg, in place of Flower's records.

    Flower's own average needs all updates in memory. A strategy of Flower's comes before this class in the order of
    bases, so its own steps go around these.
    """

    def begin(self, groups: Groups, config: Config, progress: Progress) -> None:
        """Set what the rounds need; Flower's own initialisers pass no further arguments on."""
        self.groups, self.config, self.progress = groups, config, progress
        self.losses: list[float] = []  # the groups' mean loss in every round
        self.distances: list[Means] = []  # by group, in every round
        self.shares: Shares | None = None  # chosen by validation; None without views, or if nobody has answered

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every group for an update; groups without answers send one of length 0."""
        self._sent = _single(arrays)
        settings = {"round": server_round, "proximal": float(str(config.get("proximal-mu", 0.0)))}
        self._request = self.groups.pending(Query(queries.UPDATE, {"weights": join_weights(self._sent)}, settings))
        return self._request.messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the groups' weights and losses, weighted by their numbers of answers.

        Raises a UserError if no group trained, or the updates cannot be written.
        """
        start_P, folder = join_weights(self._sent), self.groups.folder or Path(gettempdir())
        with Updates(folder, groups=self.groups.names, size=len(start_P)) as updates:
            for name, row_N in self._request.rows(replies):
                numbers = queries.split(row_N, self._request.layouts)
                if (count := float(numbers["answers"][0])) > 0:
                    updates.put(name, numbers["step"] / count, count=count, loss=float(numbers["loss"][0]) / count)
            if not updates.names:
                raise UserError(f"PluralLLM round {server_round}: no group trained; the groups' own logs say why")
            self.distances.append(dict(zip(updates.names, updates.distances().tolist(), strict=True)))
            weight_P, loss = updates.mean(start_P)
        averaged = split_weights(weight_P, {name: array.shape for name, array in self._sent.items()})
        if SHARES_KEY in self._sent:  # it is not trained, and groups cannot change it
            averaged[SHARES_KEY] = self._sent[SHARES_KEY]
        self.losses.append(loss)
        self.progress(server_round, self.config.pluralllm.rounds, loss)
        return averaged, MetricRecord({"loss": loss})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """After the last round without validation questions, ask what each choice of the views' shares gains."""
        self._validation = None
        if server_round != validation_round(self.config.pluralllm):
            return []
        weights = {"weights": join_weights(_single(arrays))}
        self._validation = self.groups.pending(Query(queries.VALIDATION, weights, {"size": len(SHARES)}))
        return self._validation.messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> None:
        """Choose the views' shares by the groups' gains."""
        if self._validation is not None:
            gains = self._validation.read(replies)
            answered_G = gains.each("answers")[:, 0] > 0
            if answered_G.any():
                self.shares = _chosen(**{name: gains.each(name)[answered_G] for name in gains.numbers})


class _FedProx(FedProx, GroupRounds):
    """FedProx over the groups; the groups' losses have its proximal term."""


class _FallingStep(FedOpt):
    """The server's step size rises and falls over the rounds; the groups' own steps are SGD's."""

    config: Config

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """See GroupRounds."""
        self.eta = ADAPTIVE["eta"] * step_size_factor(server_round - 1, self.config.pluralllm.rounds)
        return super().configure_train(server_round, _single(arrays), config, grid)


class _FedAdam(_FallingStep, FedAdam, GroupRounds):
    """FedAdam over the groups."""


class _FedYogi(_FallingStep, FedYogi, GroupRounds):
    """FedYogi over the groups."""


STRATEGIES: Mapping[str, tuple[type[GroupRounds], Mapping[str, Any]]] = {
    "fedavg": (GroupRounds, {}),
    "fedprox": (_FedProx, {"proximal_mu": PROXIMAL_MU}),
    "fedadam": (_FedAdam, ADAPTIVE),
    "fedyogi": (_FedYogi, ADAPTIVE),
}


def pretrain(
    groups: Groups, config: Config, start: ArrayRecord, *, progress: Progress
) -> tuple[ArrayRecord, list[float], list[Means]]:
    """Train PluralLLM over the groups; only weights travel (appendix "PluralLLM Preference Probability Modeling").

    `progress` is called with (round, rounds, mean loss). Returns the weights, and for every round the groups' mean loss
    and their `distances`.

    Raises:
        UserError: a round in which no group trained, or fewer answered than `run.min-groups`.
    """
    kind, settings = STRATEGIES[config.pluralllm.strategy]
    strategy = kind(**settings)
    strategy.begin(groups, config, progress)
    if not config.pluralllm.rounds:
        return start, [], []
    rounds, timeout = config.pluralllm.rounds, config.run.reply_timeout
    with flower_quiet():
        weights = _single(strategy.start(groups.grid, start, num_rounds=rounds, timeout=timeout).arrays)
    if strategy.shares is not None:
        weights[SHARES_KEY] = Array(np.array(strategy.shares, np.float32))
    return weights, strategy.losses, strategy.distances


def _single(weights: ArrayRecord) -> ArrayRecord:
    """The weights in float32; the arithmetic of Flower's adaptive strategies ends in float64."""
    return ArrayRecord({name: Array(array.numpy().astype(np.float32)) for name, array in weights.items()})


def _chosen(answers: FloatArray, gain: FloatArray, square: FloatArray) -> Shares:
    """Of `SHARES` whose mean gain is `STANDARD_ERRORS` above 0, that with the largest; the first if there is none.

    Groups answer the same questions, and may answer them alike. So the standard error is that of one group's questions.

    Args:
        answers: Numbers of validation answers (G, 1).
        gain: Sums over them of the gain on the first choice (G, V).
        square: Sums over them of its square (G, V).
    """
    mean_V, square_V = (sum_GV.sum(axis=0) / answers.sum() for sum_GV in (gain, square))
    if answers.mean() <= 1.0:  # nothing tells how much of a gain is chance
        return SHARES[0]
    error_V = np.sqrt((square_V - mean_V**2).clip(0.0) / (answers.mean() - 1.0))
    clear_V = mean_V > STANDARD_ERRORS * error_V
    return SHARES[int(np.where(clear_V, mean_V, 0.0).argmax())]
