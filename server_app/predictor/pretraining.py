"""PluralLLM's federated pretraining, by Flower's stock strategies."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedProx, FedYogi

from appa_flwr.config import Config
from appa_flwr.errors import UserError
from appa_flwr.run.records import Round
from appa_flwr.seeds import child_seed
from pluralllm.architectures import build, choices
from pluralllm.model import ModelConfig
from pluralllm.residual import SHARE_KEY
from pluralllm.training import BETAS, step_size_factor
from server_app.federation.grid import OverlapGrid

Progress = Callable[[int, int, float], None]

# Adaptivity floor of FedAdam and its kin. At 1e-4 the small gradients of the context path vanish in it, and PluralLLM
# ends up predicting the same answers for every group.
TAU = 1e-6
# natural Jensen-Shannon distance of answers that share no option, and rounding
LARGEST_DISTANCE = math.log(2) ** 0.5 + 1e-6

log = logging.getLogger("appa.server")


class _Watched:
    """Reports every round and refuses one without a single result, which Flower itself would pass over.

    A node whose reply does not follow the protocol is left out of that round: Flower would end the run over it, or
    average it in.
    """

    def watch(self, config: Config, progress: Progress) -> None:
        self._num_rounds, self._seed, self._progress = config.pluralllm.rounds, config.seed, progress
        self._validate_every = config.pluralllm.validate_every
        self.rounds: list[Round] = []
        self.chosen: ArrayRecord | None = None
        self.chosen_round = 0
        self._choices = choices(ModelConfig.of(config.embedding, config.pluralllm))
        self._lowest_error = math.inf
        self._most_answers = 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        # Who takes part in a round is drawn by Flower from Python's one generator.
        random.seed(child_seed(self._seed, "participants", server_round))
        self._sent = arrays
        configured: Any = super()
        messages: Iterable[Message] = configured.configure_train(server_round, arrays, config, grid)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        aggregated: Any = super()
        usable = []
        # Sums of floats depend on their order, and who answers first, and under which id, is chance.
        for reply in sorted(replies, key=_content):
            fault = None if reply.has_error() else _fault(reply, self._sent)
            if fault is None:
                usable.append(reply)
            else:
                log.warning("node %s: its training reply cannot be used: %s", reply.metadata.src_node_id, fault)
        arrays, metrics = aggregated.aggregate_train(server_round, usable)
        if arrays is None or metrics is None:
            raise UserError(
                f"PluralLLM round {server_round}: no node sent weights that could be used; the groups' own logs say why"
            )
        self.rounds.append(Round(round=server_round, loss=float(metrics["loss"])))
        self._progress(server_round, self._num_rounds, self.rounds[-1].loss)
        # Adaptive strategies' arithmetic ends in float64, which would double what travels.
        narrow = ArrayRecord({name: Array(array.numpy().astype(np.float32)) for name, array in arrays.items()})
        if self._lowest_error == math.inf:  # without validation the last round's weights are kept
            self.chosen, self.chosen_round = narrow, server_round
        return narrow, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        every = self._validate_every
        if not every or (server_round % every and server_round != self._num_rounds):
            return []
        self._validated = arrays
        configured: Any = super()
        messages: Iterable[Message] = configured.configure_evaluate(server_round, arrays, config, grid)
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Keep these weights where the groups' mean error on held-out questions is the lowest so far.

        So is chosen how much learned features count, where the network has any (`pluralllm.residual`).

        Groups differ in how well they can be predicted, so only rounds over the same number of answers compare. A round
        in which a node is lost, and its answers with it, records its error but is not kept; one with more answers than
        any before starts the comparison anew. Nodes without such answers say 0 of them, by which Flower would divide.
        """
        count = len(self._choices)
        reported = [found for reply in sorted(replies, key=_content) if (found := _errors_of(reply, count)) is not None]
        num_answers = sum(cells for cells, _ in reported)
        if not num_answers:
            return None
        error_V = np.sum([cells * np.array(means) for cells, means in reported], axis=0) / num_answers
        best = int(error_V.argmin())
        error = float(error_V[best])
        self.rounds[-1] = self.rounds[-1].model_copy(update={"validation": error})
        if num_answers > self._most_answers:
            self._most_answers, self._lowest_error = num_answers, math.inf
        if num_answers == self._most_answers and error < self._lowest_error:
            self._lowest_error, self.chosen_round = error, server_round
            self.chosen = _with_share(self._validated, self._choices[best])
        return MetricRecord({"error": error})


def _fault(reply: Message, expected: ArrayRecord) -> str | None:
    """What is wrong with a node's trained weights, which must have the names, shapes and dtypes of those it was sent.

    It quotes nothing from the reply: the text goes into a log line.
    """
    arrays, metrics = reply.content.get("arrays"), reply.content.get("metrics")
    if len(reply.content) != 2 or not isinstance(arrays, ArrayRecord) or not isinstance(metrics, MetricRecord):
        return "it must hold the records `arrays` and `metrics` alone"
    if set(metrics) != {"num-examples", "loss"}:
        return "its metrics must be `num-examples` and `loss` alone"
    num_examples, loss = metrics["num-examples"], metrics["loss"]
    if type(num_examples) is not int or num_examples <= 0:  # a bool is an int too
        return "`num-examples` must be a positive integer"
    if not isinstance(loss, float) or not math.isfinite(loss):
        return "`loss` must be a finite number"
    if set(arrays) != set(expected):
        return "its arrays have other names than those it was sent"
    for name, sent in expected.items():
        try:  # What the record says of an array's shape and dtype need not be true of its bytes.
            array = np.asarray(arrays[name].numpy())
        except Exception:  # NumPy's reader has half a dozen ways to fail on another party's bytes
            return f"array {name} cannot be read"
        if (array.shape, str(array.dtype)) != (sent.shape, sent.dtype):
            return f"array {name} must be {sent.dtype} of shape {sent.shape}"
        if not np.isfinite(array).all():
            return f"array {name} holds NaN or infinity"
    return None


