"""Messages of secure sums: their fields, to and from Flower records. What is summed is named, the same for all groups.

Every request brings the roster's file, so that a node needs to remember none.

Axis letters: J scored answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from appa_flwr.config import Config
from appa_flwr.protocol import wire
from appa_flwr.secure.messages import Masked, Prepared, Task, Unmasking
from appa_flwr.secure.primitives import framed
from appa_flwr.secure.roster import Roster
from appa_flwr.secure.terms import Public

REWARDS, WEIGHTS = "rewards", "weights"
TRAINING, VALIDATION, PREDICTOR_SCORES = "training", "validation", "predictor scores"
VOTES, PREDICTIONS, DISTRIBUTIONS = "votes", "predictions", "distributions"
SCORES = "scores"
"""What is summed: terms of a rule and its weights, PluralLLM's steps, errors and scores, votes of three kinds, and
scores of answers."""

LARGEST_WEIGHT_STEP, LARGEST_LOSS = 16.0, 64.0
"""Of a group in one round, a weight of PluralLLM; clipped at the group, so that it fits into a word."""

MOST_AHEAD = 1024
"""Rounds that are sealed at a time, at the most."""

_NUMBERS = ("history", "lead", "reference")  # of `Public`
_NOT_OF_GROUPS = ("run-name", "run", "policy", "lora", "sft", "rollout", "ppo", "eval", "serve")
"""Keys and sections of the config that no number of a group depends on; but on `sft.target` its votes do."""

_HEAD, _STANDINGS, _RULE, _FORMAT = "sum", "standings", "rule", "format"
_NAMES, _WORDS, _BOXES, _RELEASED, _SEEDS = "names", "words", "boxes", "released", "seeds"


@dataclass(frozen=True)
class Ahead:
    """A request to seal rounds ahead: so many from the first on."""

    session: str
    first: int
    count: int
    roster: bytes


@dataclass(frozen=True, eq=False)
class Asked:
    """A request for a group's part of a sum.

    Attributes:
        task: the round; its `request` is the hash of what is summed.
        what: its name.
        content: what it depends on.
        world: see `world_of`.
        standings: group -> what it gave the server to keep for it.
        roster: the file.
    """

    task: Task
    what: str
    content: RecordDict
    world: str
    standings: Mapping[str, bytes]
    roster: bytes


@dataclass(frozen=True, eq=False)
class Part:
    """A group's reply to it.

    Attributes:
        masked: the words.
        standing: what it keeps with the server for itself, under its own key; empty where there is nothing.
        released: numbers of its own that its owner lets out beside the sum.
    """

    masked: Masked
    standing: bytes = b""
    released: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class RuleTerms:
    """What a group needs to know to add its terms to a rule's sums; without answers, for its weight alone.

    Attributes:
        run: the run's name, in which it has one standing for each rule.
        rule: of `appa_flwr.secure.terms`.
        public: what all groups know.
        format_score_J: in [0, 1].
        parsed_J: False for an answer that is worth nothing.
    """

    run: str
    rule: str
    public: Public
    format_score_J: npt.NDArray[np.float64] | None = None
    parsed_J: npt.NDArray[np.bool_] | None = None


def world_of(config: Config, catalogue: str, targets: str) -> str:
    """Hash of what a group's numbers rest on beside a request: the config and, by their hashes, setup messages.

    A server that gave the others another config, catalogue or PluralLLM could know what they add, and take it off.
    """
    keys = {key: value for key, value in config.flat().items() if key.partition(".")[0] not in _NOT_OF_GROUPS}
    given = json.dumps([keys | {"sft.target": config.sft.target}, catalogue, targets], sort_keys=True)
    return hashlib.sha256(given.encode()).hexdigest()


def request_of(what: str, content: RecordDict, world: str) -> str:
    """Hash of what is summed: groups that are asked different things have no masks in common."""
    return hashlib.sha256(framed(what, world, wire.digest(content))).hexdigest()


def pack_public_keys(key_of: Mapping[str, bytes], roster: bytes) -> RecordDict:
    """Group -> public key of the groups of a node, and the roster's file where the node has it."""
    head = ConfigRecord({_NAMES: list(key_of), "keys": list(key_of.values()), "roster": roster})
    return RecordDict({_HEAD: head})


def unpack_public_keys(content: RecordDict) -> tuple[dict[str, bytes], bytes]:
    """The inverse; a ValueError where it cannot be one."""
    with wire.following_the_protocol("a reply with keys"):
        head = content.config_records[_HEAD]
        return dict(zip(texts(head[_NAMES]), boxes_of(head["keys"]), strict=True)), _bytes(head["roster"])


