"""How cost grows with groups and questions: CPU time, memory and messages of a node and of the server, no policy.

    OMP_NUM_THREADS=1 python -m experiments.scale [--beside CHECKOUT]

The survey is the generated one, its questions repeated with a number. Node: the real ClientApp of one deployed group, a
process for each message, as Flower starts them. Server: its own code, and as many groups in its process, whose numbers
are drawn when it looks for them. Memory is the peak above what the process had before. `--beside` measures another
checkout of this repository too.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import pandas as pd
import typer
from flwr.app import Context, Message, Metadata, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID

from appa_flwr.config import Config
from appa_flwr.core import markdown
from appa_flwr.protocol import messages, queries
from appa_flwr.run import pair_scores
from appa_flwr.survey import store
from appa_flwr.survey.generate import generate
from appa_flwr.survey.types import Question, Survey
from client_app.main import app
from experiments import entry
from server_app.federation.grid import OverlapGrid
from server_app.federation.groups import Groups
from server_app.federation.members import FIELDS
from server_app.predictor.pretraining import initial_weights, pretrain
from server_app.questions import build_catalogue

GROUPS, QUESTIONS, ANSWERS = (8, 64, 256, 1000), (400, 2000, 10_000), 384  # answers of a PPO iteration
NODE = {"node: catalogue": messages.CATALOGUE, "node: targets": messages.TARGETS, "node: rewards": messages.ASK}
CATALOGUE, TARGETS, ASK = NODE
GREETING, ROUND, REWARDS, SCORES = (f"server: {part}" for part in ("greeting", "PluralLLM", "rewards", "scores"))
METHODS, HELD_OUT = 8, 80  # of the file of scores
COLUMNS = ("CPU s", "MiB", "bytes to", "bytes from")  # bytes a group


def config_of(folder: Path) -> Config:
    """Config of a run on the survey in this folder."""
    return Config.load({"pluralllm.rounds": 1, "survey": str(folder / "g.jsonl")})


def prepare(folder: Path, questions: int) -> None:
    """Write a group's survey of so many questions, and the messages to the group."""
    drawn = generate(num_questions=QUESTIONS[0], num_groups=2)
    chosen, answers, mine = list[Question](), dict[str, Any](), drawn.answers[drawn.groups[0]]
    for turn, q in itertools.product(range(questions // QUESTIONS[0]), drawn.questions):
        chosen.append(Question(f"{q.question_id}-{turn}", f"{q.text} ({turn})", q.options, q.ordinal))
        if q.question_id in mine:
            answers[chosen[-1].question_id] = mine[q.question_id]
    store.write(Survey(tuple(chosen), {"g": answers}), folder / "g.jsonl")
    (folder / "policy.toml").write_text('may-leave = ["predictions", "training", "rewards"]')
    config = config_of(folder)
    public = build_catalogue(config)
    contents = [messages.pack_catalogue(public), messages.pack_weights(initial_weights(config))]
    digest = queries.query_digest(rewards(public), queries.context_hash(config, *map(messages.digest, contents)))
    for name, content in zip(NODE, (*contents, messages.pack_query(rewards(public), digest)), strict=True):
        (folder / name).write_bytes(messages.to_bytes(content))


def rewards(public: queries.Catalogue) -> queries.Query:
    """The request for the rewards of uniform answers."""
    question_J = np.arange(ANSWERS) % len(public.questions)
    answer_QK = public.option_QK / public.option_QK.sum(axis=1, keepdims=True)
    return queries.RewardQuery(question_J, answer_QK[question_J], ("js",)).query()


def message(kind: str, content: RecordDict, node: int) -> Message:
    """A message of the server, made outside of Flower's processes."""
    about = Metadata(1, str(node), SUPERLINK_NODE_ID, node, "", "", time.time(), 1e6, kind)
    return cast(Message, cast(Any, Message)(metadata=about, content=content))


class Nodes:
    """A node for each group; what the server needs of `flwr.serverapp.Grid`."""

    def __init__(self, groups: int, public: queries.Catalogue) -> None:
        self.names, self._public, self._sent = [f"g{g}" for g in range(groups)], public, dict[str, Message]()

    def create_message(self, content: RecordDict, kind: str, node: int, *_: object) -> Message:
        """See Grid."""
        return message(kind, content, node)

    def get_node_ids(self) -> Iterable[int]:
        """See Grid."""
        return range(1, len(self.names) + 1)

    def push_messages(self, sent: Iterable[Message]) -> Iterable[str]:
        """See Grid."""
        self._sent = {each.metadata.message_id: each for each in sent}
        return [*self._sent]

    def pull_messages(self, keys: Iterable[str]) -> Iterable[Message]:
        """See Grid."""
        return [Message(self._reply(each), reply_to=each) for each in map(self._sent.pop, keys)]

    def _reply(self, sent: Message) -> RecordDict:
        node, kind, count = sent.metadata.dst_node_id, sent.metadata.message_type, float(self._public.train_Q.sum())
        names = [self.names[node - 1]]
        if kind != messages.ASK:
            fields: dict[str, Any] = {
                "answered": [int(count)],
                "may": ["training", "rewards"],
                "noise": [],
                "by_mean": [0],
            }
            return messages.pack_reply(names, **{name: fields[name] for name in FIELDS.get(kind, ())})
        layouts = queries.layouts_of(messages.unpack_query(sent.content)[0], self._public)
        values: dict[str, Any] = {name: np.ones(layout.shape) for name, layout in layouts.items()}
        if "step" in layouts:
            step = np.random.default_rng(node).normal(0.0, 0.01 * count, layouts["step"].shape)
            values |= {"step": step, "answers": [count]}
        return messages.pack_reply(names, queries.flatten(values, layouts)[None])


def do(folder: Path, part: str, groups: int) -> dict[str, float]:
    """Do a part in this process; return its CPU seconds, its memory in MiB and the bytes a group, both ways."""
    config, traffic = config_of(folder), dict[str, float]()
    received = (folder / part if part in NODE else folder / CATALOGUE).read_bytes()
    content = messages.from_bytes(received)
    if part in NODE:
        about: dict[str, Any] = {"group": "g", "data": str(folder / "g.jsonl"), "policy": str(folder / "policy.toml")}
        sent, context = message(NODE[part], content, 1), Context(1, 1, about, RecordDict(), dict(config.flat()))
    else:
        public = messages.unpack_catalogue(content)
        ours = Groups(OverlapGrid(cast(Any, Nodes(groups, public))), config, replies=folder / "replies")
        names, weights = [f"g{g}" for g in range(groups)], initial_weights(config)
        if part in (ROUND, REWARDS):
            ours.members.gather(names, patience=0.0)
            ours.send_catalogue(public)
        if part == REWARDS:
            ours.send_targets(weights)
        ours.grid.traffic.clear()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, began = memory("VmRSS"), time.process_time()
    if part in NODE:
        reply = app(sent, context)
        traffic = {"bytes to": len(received), "bytes from": len(messages.to_bytes(reply.content))}
    elif part == GREETING:
        ours.members.gather(names, patience=0.0)
        ours.send_catalogue(public)
    elif part == ROUND:
        pretrain(ours, config, weights, progress=lambda *_: None)
    elif part == REWARDS:
        ours.ask(rewards(public))
    else:
        ids, reward_GQ = [str(q) for q in range(HELD_OUT)], np.random.default_rng(0).random((groups, HELD_OUT))
        as_rows = partial(pair_scores.as_rows, metric="js", against="survey", groups=names, questions=ids)
        pair_scores.put(folder, pd.concat([as_rows(str(m), reward_GQ=reward_GQ) for m in range(METHODS)]))
    if part in (GREETING, ROUND, REWARDS):
        counted = ours.grid.traffic
        traffic = {"bytes to": counted["bytes_sent"] / groups, "bytes from": counted["bytes_received"] / groups}
    return {"CPU s": time.process_time() - began, "MiB": memory("VmHWM") - before, **traffic}


def memory(name: str) -> float:
    """A field of this process' status, in MiB (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 2**10


def main(
    beside: Annotated[Path | None, typer.Option(help="Another checkout of this repository.")] = None,
    only: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure all parts; print a Markdown table line by line."""
    if only:
        part, folder, size = json.loads(only)
        if not part:
            prepare(Path(folder), size)
        else:
            print(json.dumps(do(Path(folder), part, size)))
        return
    parts = [(q, part, g) for q in QUESTIONS for part, g in [("", q), *((part, 1) for part in NODE)]]
    parts += [(q, GREETING, g) for q in QUESTIONS for g in GROUPS]
    parts += [(QUESTIONS[0], part, g) for part in (REWARDS, ROUND, SCORES) for g in GROUPS]
    roots = [Path(__file__).parents[1], *([beside.resolve()] if beside else [])]
    print(markdown.table(["part", "questions", "groups", "code", *COLUMNS], []))
    with tempfile.TemporaryDirectory() as home:
        for (questions, part, groups), root in itertools.product(parts, roots):
            (folder := Path(home, root.name, str(questions))).mkdir(parents=True, exist_ok=True)
            command = [sys.executable, __file__, "--only", json.dumps([part, str(folder), groups])]
            run = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, check=False)
            if run.returncode:
                raise SystemExit(f"{root}: {part or 'prepare'}: {run.stderr.decode()}")
            if part:
                numbers = json.loads(run.stdout.splitlines()[-1])
                digits = {"CPU s": 2}
                shown = [f"{numbers[name]:,.{digits.get(name, 0)}f}" if name in numbers else "" for name in COLUMNS]
                print(markdown.line([part, f"{questions:,}", f"{groups:,}", root.name, *shown]), flush=True)


if __name__ == "__main__":
    entry.run(main)
