"""Every message of a run searched for private values, and what a reply may hold.

`audit` holds each reply against what its request asks for and against the ledger, and looks for the private answers, as
numbers of any precision, as text and as raw bytes, and for the private texts of the files.

Axis letters: Q public questions, K options.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord
from flwr.common.serde import message_to_proto, recorddict_to_proto
from flwr.serverapp.exception import AggregationError
from in_process import Crossed, InProcessGrid, at_home, deployed, flower_task
from small import SMALLEST, keys_of

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.owner.ledger import Ledger
from appa_flwr.owner.owner_policy import OwnerPolicy, read_owner_policy
from appa_flwr.protocol import asks, messages, refusals
from appa_flwr.protocol.asks import Ask, Catalogue, ScoreRequest
from appa_flwr.survey.types import Survey
from pluralllm.scores import summed
from server_app.federation.grid import OverlapGrid
from server_app.federation.groups import Groups
from server_app.predictor.pretraining import initial_weights, pretrain
from server_app.questions import build_catalogue, run_survey

KINDS = (asks.VOTES, asks.UPDATE, asks.VALIDATION, asks.SCORES, asks.REWARDS)

DIARY = "CANARYdiary"
HIDDEN_QUESTION = "CANARYquestion"
SMALL = 0.001  # shares under this are few, and their digits as text are mostly zeros
TOLERANCE = 1e-6  # float32 keeps a share to 6e-8; a shared value by chance is as good as impossible in a whole row


@dataclass(frozen=True)
class World:
    """A survey whose every private value can be told from all others."""

    config: Config  # a run on its public questions
    files: dict[str, Path]  # group -> its private file
    answers: dict[str, dict[str, np.ndarray]]  # group -> question id -> distribution (K,), no value twice
    texts: tuple[str, ...]  # strings that stand in private files only

    @property
    def rows(self) -> list[np.ndarray]:
        """All private distributions."""
        return [row for mine in self.answers.values() for row in mine.values()]


def make_world(folder: Path, **changes: object) -> World:
    keys = {"eval.ceilings": True, "run.output-dir": str(folder / "runs"), "run-name": "r", **keys_of(changes)}
    config = Config.load({**SMALLEST, **keys})
    plain = run_survey(config)
    rng = np.random.default_rng(20)
    answers = {
        group: {key: rng.dirichlet(np.full(len(shares), 2.0)) for key, shares in mine.items()}
        for group, mine in plain.answers.items()
    }
    config, files = at_home(Survey(plain.questions, answers), folder / "split", config)
    texts = []
    for group, path in files.items():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for n, row in enumerate(rows):
            texts.append(f"{DIARY}-{group}-{n}")
            row["comment"] = texts[-1]
        texts.append(f"{HIDDEN_QUESTION}-{group}")
        own = {"question_id": texts[-1], "question": texts[-1], "options": [texts[-1], "x"], "group": group}
        rows.append({**own, "distribution": [0.1357913, 0.8642087]})
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return World(config, dict(files), answers, tuple(texts))


FIELDS = {messages.CATALOGUE: {"answered": int, "may": str, "noise": float}}
"""What each kind of reply holds beside the group's name and numbers: lists of these types."""


def asked_for(asked: Crossed) -> str:
    """The kind of numbers that a request asks for; the kind of message where it asks for none."""
    return messages.unpack_ask(asked.message.content)[0].kind if asked.kind == messages.ASK else asked.kind


def words_for(asked: Crossed, policy: OwnerPolicy) -> str:
    """The words of the owner's policy for the numbers that a request asks for."""
    kind = asked_for(asked)
    if kind in (asks.UPDATE, asks.VALIDATION, asks.SCORES):
        return "training"
    sides = messages.unpack_ask(asked.message.content)[0].settings.get("sides", [])
    return f"{kind}, truth" if "truth" in sides and policy.may("truth") else kind


def audit(grid: InProcessGrid, world: World) -> list[str]:
    """What is wrong with the replies, one line a finding; empty when only the protocol's fields left the groups."""
    public = build_catalogue(world.config)
    group_of = dict(zip(grid.contexts, world.files, strict=True))
    findings = []
    for asked, reply in zip(grid.requests, grid.replies, strict=True):
        group = group_of[asked.message.metadata.dst_node_id]
        wrong = [*structure(asked, reply, group=group, public=public), *private_values(asked, reply, world)]
        findings += [f"{group}, {asked_for(asked)}: {finding}" for finding in wrong]
    return findings + [f"{group}: its ledger differs" for group in unaccounted(grid, world)]


def unaccounted(grid: InProcessGrid, world: World) -> Iterator[str]:
    """Groups whose ledger has not each reply in its order: kind, how many numbers and hash, or that it was refused."""
    refused = ("", 0, "")
    policies = {node: read_owner_policy(Path(str(own.node_config["policy"]))) for node, own in grid.contexts.items()}
    for node, (group, path) in zip(grid.contexts, world.files.items(), strict=True):
        left, policy = [], policies[node]
        for asked, reply in zip(grid.requests, grid.replies, strict=True):
            if reply.message.metadata.src_node_id != node:
                continue
            if reply.message.has_error():
                left.append(refused)
                continue
            kind = words_for(asked, policy) if asked.kind == messages.ASK else asked.kind.partition(".")[2]
            content = reply.message.content
            numbers = sum(array.numpy().size for record in content.array_records.values() for array in record.values())
            data = recorddict_to_proto(content).SerializeToString(deterministic=True)
            left.append((kind, numbers, hashlib.sha256(data).hexdigest()))
        lines = Ledger(path.with_suffix(".ledger.sqlite")).releases()
        if [refused if line.refused else (line.kind, line.numbers, line.sha256) for line in lines] != left:
            yield group


