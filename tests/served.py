"""Two groups in this process behind a service, and answers whose rewards are worked out by hand.

Axis letters: G groups, Q questions, J answers.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from fakes import catalogue_of

from appa_flwr.analysis import aggregation
from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import wire
from appa_flwr.run.served import ServedRuns
from client_app import scoring
from server_app.serve import phase
from server_app.serve.requests import Item, Part, Refused
from server_app.serve.service import Service

CATALOGUE = catalogue_of([2, 2, 3], train=[True, True, False])
TABLES = {
    "A": np.array([[0.6, 0.4, 0.0], [0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]),
    "B": np.array([[0.4, 0.6, 0.0], [0.8, 0.2, 0.0], [0.5, 0.3, 0.2]]),
}


class Groups:
    """Both groups in this process, by the groups' own scoring.

    Attributes:
        requests: what they were asked.
        seconds: that they say to have taken.
        silent: groups that do not answer.
        gate: closed, they take their time.
    """

    groups = ("A", "B")

    def __init__(self):
        self.requests, self.silent, self.gate, self.seconds = [], set(), threading.Event(), {}
        self.gate.set()

    def score(self, request, *, iteration=0, meanwhile=None):
        self.requests.append(request)
        assert self.gate.wait(10)
        if len(self.silent) == len(self.groups):
            raise UserError("only 0 of 2 groups (none) could score the answers")
        found = [scoring.score(request, TABLES[name], CATALOGUE.option_QK)["wasserstein"] for name in self.groups]
        for g, name in enumerate(self.groups):
            if name in self.silent:
                found[g] = np.full_like(found[g], np.nan)
        return {("wasserstein", wire.TARGET_SIDE): np.stack(found)}


class Served:
    """A service over the groups, with its file."""

    def __init__(self, folder, rule="average"):
        self.folder, self.groups, self.broken = folder, Groups(), []
        self.config = Config.load({"metric": "wasserstein"})
        self.rule = aggregation.make(rule, ema_decay=0.8)
        self.open()

    def open(self):
        self.store = ServedRuns(self.folder)
        self.service = self.scoring(self.groups)

    def scoring(self, groups):
        """A service over these groups."""
        told = {"broken": self.broken.append, "closed": lambda run, record: None}
        return Service(groups, self.rule, CATALOGUE, self.config, self.store, **told)

    def reopened(self):
        self.store.close()
        self.open()

    def history(self, run="r"):
        return list(self.store.last(run)[0].history.values())


@contextmanager
def serving(folder):
    """A service that answers over HTTP from a thread of this process; gives its groups, URL and token."""
    served, end = Served(folder), threading.Event()
    with phase._listening("127.0.0.1", 0) as listener:
        answers = phase._answer(served.service, None, "a-token", listener, ended=end.is_set)
        thread = threading.Thread(target=asyncio.run, args=(answers,))
        thread.start()
        try:
            yield served.groups, f"http://127.0.0.1:{listener.getsockname()[1]}", "a-token"
        finally:
            end.set()
            thread.join()
            served.store.close()


# With two options Wasserstein is 1 - |p1 - t1|. "0.70,0.30" to Q0: A (.6, .4) gives 0.9, B (.4, .6) gives 0.7.
# "0.90,0.10" to Q1: A (.5, .5) gives 0.6, B (.8, .2) gives 0.9. Both are written as asked for, format 1, so
# the training rewards are 0.85 r + 0.15: A 0.915 and 0.66, B 0.745 and 0.915.
TWO, TWO_QUESTIONS = ["0.70,0.30", "0.90,0.10"], ["Q0", "Q1"]
MEAN_OF_TWO, LEAST_OF_TWO = [0.83, 0.7875], [0.745, 0.66]
HISTORY = [0.2 * 0.75, 0.2 * 0.8]  # of A's mean reward (0.9 + 0.6) / 2 and B's (0.7 + 0.9) / 2


def part(texts, questions, *, number=1, of=1, part=0, size=None, attempt=0, run="r", ids=None):
    ids = ids or [f"{number}/{part}/{n}" for n in range(len(texts))]
    items = [Item(*one) for one in zip(ids, questions, texts, strict=True)]
    return Part(run, number, attempt, size or len(texts) * of, part, of, items)


def rewards(scored):
    return [item["reward"] for item in scored.items]


async def refused(awaitable):
    with pytest.raises(Refused) as found:
        await awaitable
    return found.value
