"""What a request is to its trainer's run: the rows of the table of `relation`, and where they meet."""

import pytest

from appa_flwr.run.records import ServedAnswer
from server_app.serve.rounds import Batch, Item, ScoreRequest, relation

LAST = 3
"""The groups score round 3 with the answer "a"; round 4, of two answers, is open and has "o"; "k" was scored before."""


def item(name, text=""):
    return Item(id=name, question_id="Q0", completion=text or name)


KEPT = {"k": ServedAnswer(id="k", digest=item("k").digest, reward=0.5, components={})}
ASKED, OPENED = Batch("r", LAST, 1, {"a": item("a")}), Batch("r", 4, 2, {"o": item("o")})


def kind(names, number=None, *, resumed=False, size=None, asked=ASKED, opened=OPENED, texts=""):
    items = [item(name, texts) for name in names]
    request = ScoreRequest(run="r", round=number, resumed=resumed, size=size, items=items)
    return relation(request, KEPT, LAST, asked=asked, opened=opened)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        # equal answers, of which the groups score some
        ({"names": "a"}, "pending"),
        ({"names": "ak", "number": 1}, "pending"),
        ({"names": "a", "number": 3, "resumed": True}, "pending"),
        ({"names": "a", "number": 2, "resumed": True}, "back"),
        # equal answers that have their rewards
        ({"names": "k"}, "repeated"),
        ({"names": "k", "number": 3, "resumed": True}, "repeated"),
        ({"names": "k", "number": 2, "resumed": True}, "back"),
        # new answers for which there is room
        ({"names": "n", "number": 4, "size": 2}, "next"),
        ({"names": "o", "number": 4, "size": 2}, "next"),
        ({"names": "n", "number": 4, "size": 2, "resumed": True}, "next"),
        ({"names": "n", "opened": None}, "next"),
        ({"names": "n", "number": 9, "opened": None}, "next"),
        # answers that are none of these
        ({"names": "n", "number": 3, "opened": None}, "contradiction"),
        ({"names": "n", "number": 3, "opened": None, "resumed": True}, "back"),
        ({"names": "n"}, "contradiction"),  # no round, while a numbered one is open
        ({"names": "n", "number": 5}, "contradiction"),
        ({"names": "n", "number": 5, "resumed": True}, "back"),
        ({"names": "nm", "number": 4, "size": 2}, "contradiction"),  # three answers, of two
        ({"names": "n", "number": 4, "size": 3}, "contradiction"),
        ({"names": "o", "number": 4, "size": 2, "texts": "other"}, "contradiction"),
        ({"names": "k", "texts": "other"}, "contradiction"),
        ({"names": "a", "texts": "other"}, "contradiction"),
        ({"names": "kn", "number": 4, "opened": None}, "contradiction"),  # one of them was scored before
        ({"names": "kn", "number": 4, "opened": None, "resumed": True}, "back"),
        # after a go-back the scored answers are gone, and equal answers are new
        ({"names": "a", "number": 4, "asked": None, "opened": None}, "next"),
    ],
)
def test_each_row_of_the_table_and_its_borders(sent, expected):
    assert kind(**sent) == expected
