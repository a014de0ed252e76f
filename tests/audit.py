"""What a reply may hold, and every reply of a run held against it.

`audit` makes each reply anew from its numbers and the fields that its request asks for, which must give the same bytes;
so nothing private can stand in it but among its numbers, and these are searched for the private answers. It also holds
each reply against the group's ledger.

Axis letters: Q public questions, K options.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flwr.common.serde import message_to_proto, recorddict_to_proto
from nodes import Crossed, InProcessGrid, at_home
from small import SMALLEST

from appa_flwr.config import Config
from appa_flwr.owner.ledger import Ledger
from appa_flwr.owner.owner_policy import OwnerPolicy, read_owner_policy
from appa_flwr.protocol import messages, queries, refusals
from appa_flwr.protocol.queries import Catalogue
from appa_flwr.survey.types import Survey
from server_app.questions import build_catalogue, run_survey

DIARY = "CANARYdiary"
HIDDEN_QUESTION = "CANARYquestion"
TOLERANCE = 1e-6  # float32 keeps a share to 6e-8; a shared value by chance is as good as impossible in a whole row


@dataclass(frozen=True)
class World:
    """A survey whose every private value can be told from all others."""

    config: Config  # a run on its public questions
    files: dict[str, Path]  # group -> its private file
    rows: list[np.ndarray]  # all private distributions, no value twice


def make_world(folder: Path) -> World:
    """Private files with texts that stand nowhere else, in each row and as a question that is not public."""
    keys = {"eval.ceilings": True, "run.output-dir": str(folder / "runs"), "run-name": "r"}
    config = Config.load({**SMALLEST, **keys})
    plain = run_survey(config)
    rng = np.random.default_rng(20)
    answers = {
        group: {key: rng.dirichlet(np.full(len(shares), 2.0)) for key, shares in mine.items()}
        for group, mine in plain.answers.items()
    }
    config, files = at_home(Survey(plain.questions, answers), folder / "split", config)
    for group, path in files.items():
        rows = [json.loads(line) | {"comment": DIARY} for line in path.read_text().splitlines()]
        own = {"question_id": HIDDEN_QUESTION, "question": HIDDEN_QUESTION, "options": [HIDDEN_QUESTION, "x"]}
        rows.append({**own, "group": group, "distribution": [0.1357913, 0.8642087]})
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return World(config, dict(files), [row for mine in answers.values() for row in mine.values()])


FIELDS = {
    messages.CATALOGUE: {"answered": int, "may": str, "noise": float},
    messages.TARGETS: {"by_mean": int},
}
"""What each kind of reply holds beside the group's name and numbers: lists of these types."""


def asked_for(asked: Crossed) -> str:
    """The kind of numbers that a request asks for; the kind of message where it asks for none."""
    return messages.unpack_query(asked.message.content)[0].kind if asked.kind == messages.ASK else asked.kind


def words_for(asked: Crossed, policy: OwnerPolicy) -> str:
    """The ledger's words for what a reply holds: those of the owner's policy for its numbers."""
    if asked.kind != messages.ASK:
        return asked.kind.partition(".")[2]
    query, _ = messages.unpack_query(asked.message.content)
    if query.kind in (queries.UPDATE, queries.VALIDATION, queries.SCORES):
        return "training"
    return (
        f"{query.kind}, truth"
        if "truth" in query.settings.get("references", []) and policy.may("truth")
        else query.kind
    )


def audit(grid: InProcessGrid, world: World) -> list[str]:
    """What is wrong with the replies, one line a finding; empty when only the protocol's fields left the groups."""
    public = build_catalogue(world.config)
    findings = []
    for (group, path), (node, context) in zip(world.files.items(), grid.contexts.items(), strict=True):
        policy, written = read_owner_policy(Path(str(context.node_config["policy"]))), []
        for asked, reply in zip(grid.requests, grid.replies, strict=True):
            if reply.message.metadata.src_node_id != node:
                continue
            wrong = [*structure(asked, reply, group=group, public=public), *private_numbers(asked, reply, world)]
            findings += [f"{group}, {asked_for(asked)}: {finding}" for finding in wrong]
            written.append(release(reply, words_for(asked, policy)))
        lines = Ledger(path.with_suffix(".ledger.sqlite")).releases()
        if [("", 0, "") if line.refused else (line.kind, line.numbers, line.sha256) for line in lines] != written:
            findings.append(f"{group}: its ledger differs")
    return findings


def release(reply: Crossed, words: str) -> tuple[str, int, str]:
    """What the ledger must have of a reply: its words, how many numbers and hash, or nothing of a refusal."""
    if reply.message.has_error():
        return "", 0, ""
    content = reply.message.content
    numbers = sum(array.numpy().size for record in content.array_records.values() for array in record.values())
    return (
        words,
        numbers,
        hashlib.sha256(recorddict_to_proto(content).SerializeToString(deterministic=True)).hexdigest(),
    )


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
        fields[name] = queries.typed(content.config_records["head"][name], (kind,))
    if not {*fields.get("may", ())} <= {*refusals.MAY_NOT_LEAVE, queries.TRUTH_REFERENCE}:
        yield "words that are none of the policy's"
    if content != messages.pack_reply([group], numbers, **fields):
        yield "more than was asked for"


def numbers_in(asked: Crossed, numbers: np.ndarray, public: Catalogue) -> Iterator[str]:
    """Other numbers than were asked for."""
    query, _ = messages.unpack_query(asked.message.content)
    shapes = queries.layouts_of(query, public)
    try:
        own = {name: array[0] for name, array in queries.split(numbers, shapes).items()}
        queries.flatten(own, shapes)
    except ValueError as error:
        yield str(error)
        return
    if query.kind == queries.VOTES and not np.isin(own["votes"], np.arange(public.option_QK.shape[1] + 1)).all():
        yield "a vote that is none"


def private_numbers(asked: Crossed, reply: Crossed, world: World) -> Iterator[str]:
    """Private answers, and single shares of them, among a reply's numbers in any precision down to float32."""
    if asked.kind != messages.ASK or reply.message.has_error():
        return
    numbers = reply.message.content.array_records["arrays"]["numbers"].numpy().ravel()
    for row in world.rows:
        (starts,) = np.nonzero(np.abs(numbers[: numbers.size - len(row) + 1] - row[0]) < TOLERANCE)
        if any(np.abs(numbers[start : start + len(row)] - row).max() < TOLERANCE for start in starts):
            yield "a private answer"
    # Weights are so many that single ones meet a share by chance, and a reward against the group's own answer can be a
    # share of it (one-hot answer, two options, Wasserstein): whole rows tell there.
    if asked_for(asked) not in (queries.UPDATE, queries.REWARDS) and np.isin(numbers, np.concatenate(world.rows)).any():
        yield "a private share"
