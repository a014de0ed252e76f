"""Answers that come one a request: scored at once, by the rule as it stood after the last closed round."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from served import HISTORY, MEAN_OF_TWO, TWO, TWO_QUESTIONS, Served, refused, rewards

from appa_flwr.analysis.aggregation import make
from server_app.serve import rule_rounds
from server_app.serve.requests import Item


def test_256_single_samples_at_once_are_few_messages_and_close_rounds(tmp_path, monkeypatch):
    monkeypatch.setattr(rule_rounds, "ROUND_SIZE", 100)
    served = Served(tmp_path)

    async def ask():
        calls = [served.service.stream("r", [Item(f"s{n}", f"Q{n % 2}", TWO[n % 2])]) for n in range(256)]
        return await asyncio.gather(*calls)

    found = asyncio.run(ask())
    assert len(served.groups.requests) <= 4
    assert [rewards(one)[0] for one in found] == pytest.approx(MEAN_OF_TWO * 128)
    assert not any(one.exact for one in found)
    assert served.history() == pytest.approx(HISTORY)
    assert len(served.store.open("r")) == 0


def test_a_stream_s_weights_are_those_after_the_last_closed_round(tmp_path, monkeypatch):
    monkeypatch.setattr(rule_rounds, "ROUND_SIZE", 2)
    served = Served(tmp_path)
    served.rule = make("appa", fairness_threshold=2.0, temperature=1e-4, ema_decay=0.8)  # all weight on the lowest
    served.reopened()

    def combined(*powers):
        return np.log(np.mean(np.exp(powers)))

    async def ask():
        first = await served.service.stream(
            "r", [Item(f"a{n}", *one) for n, one in enumerate(zip(TWO_QUESTIONS, TWO, strict=True))]
        )
        second = await served.service.stream("r", [Item("b", "Q0", TWO[0])])
        third = await served.service.stream("r", [Item("c", "Q0", TWO[0])])
        return first, second, third

    first, second, third = asyncio.run(ask())
    # no history yet: the groups tie
    assert rewards(first) == pytest.approx([combined(0.915 / 2, 0.745 / 2), combined(0.66 / 2, 0.915 / 2)])
    # The round's means were A 0.75, B 0.8, so A is the lowest: its 0.915 counts alone. B's mean of the next round is
    # 0.7, which brings it to 0.8 * 0.16 + 0.2 * 0.7 = 0.268, A to 0.8 * 0.15 + 0.2 * 0.9 = 0.3.
    assert [*rewards(second), *rewards(third)] == pytest.approx([combined(0.915, 0.0)] * 2)
    assert served.history() == pytest.approx([0.3, 0.268])
    assert (second.round, third.metrics["group/B"]) == (2, pytest.approx(0.7))
    last = asyncio.run(served.service.stream("r", [Item("d", "Q0", TWO[0])]))
    assert rewards(last) == pytest.approx([combined(0.0, 0.745)])  # now B's alone


@pytest.mark.parametrize("rule", ["appa", "average", "min", "mix"])
def test_every_rule_scores_between_rounds_and_a_group_may_come_new(tmp_path, monkeypatch, rule):
    monkeypatch.setattr(rule_rounds, "ROUND_SIZE", 2)
    served = Served(tmp_path, rule)

    async def ask():
        served.groups.silent = {"B"}
        await served.service.stream(
            "r", [Item(f"a{n}", *one) for n, one in enumerate(zip(TWO_QUESTIONS, TWO, strict=True))]
        )
        served.groups.silent = set()
        return await served.service.stream("r", [Item("b", "Q0", TWO[0])])

    (reward,) = rewards(asyncio.run(ask()))
    share = 0.5 if rule == "appa" else 1.0  # Equation 3 without the mean: two equal alpha_g halve each reward
    assert 0.745 * share - 1e-9 <= reward <= 0.915 * share + 1e-9  # between what B and A give it


def test_a_group_that_misses_a_message_of_a_round_is_missing_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(rule_rounds, "ROUND_SIZE", 3)
    served = Served(tmp_path)

    async def ask(silent):
        for name, missing in silent.items():
            served.groups.silent = missing
            await served.service.stream("r", [Item(name, "Q0", TWO[0])])

    asyncio.run(ask({"a": set(), "b": {"B"}, "c": set()}))
    assert served.history() == pytest.approx([0.2 * 0.9, 0.0])
    # each group misses one: the first of the fullest answers count, those of both
    asyncio.run(ask({"d": {"A"}, "e": {"B"}, "f": set()}))
    assert served.history() == pytest.approx([0.8 * 0.18 + 0.2 * 0.9, 0.2 * 0.9 * 0 + 0.8 * 0.18 + 0.2 * 0.7])


def test_an_id_of_a_stream_is_scored_once(served):
    served.groups.gate.clear()

    async def ask():
        calls = [asyncio.create_task(served.service.stream("r", [Item("a", "Q0", TWO[0])])) for _ in range(3)]
        await asyncio.sleep(0.05)
        calls[0].cancel()
        other = await refused(served.service.stream("r", [Item("a", "Q0", TWO[1])]))
        served.groups.gate.set()
        found = await asyncio.gather(*calls[1:])
        found.append(await served.service.stream("r", [Item("a", "Q0", TWO[0])]))
        after = await refused(served.service.stream("r", [Item("a", "Q1", TWO[0])]))
        return found, other, after

    found, other, after = asyncio.run(ask())
    assert [rewards(one) for one in found] == [pytest.approx(MEAN_OF_TWO[:1])] * 3
    assert (other.status, after.status) == (409, 409)
    assert len(served.groups.requests) == 1
    assert len(served.store.open("r")) == 1


def test_an_engine_without_ids_that_asks_again_gets_its_answer_and_twins_are_two(served):
    served.groups.gate.clear()

    async def ask():
        gone = asyncio.create_task(served.service.sample("r", "Q0", TWO[0]))
        await asyncio.sleep(0.05)
        gone.cancel()  # its time-out; it asks again
        await asyncio.gather(gone, return_exceptions=True)
        again = asyncio.create_task(served.service.sample("r", "Q0", TWO[0]))
        await asyncio.sleep(0.05)
        served.groups.gate.set()
        await again
        assert len(served.store.open("r")) == 1
        await asyncio.gather(*(served.service.sample("r", "Q0", TWO[0]) for _ in range(3)))

    asyncio.run(ask())
    assert len(served.store.open("r")) == 4
