"""Two groups in this process behind a service, and answers whose rewards are worked out by hand.

Axis letters: G groups, Q questions, J answers.
"""

import asyncio
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from fake_groups import federated, scoring_node
from fakes import catalogue_of
from fastapi import HTTPException

from appa_flwr.config import Config
from appa_flwr.core.files import keep_lines
from appa_flwr.reward_client import client
from appa_flwr.run.schema import SERVED
from appa_flwr.run.served import read_runs
from server_app.run_writer import RunWriter
from server_app.serve import app
from server_app.serve.rounds import Item, Rounds, ScoreBody

CATALOGUE = catalogue_of([2, 2, 3], train=[True, True, False])
TABLES = {
    "A": np.array([[0.6, 0.4, 0.0], [0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]),
    "B": np.array([[0.4, 0.6, 0.0], [0.8, 0.2, 0.0], [0.5, 0.3, 0.2]]),
}


class Folder:
    """Of a run's folder what the service needs."""

    append, _append = RunWriter.append, RunWriter._append

    def __init__(self, path):
        self.path = path
        keep_lines(path / SERVED.name)


class Served:
    """A service over the groups on one node, with its folder."""

    def __init__(self, folder, rule="average"):
        self.folder, self.node = folder, scoring_node(TABLES)
        self.config = Config.load({"metric": "wasserstein", "rule": rule})
        self.open()

    def open(self):
        """The service, anew where there was one: what a restart does."""
        groups = federated({1: self.node}, CATALOGUE)
        run = SimpleNamespace(config=self.config, folder=Folder(self.folder), groups=groups, catalogue=CATALOGUE)
        self.rounds = Rounds(run, closed=lambda name, record: None)

    async def score(self, *answers, number=None, **fields):
        """The rewards of answers, which are triples of id, question and text."""
        items = [Item(id=name, question_id=question, completion=text) for name, question, text in answers]
        found = await self.rounds.score(ScoreBody(run=fields.pop("run", "r"), round=number, items=items, **fields))
        return [item["reward"] for item in found["items"]]

    def lines(self, run="r"):
        return rounds_of(self.folder, run)

    def history(self, run="r"):
        return list(self.lines(run)[-1].history.values())


def rounds_of(folder, run):
    """The rounds that a folder's served.jsonl keeps of a trainer's run."""
    runs = read_runs(folder)
    return runs[run].rounds if run in runs else []


@contextmanager
def serving(folder):
    """A service that answers over HTTP from a thread of this process, where its clients look for it; gives it."""
    served, end = Served(folder), threading.Event()
    with app.listening("127.0.0.1", 0) as listener, pytest.MonkeyPatch.context() as patched:
        patched.setenv(client.URL, f"http://127.0.0.1:{listener.getsockname()[1]}")
        patched.setenv(client.TOKEN, "a-token")
        answers = app.until(end.is_set, served.rounds, None, "a-token", listener)
        thread = threading.Thread(target=asyncio.run, args=(answers,))
        thread.start()
        try:
            yield served
        finally:
            end.set()
            thread.join()


# With two options Wasserstein is 1 - |p1 - t1|. "0.70,0.30" to Q0: A (.6, .4) gives 0.9, B (.4, .6) gives 0.7.
# "0.90,0.10" to Q1: A (.5, .5) gives 0.6, B (.8, .2) gives 0.9. Both are written as asked for, format 1, so
# the training rewards are 0.85 r + 0.15: A 0.915 and 0.66, B 0.745 and 0.915.
TWO, TWO_QUESTIONS = ["0.70,0.30", "0.90,0.10"], ["Q0", "Q1"]
MEAN_OF_TWO, LEAST_OF_TWO = [0.83, 0.7875], [0.745, 0.66]
HISTORY = [0.2 * 0.75, 0.2 * 0.8]  # of A's mean reward (0.9 + 0.6) / 2 and B's (0.7 + 0.9) / 2


def two(number=1, texts=TWO, questions=TWO_QUESTIONS):
    """Answers of a round, by the ids that a trainer gives."""
    return [(f"{number}/{n}", question, text) for n, (question, text) in enumerate(zip(questions, texts, strict=True))]


async def refused(awaitable):
    with pytest.raises(HTTPException) as found:
        await awaitable
    return found.value
