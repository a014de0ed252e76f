"""What a node remembers between messages, in Flower's `Context.state`: deployed, every message meets a fresh process.

Axis letters: Q public questions, N questions a group answered, K options.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from appa_flwr import wire
from appa_flwr.errors import UserError
from client_app.outgoing import Refused
from pluralllm.data import GroupData, OptionEmbedding

FloatArray = npt.NDArray[np.float64]

_CATALOGUE, _QUESTIONS, _GROUPS, _WEIGHTS, _EXCHANGE = "catalogue", "questions", "groups", "weights", "exchange"


@dataclass(frozen=True)
class Exchange:
    """How far this node is in the sums over groups: its key, the nodes' (none before the first sum), steps done."""

    private: bytes = b""
    public_keys: tuple[bytes, ...] = ()
    steps_done: int = 0


def remember_catalogue(state: RecordDict, content: RecordDict, groups: tuple[str, ...]) -> None:
    """Keep the server's catalogue as it came, and the names of the groups hosted here."""
    state[_CATALOGUE] = content.array_records[_CATALOGUE]
    state[_QUESTIONS] = content.config_records[_QUESTIONS]
    state[_GROUPS] = ConfigRecord({"names": list(groups)})


def catalogue(state: RecordDict) -> wire.Catalogue:
    """The remembered catalogue.

    Raises:
        Refused: the server has sent none, as after a restart of this node.
    """
    if _CATALOGUE not in state:
        raise Refused(wire.FORGOTTEN)
    return wire.unpack_catalogue(state)


def embedding(public: wire.Catalogue) -> OptionEmbedding:
    """The catalogue's features as PluralLLM takes them."""
    ids = tuple(question.question_id for question in public.questions)
    return OptionEmbedding(ids, public.embedding_QKE, public.option_QK)


def groups(state: RecordDict) -> tuple[str, ...]:
    """The groups hosted here, in the order of all replies; see `catalogue` for what it raises."""
    if _GROUPS not in state:
        raise Refused(wire.FORGOTTEN)
    names = state.config_records[_GROUPS]["names"]
    return tuple(str(name) for name in names) if isinstance(names, list) else ()


def remember_data(state: RecordDict, data: GroupData, truth_QK: FloatArray) -> None:
    """Keep a group's training answers D_g, the one source of context, and apart from them all its answers.

    `truth_QK` holds every answer the group has, held-out ones too, and rows of NaN elsewhere; it is never context.
    """
    state[f"data {data.group}"] = wire.arrays_record(
        {"question": data.question_N, "answer": data.answer_NK, "truth": truth_QK}
    )


def data(state: RecordDict, group: str) -> GroupData:
    """The training answers D_g of a group."""
    arrays = _arrays(state, f"data {group}")
    return GroupData(group, arrays["question"], arrays["answer"])


def truth(state: RecordDict, group: str) -> FloatArray:
    """All of a group's own answers (Q, K), rows of NaN where it has none."""
    return _arrays(state, f"data {group}")["truth"]


def remember_exchange(state: RecordDict, exchange: Exchange) -> None:
    """Keep what the next step of the sums needs."""
    state[_EXCHANGE] = ConfigRecord(
        {"private": exchange.private, "public": list(exchange.public_keys), "done": exchange.steps_done}
    )


def exchange(state: RecordDict) -> Exchange:
    """How far the sums are; at the beginning where none has been asked for."""
    if _EXCHANGE not in state:
        return Exchange()
    record: Any = state.config_records[_EXCHANGE]
    return Exchange(record["private"], tuple(record["public"]), record["done"])


def remember_mean_of_others(state: RecordDict, group: str, mean_QK: FloatArray) -> None:
    """Keep the mean answer of the other groups, rows of 0 where it is unknown."""
    state[f"others {group}"] = wire.arrays_record({"mean": mean_QK})


def mean_of_others(state: RecordDict, group: str) -> FloatArray | None:
    """What `remember_mean_of_others` kept; None where there is none."""
    key = f"others {group}"
    return _arrays(state, key)["mean"] if key in state else None


def remember_targets(
    state: RecordDict, group: str, target_QK: FloatArray, interval_QK: tuple[FloatArray, FloatArray] | None = None
) -> None:
    """Keep the group's target table, and where the predictor has them, low and high ends of its intervals."""
    arrays = {"target": target_QK}
    if interval_QK is not None:
        arrays |= dict(zip(("low", "high"), interval_QK, strict=True))
    state[f"targets {group}"] = wire.arrays_record(arrays)


def has_targets(state: RecordDict, group: str) -> bool:
    """Whether the group's target table has been written in this run."""
    return f"targets {group}" in state


def targets(state: RecordDict, group: str) -> FloatArray:
    """The group's target table (Q, K); a UserError before it has been written."""
    if not has_targets(state, group):
        raise UserError("the target table has not been written: PluralLLM's final weights have not arrived")
    return _arrays(state, f"targets {group}")["target"]


def remember_weights(state: RecordDict, weights: ArrayRecord) -> None:
    """Keep the frozen PluralLLM, for runs that draw fresh contexts."""
    state[_WEIGHTS] = weights


def weights(state: RecordDict) -> ArrayRecord:
    """The frozen PluralLLM."""
    return state.array_records[_WEIGHTS]


def _arrays(state: RecordDict, key: str) -> dict[str, npt.NDArray[Any]]:
    return wire.numpy_arrays(state.array_records[key])
