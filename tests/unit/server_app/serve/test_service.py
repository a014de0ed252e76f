"""The service without HTTP: what is a round, what an answer is worth, and what is kept, asked again or refused.

Axis letters: G groups, Q questions, J answers.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from fakes import federated, scoring_node
from served import (
    CATALOGUE,
    HISTORY,
    LEAST_OF_TWO,
    MEAN_OF_TWO,
    TABLES,
    TWO,
    TWO_QUESTIONS,
    Served,
    part,
    refused,
    rewards,
)

from server_app.serve import service
from server_app.serve.requests import Item


@pytest.mark.parametrize(("rule", "expected"), [("average", MEAN_OF_TWO), ("min", LEAST_OF_TWO)])
def test_one_part_is_one_message_and_one_round(tmp_path, rule, expected):
    served = Served(tmp_path, rule)
    found = asyncio.run(served.service.score(part(TWO, TWO_QUESTIONS)))
    assert rewards(found) == pytest.approx(expected)
    assert found.exact
    assert [item["components"] for item in found.items] == [
        {"alignment": pytest.approx(0.8), "format": 1.0},
        {"alignment": pytest.approx(0.75), "format": 1.0},
    ]
    # FI of Q0: CoV of (0.9, 0.7) is 1/8, so 64/65; of Q1 (0.6, 0.9) 0.15/0.75 = 1/5, so 25/26
    assert found.metrics["fairness_index"] == pytest.approx((64 / 65 + 25 / 26) / 2)
    assert found.metrics["group/A"] == pytest.approx(0.75)
    assert served.history() == pytest.approx(HISTORY)
    assert len(served.groups.requests) == 1


def test_what_is_unreadable_is_worth_nothing_and_no_failure(served):
    found = asyncio.run(served.service.score(part(["no idea", TWO[1]], TWO_QUESTIONS)))
    assert rewards(found) == pytest.approx([0.0, MEAN_OF_TWO[1]])
    assert [item["valid"] for item in found.items] == [True, True]


def test_parts_in_any_order_are_the_round_of_one_process_bit_for_bit(tmp_path):
    texts = [f"{share:.2f},{1 - share:.2f}" for share in np.linspace(0.03, 0.97, 16)]
    questions = [f"Q{n % 2}" for n in range(16)]
    folders = [tmp_path / name for name in ("one", "four", "back")]
    found = []
    for folder, order in zip(folders, [None, [0, 1, 2, 3], [3, 1, 2, 0]], strict=True):
        folder.mkdir()
        one = Served(folder, "appa")

        async def both(one=one, order=order):
            given = []
            for number in (1, 2):  # the second round stands on the first one's state
                if order is None:
                    given += rewards(await one.service.score(part(texts, questions, number=number)))
                    continue
                parts = {
                    n: part(texts[4 * n : 4 * n + 4], questions[4 * n : 4 * n + 4], number=number, of=4, part=n)
                    for n in order
                }
                scored = await asyncio.gather(*(one.service.score(parts[n]) for n in order))
                by_part = dict(zip(order, scored, strict=True))
                given += [reward for n in range(4) for reward in rewards(by_part[n])]
            return given

        found.append((asyncio.run(both()), one.history(), len(one.groups.requests)))
    assert found[0] == found[1] == found[2]


def test_an_id_is_scored_once_and_stands_for_one_text(served):
    async def ask():
        first = await served.service.score(part(TWO, TWO_QUESTIONS))
        again = await served.service.score(part(TWO, TWO_QUESTIONS))
        other = await refused(served.service.score(part(TWO[::-1], TWO_QUESTIONS)))
        more = await refused(served.service.score(part([*TWO, TWO[0]], [*TWO_QUESTIONS, "Q0"])))
        # the same text under another id is another sample
        twice = await served.service.score(part([TWO[0]] * 2, ["Q0"] * 2, number=2))
        return first, again, other, more, twice

    first, again, other, more, twice = asyncio.run(ask())
    assert again == first
    assert (other.status, more.status) == (409, 409)
    assert "'1/0/0'" in str(other)
    assert len(served.groups.requests) == 2
    assert [request.question_J.size for request in served.groups.requests] == [2, 2]
    assert rewards(twice) == pytest.approx([MEAN_OF_TWO[0]] * 2)


def test_retries_of_a_part_that_waits_join_it(served):
    async def ask():
        calls = [served.service.score(part(TWO[:1], ["Q0"], of=2)) for _ in range(3)]
        calls.append(served.service.score(part(TWO[1:], ["Q1"], of=2, part=1)))
        return await asyncio.gather(*calls)

    *same, last = asyncio.run(ask())
    assert same[0] == same[1] == same[2]
    assert [*rewards(same[0]), *rewards(last)] == pytest.approx(MEAN_OF_TWO)
    assert len(served.groups.requests) == 1


def test_what_cannot_be_scored_is_refused_at_once_and_the_round_goes_on(served):
    async def ask():
        waits = asyncio.create_task(served.service.score(part(TWO[:1], ["Q0"], of=2)))
        await asyncio.sleep(0)
        found = {
            "unknown question": await refused(served.service.score(part(["x"], ["Q7"], number=2))),
            "no such part": await refused(served.service.score(part(["x"], ["Q0"], number=2, part=3, of=2))),
            "more than announced": await refused(served.service.score(part(TWO, TWO_QUESTIONS, number=2, size=1))),
            "sums to less": await refused(served.service.score(part(["x"], ["Q0"], number=2, size=2))),
            "sums to more": await refused(served.service.score(part(TWO, TWO_QUESTIONS, of=2, part=1, size=2))),
            "another size": await refused(served.service.score(part(TWO[1:], ["Q1"], of=2, part=1, size=5))),
            "other parts": await refused(served.service.score(part(TWO[1:], ["Q1"], of=3, part=1, size=2))),
            "same ids": await refused(served.service.score(part(["x", "y"], ["Q0", "Q0"], ids=["a", "a"], number=2))),
            "an id of another part": await refused(
                served.service.score(part(["x"], ["Q0"], of=2, part=1, ids=["1/0/0"]))
            ),
            "another trainer": await refused(served.service.score(part(["0.10,0.90"], ["Q0"], of=2))),
        }
        last = await served.service.score(part(TWO[1:], ["Q1"], of=2, part=1))
        return found, [*rewards(await waits), *rewards(last)]

    found, given = asyncio.run(ask())
    assert {name: one.status for name, one in found.items()} == {
        **dict.fromkeys(found, 422),
        "another size": 409,
        "other parts": 409,
        "another trainer": 409,
    }
    assert "'Q7'" in str(found["unknown question"])
    assert "'Q0'" in str(found["unknown question"])
    assert "3 answers, and 2 were announced" in str(found["sums to more"])
    assert "run name 'r'" in str(found["another trainer"])
    assert given == pytest.approx(MEAN_OF_TWO)


def test_parts_that_do_not_come_are_not_waited_for_beyond_the_deadline_and_get_no_reward(served, monkeypatch):
    monkeypatch.setattr(service, "DEADLINE_SECONDS", 0.05)

    async def ask():
        early = await served.service.score(part(TWO[:1], ["Q0"], of=2))
        late = await served.service.score(part(TWO[1:], ["Q1"], of=2, part=1))
        after = await served.service.score(part(TWO, TWO_QUESTIONS, number=2))
        return early, late, after

    early, late, after = asyncio.run(ask())
    assert not early.exact
    assert rewards(early) == pytest.approx(MEAN_OF_TWO[:1])
    assert late.items[0]["reward"] is None
    assert not late.items[0]["valid"]
    assert "deadline" in late.items[0]["failure_reason"]
    assert after.exact
    assert len(served.groups.requests) == 2


def test_a_part_that_comes_while_a_round_closes_without_it_is_told_so(served, monkeypatch):
    monkeypatch.setattr(service, "DEADLINE_SECONDS", 0.01)
    served.groups.gate.clear()

    async def ask():
        early = asyncio.create_task(served.service.score(part(TWO[:1], ["Q0"], of=2)))
        await asyncio.sleep(0.1)
        late = asyncio.create_task(served.service.score(part(TWO[1:], ["Q1"], of=2, part=1)))
        await asyncio.sleep(0.05)
        served.groups.gate.set()
        return await early, await late

    early, late = asyncio.run(ask())
    assert early.items[0]["valid"]
    assert late.items[0]["failure_reason"]


def test_a_trainer_that_goes_away_may_come_back_with_the_same_or_other_answers(served):
    async def ask():
        gone = asyncio.create_task(served.service.score(part(["0.10,0.90"], ["Q0"], of=2)))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        return await asyncio.gather(
            served.service.score(part(TWO[:1], ["Q0"], of=2)),
            served.service.score(part(TWO[1:], ["Q1"], of=2, part=1)),
        )

    first, second = asyncio.run(ask())
    assert [*rewards(first), *rewards(second)] == pytest.approx(MEAN_OF_TWO)


def test_a_client_that_goes_away_while_its_round_is_scored_finds_it_kept(served):
    served.groups.gate.clear()

    async def ask():
        gone = asyncio.create_task(served.service.score(part(TWO, TWO_QUESTIONS)))
        await asyncio.sleep(0.05)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        served.groups.gate.set()
        return await served.service.score(part(TWO, TWO_QUESTIONS))

    assert rewards(asyncio.run(ask())) == pytest.approx(MEAN_OF_TWO)
    assert len(served.groups.requests) == 1


def test_what_nobody_waits_for_any_more_is_not_scored_at_its_deadline(served, monkeypatch):
    monkeypatch.setattr(service, "DEADLINE_SECONDS", 0.05)

    async def ask():
        gone = asyncio.create_task(served.service.score(part(TWO[:1], ["Q0"], of=2)))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0.15)
        return await served.service.score(part(TWO, TWO_QUESTIONS))

    assert rewards(asyncio.run(ask())) == pytest.approx(MEAN_OF_TWO)
    assert len(served.groups.requests) == 1


def test_a_trainer_that_goes_back_raises_the_attempt_and_the_state_goes_back_with_it(served):
    async def ask():
        for number in (1, 2, 3):
            await served.service.score(part(TWO, TWO_QUESTIONS, number=number))
        three = served.history()
        behind = await refused(served.service.score(part(TWO[:1], ["Q0"], number=2, ids=["new"])))
        await served.service.score(part(TWO[::-1], TWO_QUESTIONS[::-1], number=2, attempt=1))
        two = served.history()
        old = await refused(served.service.score(part(TWO, TWO_QUESTIONS, number=4)))
        return three, behind, two, old

    three, behind, two, old = asyncio.run(ask())
    # h after n rounds of the same rewards is (1 - 0.8^n) times these
    assert three == pytest.approx([(1 - 0.8**3) * 0.75, (1 - 0.8**3) * 0.8])
    assert two == pytest.approx([(1 - 0.8**2) * 0.75, (1 - 0.8**2) * 0.8])
    assert (behind.status, old.status) == (409, 409)
    assert "attempt 1" in str(behind)
    assert [(line.round, line.attempt) for line in served.store.rounds("r")] == [(1, 0), (2, 1)]


def test_held_out_questions_are_scored_and_leave_no_trace(served):
    async def ask():
        await served.service.score(part(TWO, TWO_QUESTIONS))
        # "0.20,0.30,0.50" is A's own distribution of Q2. From B's (.5, .3, .2) it differs by .3 and .3 in the
        # cumulative shares, so 1 - 0.6 / 2 = 0.7. The mean of 1 and 0.85 * 0.7 + 0.15 = 0.745 is 0.8725.
        found = await served.service.score(part(["0.20,0.30,0.50"], ["Q2"], number=2))
        streamed = await served.service.stream("r", [Item("s", "Q2", "0.20,0.30,0.50")])
        await served.service.score(part(TWO, TWO_QUESTIONS, number=3))
        return found, streamed

    found, streamed = asyncio.run(ask())
    assert rewards(found) == rewards(streamed) == pytest.approx([0.8725])
    assert served.history() == pytest.approx([(1 - 0.8**2) * 0.75, (1 - 0.8**2) * 0.8])


def test_two_runs_do_not_mix(served):
    async def ask():
        first = await served.service.score(part(TWO, TWO_QUESTIONS))
        second = await served.service.score(part(TWO[:1], ["Q0"], run="other"))
        return first, second

    asyncio.run(ask())
    assert served.history() == pytest.approx(HISTORY)
    assert served.history("other") == pytest.approx([0.2 * 0.9, 0.2 * 0.7])
    assert served.service.status("r")["rounds"] == 1


def test_too_few_groups_cost_nothing_and_the_same_part_succeeds_later(served):
    async def ask():
        served.groups.silent = {"A", "B"}
        failed = await refused(served.service.score(part(TWO, TWO_QUESTIONS)))
        streamed = await refused(served.service.stream("r", [Item("s", "Q0", TWO[0])]))
        served.groups.silent = set()
        return failed, streamed, await served.service.score(part(TWO, TWO_QUESTIONS))

    failed, streamed, found = asyncio.run(ask())
    assert (failed.status, streamed.status) == (503, 503)
    assert failed.retry_after
    assert "only 0 of 2 groups" in str(failed)
    assert rewards(found) == pytest.approx(MEAN_OF_TWO)
    assert served.history() == pytest.approx(HISTORY)
    assert served.broken == []


def test_a_silent_group_is_named_and_keeps_its_history(served):
    async def ask():
        await served.service.score(part(TWO, TWO_QUESTIONS))
        served.groups.silent, served.groups.seconds = {"B"}, {"A": 0.25}
        return await served.service.score(part(TWO, TWO_QUESTIONS, number=2))

    found = asyncio.run(ask())
    assert rewards(found) == pytest.approx([0.915, 0.66])
    assert "group/B" not in found.metrics
    assert served.history() == pytest.approx([(1 - 0.8**2) * 0.75, HISTORY[1]])
    status = served.service.status("r")
    assert status["missing_groups"] == ["B"]
    assert status["rounds_missed"] == {"B": 1}
    assert status["group_seconds"] == {"A": 0.25}


def test_an_error_of_the_program_is_told_and_refused(served, monkeypatch):
    monkeypatch.setattr(served.groups, "score", lambda *args, **keys: 1 / 0)
    assert asyncio.run(refused(served.service.score(part(TWO, TWO_QUESTIONS)))).status == 503
    assert isinstance(served.broken[0], ZeroDivisionError)


def test_too_many_answers_are_told_to_come_later(served, monkeypatch):
    monkeypatch.setattr("server_app.serve.service.MOST_WAITING", 3)

    async def ask():
        waits = asyncio.create_task(served.service.score(part(TWO, TWO_QUESTIONS, size=4, of=2)))
        await asyncio.sleep(0)
        status = served.service.status("r")
        assert (status["attempt"], status["round"], status["rounds"]) == (0, None, 0)
        assert [(one["parts"], one["answers"], one["size"]) for one in status["open_rounds"]] == [([0], 2, 4)]
        found = await refused(served.service.score(part(TWO, TWO_QUESTIONS, run="other")))
        await served.service.close()
        return found, await refused(waits)

    found, stopped = asyncio.run(ask())
    assert (found.status, stopped.status) == (429, 503)
    assert found.retry_after


def test_a_federation_s_groups_are_scored_through_the_same_path(served):
    nodes = {node: scoring_node({name: table_QK}) for node, (name, table_QK) in enumerate(TABLES.items())}
    served.service = served.scoring(federated(nodes, CATALOGUE, min_groups=2))
    assert rewards(asyncio.run(served.service.score(part(TWO, TWO_QUESTIONS)))) == pytest.approx(MEAN_OF_TWO)