def pack_ahead(asked: Ahead) -> RecordDict:
    """Request -> records."""
    return RecordDict({_HEAD: ConfigRecord({**vars(asked)})})


def unpack_ahead(content: RecordDict) -> Ahead:
    """Records -> request; a ValueError where `pack_ahead` cannot have made them."""
    with wire.following_the_protocol("a request to seal rounds ahead"):
        head = content.config_records[_HEAD]
        return Ahead(str(head["session"]), int(str(head["first"])), int(str(head["count"])), _bytes(head["roster"]))


def pack_prepared(by_group: Mapping[str, Sequence[Prepared]], roster: Roster) -> RecordDict:
    """Group -> what it has sealed for each round -> records."""
    records = RecordDict({_HEAD: ConfigRecord({_NAMES: list(by_group)})})
    for place, (name, rounds) in enumerate(by_group.items()):
        boxes = [one.boxes[holder] for one in rounds for holder in roster.holders(name)]
        records[f"{_BOXES} {place}"] = ConfigRecord({_SEEDS: [one.sealed_seeds for one in rounds], _BOXES: boxes})
    return records


def unpack_prepared(content: RecordDict, roster: Roster) -> dict[str, list[Prepared]]:
    """The inverse; a ValueError where `pack_prepared` cannot have made them."""
    found = {}
    with wire.following_the_protocol("a reply of rounds sealed ahead"):
        for place, name in enumerate(texts(content.config_records[_HEAD][_NAMES])):
            record, holders = content.config_records[f"{_BOXES} {place}"], roster.holders(name)
            seeds, boxes = boxes_of(record[_SEEDS]), boxes_of(record[_BOXES])
            if len(boxes) != len(seeds) * len(holders):
                raise ValueError("another number of boxes")
            size = len(holders)
            found[name] = [
                Prepared(seed, dict(zip(holders, boxes[n * size : (n + 1) * size], strict=True)))
                for n, seed in enumerate(seeds)
            ]
    return found


def pack_asked(asked: Asked) -> RecordDict:
    """Request -> records."""
    head = {"what": asked.what, "world": asked.world, "roster": asked.roster, **_task_fields(asked.task)}
    standings = ConfigRecord({_NAMES: list(asked.standings), _BOXES: list(asked.standings.values())})
    return RecordDict({_HEAD: ConfigRecord({**head}), _STANDINGS: standings, **asked.content})


def unpack_asked(content: RecordDict) -> Asked:
    """Records -> request, hashed anew; a ValueError where `pack_asked` cannot have made them."""
    with wire.following_the_protocol("a request for a part of a sum"):
        head, kept = content.config_records[_HEAD], content.config_records[_STANDINGS]
        of = RecordDict({name: record for name, record in content.items() if name not in (_HEAD, _STANDINGS)})
        what, world = str(head["what"]), str(head["world"])
        standings = dict(zip(texts(kept[_NAMES]), boxes_of(kept[_BOXES]), strict=True))
        task = _task(head, request_of(what, of, world))
        return Asked(task, what, of, world, standings, _bytes(head["roster"]))


def pack_parts(parts: Mapping[str, Part], roster: Roster) -> RecordDict:
    """Group -> its part -> records."""
    head = ConfigRecord({_NAMES: list(parts), _STANDINGS: [part.standing for part in parts.values()]})
    records = RecordDict({_HEAD: head})
    records[_WORDS] = wire.arrays_record({str(n): part.masked.words for n, part in enumerate(parts.values())})
    for n, (name, part) in enumerate(parts.items()):
        records[f"{_BOXES} {n}"] = ConfigRecord({_BOXES: [part.masked.boxes[h] for h in roster.holders(name)]})
        if part.released:
            records[f"{_RELEASED} {n}"] = MetricRecord({**part.released})
    return records


def unpack_parts(content: RecordDict, roster: Roster) -> dict[str, Part]:
    """Records -> parts; a ValueError where `pack_parts` cannot have made them."""
    found = {}
    with wire.following_the_protocol("a reply with parts of a sum"):
        names, kept = (texts(content.config_records[_HEAD][_NAMES]), content.config_records[_HEAD][_STANDINGS])
        words = wire.numpy_arrays(content.array_records[_WORDS])
        for n, (name, standing) in enumerate(zip(names, boxes_of(kept), strict=True)):
            boxes = boxes_of(content.config_records[f"{_BOXES} {n}"][_BOXES])
            released = content.metric_records.get(f"{_RELEASED} {n}", MetricRecord())
            numbers = {key: float(str(value)) for key, value in released.items()}
            masked = Masked(words[str(n)], dict(zip(roster.holders(name), boxes, strict=True)))
            found[name] = Part(masked, standing, numbers)
    return found