def _with_share(weights: ArrayRecord, share: float) -> ArrayRecord:
    """The same weights, with learned features counting for `share` where there are any."""
    chosen = {SHARE_KEY: Array(np.array([share], dtype=np.float32))} if SHARE_KEY in weights else {}
    return ArrayRecord({**weights, **chosen})


def _errors_of(reply: Message, count: int) -> tuple[int, list[float]] | None:
    """Number of validation answers and `count` mean errors of a node; None, with a warning, where it is unusable."""
    if reply.has_error():
        log.warning("node %s: %s", reply.metadata.src_node_id, reply.error.reason)
        return None
    try:
        metrics = reply.content.metric_records["metrics"]
        cells, errors = int(str(metrics["num-examples"])), metrics["errors"]
    except (KeyError, ValueError):
        cells, errors = -1, None
    numbers = [float(error) for error in errors] if isinstance(errors, list) else []
    if cells < 0 or len(numbers) != count or not all(0.0 <= error <= LARGEST_DISTANCE for error in numbers):
        log.warning("node %s: its validation errors cannot be used", reply.metadata.src_node_id)
        return None
    return cells, numbers


def _content(reply: Message) -> str:
    return "" if reply.has_error() else str(dict(reply.content.metric_records))


class _Scheduled(_Watched):
    """The server's step size rises and falls over the rounds."""

    eta: float

    def watch(self, config: Config, progress: Progress) -> None:
        super().watch(config, progress)
        self._largest_eta = self.eta

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        self.eta = self._largest_eta * step_size_factor(server_round - 1, self._num_rounds)
        return super().aggregate_train(server_round, replies)


class _FedAvg(_Watched, FedAvg):
    pass


class _FedProx(_Watched, FedProx):
    pass


class _FedAdam(_Scheduled, FedAdam):
    pass


class _FedYogi(_Scheduled, FedYogi):
    pass


class _FedAdagrad(_Scheduled, FedAdagrad):
    pass


def _strategy(config: Config, num_nodes: int) -> _FedAvg | _FedProx | _FedAdam | _FedYogi | _FedAdagrad:
    common: dict[str, Any] = {
        "fraction_train": config.pluralllm.fraction,
        "fraction_evaluate": 1.0,
        "min_train_nodes": 1,
        "min_evaluate_nodes": 1,
        "min_available_nodes": num_nodes,
    }
    adaptive: dict[str, Any] = {"eta": config.pluralllm.server_learning_rate, "tau": TAU, **common}
    moments: dict[str, Any] = {"beta_1": BETAS[0], "beta_2": BETAS[1]}
    match config.pluralllm.strategy:
        case "fedavg":
            return _FedAvg(**common)
        case "fedprox":
            return _FedProx(proximal_mu=config.pluralllm.proximal_mu, **common)
        case "fedadam":
            return _FedAdam(**moments, **adaptive)
        case "fedyogi":
            return _FedYogi(**moments, **adaptive)
        case "fedadagrad":
            return _FedAdagrad(**adaptive)


def initial_weights(config: Config) -> ArrayRecord:
    """PluralLLM before any training, by the run's seed."""
    torch.manual_seed(child_seed(config.seed, "pluralllm"))
    return ArrayRecord(build(ModelConfig.of(config.embedding, config.pluralllm)).state_dict())


@dataclass(frozen=True, eq=False)
class Pretraining:
    """What pretraining came to.

    Attributes:
        weights: of the chosen round.
        rounds: loss and, where it was validated, error of every round.
        chosen: that round: of the lowest validation error, the last where none was validated, 0 without rounds.
    """

    weights: ArrayRecord
    rounds: tuple[Round, ...] = ()
    chosen: int = 0


def pretrain(
    grid: OverlapGrid, config: Config, start: ArrayRecord, *, nodes: Sequence[int], progress: Progress
) -> Pretraining:
    """Train PluralLLM over the groups; only weights travel (appendix "PluralLLM Preference Probability Modeling").

    Which round's weights are kept is decided on the training groups' held-out questions. The nodes hold the catalogue
    already; their order decides who takes part in a round. `progress` is called with (round, rounds, mean loss).

    Raises:
        UserError: a round in which no node trained.
    """
    if not config.pluralllm.rounds:
        return Pretraining(start)
    strategy = _strategy(config, len(nodes))
    strategy.watch(config, progress)
    members, grid.members = grid.members, tuple(nodes)
    try:
        strategy.start(grid, start, num_rounds=config.pluralllm.rounds, timeout=config.federation.reply_timeout)
    finally:
        grid.members = members
    assert strategy.chosen is not None  # a round without weights has raised
    return Pretraining(strategy.chosen, tuple(strategy.rounds), strategy.chosen_round)