def structure(asked: Crossed, reply: Crossed, *, group: str, public: Catalogue) -> Iterator[str]:
    """Everything in a reply that its request does not ask for."""
    if message_to_proto(reply.message).SerializeToString(deterministic=True) != reply.data:
        yield "bytes that no field of Flower's messages accounts for"
    if reply.message.has_error():
        error = reply.message.error
        plain = re.fullmatch(r"\w+ failed: [A-Za-z]+ \(details are in the group's own log\)", error.reason or "")
        if not plain if error.code == refusals.FAILED else refusals.REFUSALS.get(error.code) != error.reason:
            yield f"an error in its own words: {error.reason}"
        return
    content, numbers, fields = reply.message.content, None, {}
    if asked.kind == messages.ASK:
        numbers = content.array_records["arrays"]["numbers"].numpy()
        yield from numbers_in(asked, numbers, public)
    for name, kind in FIELDS.get(asked.kind, {}).items():
        fields[name] = asks.typed(content.config_records["head"][name], (kind,))
    if not {*fields.get("may", ())} <= {*refusals.MAY_NOT_LEAVE, asks.TRUTH_SIDE}:
        yield "words that are none of the policy's"
    if content != messages.pack_reply([group], numbers, **fields):
        yield "more than was asked for"


def numbers_in(asked: Crossed, numbers: np.ndarray, public: Catalogue) -> Iterator[str]:
    """Other numbers than were asked for."""
    ask, _ = messages.unpack_ask(asked.message.content)
    shapes = asks.layouts_of(ask, public)
    try:
        own = {name: array[0] for name, array in asks.split(numbers, shapes).items()}
        asks.flatten(own, shapes)
    except ValueError as error:
        yield str(error)
        return
    if ask.kind == asks.VOTES and not np.isin(own["votes"], np.arange(public.option_QK.shape[1] + 1)).all():
        yield "a vote that is none"


def private_values(asked: Crossed, reply: Crossed, world: World) -> Iterator[str]:
    """Private texts and numbers in a reply, wherever they stand."""
    yield from texts_in(reply.data, world)
    if reply.message.has_error():
        return
    shares = np.unique(np.concatenate(world.rows))
    # Weights are so many that single ones meet a share by chance, and a reward against the group's own answer can be a
    # share of it (one-hot answer, two options, Wasserstein): whole rows tell there.
    derived = asked_for(asked) in (asks.UPDATE, asks.REWARDS)
    for name, record in reply.message.content.items():
        if isinstance(record, ArrayRecord):
            for key, array in record.items():
                value = array.numpy()
                if any(holds(value, row) for row in world.rows):
                    yield f"a private answer in {name} {key}"
                if not derived and np.isin(value.astype(np.float64), shares).any():
                    yield f"a private share in {name} {key}"
        else:
            floats = np.array([x for v in record.values() for x in np.ravel(v) if isinstance(x, float)])
            if (np.abs(floats[:, None] - shares) < TOLERANCE * shares).any():
                yield f"a private share in {name}"


def texts_in(data: bytes, world: World) -> Iterator[str]:
    """Private texts, and private shares written as text."""
    for text in (DIARY, HIDDEN_QUESTION):
        if text.encode() in data:
            yield f"the private text {text}"
    for row in world.rows:
        # the point and six digits, cut and not rounded, however many were written
        if any(f"{share:.12f}"[1:8].encode() in data for share in row if share > SMALL):
            yield f"a private answer as text, {row}"


def holds(value: np.ndarray, row: np.ndarray) -> bool:
    """Whether the row stands in the array, along any axis and in any precision down to float32."""
    if not np.issubdtype(value.dtype, np.number) or value.size < len(row):
        return False
    for flat in (value.ravel(), value.T.ravel()):
        (starts,) = np.nonzero(np.abs(flat[: flat.size - len(row) + 1] - row[0]) < TOLERANCE)
        if any(np.abs(flat[start : start + len(row)] - row).max() < TOLERANCE for start in starts):
            return True
    return False


def talk(grid: InProcessGrid, config: Config) -> None:
    """Every kind of message once, from the server's own code, without a language model.

    Raises:
        UserError: the server refuses a message.
        AggregationError: of Flower's, for the same reason.
    """
    catalogue = build_catalogue(config)
    option_QK = catalogue.option_QK
    uniform_QK = option_QK / option_QK.sum(1, keepdims=True)
    metrics = ("borda",) if config.task == "opa" else ("js", "wasserstein", "cosine")
    held_out = np.flatnonzero(catalogue.held_out_Q)
    with flower_task():
        groups = Groups(OverlapGrid(grid), config)
        groups.members.gather([str(context.node_config["group"]) for context in grid.contexts.values()], patience=0.0)
        groups.send_catalogue(catalogue)
        weights, _ = pretrain(groups, config, initial_weights(config), progress=lambda step, of, loss: None)
        groups.send_targets(weights)
        groups.ask(Ask(asks.SCORES, {}, {"size": len(summed())}))
        groups.ask(Ask(asks.VOTES))
        request = ScoreRequest(held_out, uniform_QK[held_out], metrics, (asks.TARGET_SIDE, asks.TRUTH_SIDE))
        groups.ask(request.ask())


def talked(world: World) -> InProcessGrid:
    """A talk without a language model; ends early where the server refuses a message."""
    grid = InProcessGrid(deployed(world.config, world.files))
    with contextlib.suppress(UserError, AggregationError):
        talk(grid, world.config)
    return grid