def pack_unmasking(task: Task, requests: Mapping[str, Unmasking], roster: bytes) -> RecordDict:
    """The second request to the groups of one node -> records."""
    answered = list(next(iter(requests.values())).answered)
    head = ConfigRecord({"request": task.request, "roster": roster, **_task_fields(task)})
    head["answered"], head[_NAMES] = answered, list(requests)
    records = RecordDict({_HEAD: head})
    for n, of in enumerate(requests.values()):
        records[f"{_BOXES} {n}"] = ConfigRecord({_NAMES: list(of.boxes), _BOXES: list(of.boxes.values())})
    return records


def unpack_unmasking(content: RecordDict) -> tuple[Task, dict[str, Unmasking], bytes]:
    """Records -> the task, each group's request, the roster's file; a ValueError where they cannot be such."""
    with wire.following_the_protocol("a request to unmask"):
        head = content.config_records[_HEAD]
        requests, answered = {}, tuple(texts(head["answered"]))
        for n, name in enumerate(texts(head[_NAMES])):
            of = content.config_records[f"{_BOXES} {n}"]
            requests[name] = Unmasking(answered, dict(zip(texts(of[_NAMES]), boxes_of(of[_BOXES]), strict=True)))
        return _task(head, str(head["request"])), requests, _bytes(head["roster"])


def pack_shares(by_group: Mapping[str, Mapping[str, bytes]]) -> RecordDict:
    """Group -> whose secret -> its share -> records."""
    records = RecordDict({_HEAD: ConfigRecord({_NAMES: list(by_group)})})
    for n, shares in enumerate(by_group.values()):
        records[f"{_BOXES} {n}"] = ConfigRecord({_NAMES: list(shares), _BOXES: list(shares.values())})
    return records


def unpack_shares(content: RecordDict) -> dict[str, dict[str, bytes]]:
    """Records -> shares; a ValueError where `pack_shares` cannot have made them."""
    with wire.following_the_protocol("a reply with shares"):
        return {
            name: dict(zip(texts(of[_NAMES]), boxes_of(of[_BOXES]), strict=True))
            for n, name in enumerate(texts(content.config_records[_HEAD][_NAMES]))
            for of in (content.config_records[f"{_BOXES} {n}"],)
        }


def pack_rule_terms(given: RuleTerms) -> RecordDict:
    """Rule terms -> records; those of the answers are beside them (`wire.pack_score_request`)."""
    public = given.public
    numbers = {name: float(getattr(public, name)) for name in _NUMBERS}
    by = [float(number) for pair in public.moves.values() for number in pair]
    head = ConfigRecord({"run": given.run, "rule": given.rule, "iteration": public.iteration, **numbers})
    head["moves"], head["by"] = list(public.moves), by
    records = RecordDict({_RULE: head})
    if given.format_score_J is not None and given.parsed_J is not None:
        records[_FORMAT] = wire.arrays_record({"score": given.format_score_J, "parsed": given.parsed_J})
    return records


def unpack_rule_terms(content: RecordDict) -> RuleTerms:
    """Records -> rule terms; a ValueError where `pack_rule_terms` cannot have made them."""
    with wire.following_the_protocol("a rule's terms"):
        head = content.config_records[_RULE]
        numbers = {name: float(str(head[name])) for name in _NUMBERS}
        by = [float(number) for number in _list(head["by"])]
        pairs = zip(map(int, _list(head["moves"])), zip(by[::2], by[1::2], strict=True), strict=True)
        public = Public(int(str(head["iteration"])), **numbers, moves=dict(pairs))
        arrays = wire.numpy_arrays(content.array_records[_FORMAT]) if _FORMAT in content else {}
        return RuleTerms(str(head["run"]), str(head["rule"]), public, arrays.get("score"), arrays.get("parsed"))


def _task_fields(task: Task) -> dict[str, str | int | list[str]]:
    return {"session": task.session, "round": task.round, "cohort": list(task.cohort), "count": task.count}


def _task(head: ConfigRecord, request: str) -> Task:
    cohort = tuple(texts(head["cohort"]))
    return Task(str(head["session"]), int(str(head["round"])), cohort, request, int(str(head["count"])))


def _list(value: object) -> list[float]:
    if not isinstance(value, list):
        raise TypeError("expected a list")
    return value


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("expected bytes")
    return value


def texts(value: object) -> list[str]:
    """A list of names of a record; a TypeError where it is none."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError("expected a list of names")
    return value


def boxes_of(value: object) -> list[bytes]:
    """A list of byte strings of a record; a TypeError where it is none."""
    if not isinstance(value, list) or not all(isinstance(item, bytes) for item in value):
        raise TypeError("expected a list of bytes")
    return value
