"""What a service has answered is kept: after a restart trainers go on where they were."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from served import HISTORY, TABLES, TWO, TWO_QUESTIONS, Groups, Served, part

from appa_flwr.core.errors import UserError
from appa_flwr.run.served import ServedRuns, read_rounds
from server_app.serve import rule_rounds
from server_app.serve.requests import Item


def test_after_a_restart_a_trainer_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(rule_rounds, "ROUND_SIZE", 3)
    for name in "ab":
        (tmp_path / name).mkdir()
    whole = Served(tmp_path / "a")
    cut = Served(tmp_path / "b")
    asyncio.run(cut.service.stream("s", [Item("a", "Q0", TWO[0]), Item("b", "Q1", TWO[1])]))
    first = asyncio.run(cut.service.score(part(TWO, TWO_QUESTIONS)))
    cut.reopened()
    assert asyncio.run(cut.service.score(part(TWO, TWO_QUESTIONS))) == first
    for one in (whole, cut):
        for number in (1, 2):
            asyncio.run(one.service.score(part(TWO, TWO_QUESTIONS, number=number)))
    assert cut.history() == whole.history()
    asyncio.run(cut.service.stream("s", [Item("c", "Q0", TWO[0])]))  # the third of its round
    assert cut.history("s") == pytest.approx([0.2 * 0.8, 0.2 * (0.7 + 0.9 + 0.7) / 3])
    assert {name: len(lines) for name, lines in read_rounds(tmp_path / "b").items()} == {"r": 2, "s": 1}


def test_a_group_that_is_new_after_a_restart_starts_at_the_mean_of_the_others(served, monkeypatch):
    asyncio.run(served.service.score(part(TWO, TWO_QUESTIONS)))
    monkeypatch.setitem(TABLES, "C", TABLES["A"])
    monkeypatch.setattr(Groups, "groups", ("A", "B", "C"))
    served.reopened()
    asyncio.run(served.service.score(part(TWO, TWO_QUESTIONS, number=2)))
    assert served.history()[2] == pytest.approx(0.8 * np.mean(HISTORY) + 0.2 * 0.75)


def test_a_file_of_something_else_is_named(tmp_path):
    (tmp_path / "served.db").write_text("no database, and longer than a header of one would have to be" * 20)
    with pytest.raises(UserError, match=r"served\.db: cannot be opened"):
        ServedRuns(tmp_path)
