"""The service without HTTP: what is a round, what an answer is worth, and what is kept, asked again or refused."""

import asyncio
import errno
import json

import numpy as np
import pytest
from runs import HISTORY, LEAST_OF_TWO, MEAN_OF_TWO, TWO, Served, refused, scoring_node, two
from runs import SERVED_TABLES as TABLES

from appa_flwr.run.schema import SERVED
from server_app import run_writer
from server_app.serve import rounds

pytestmark = pytest.mark.anyio
ONE, OTHER = ("1/0", "Q0", TWO[0]), ("1/0", "Q0", "0.10,0.90")


@pytest.mark.parametrize(("rule", "expected"), [("average", MEAN_OF_TWO), ("min", LEAST_OF_TWO)])
async def test_a_whole_round_is_one_message_and_one_line(tmp_path, rule, expected):
    served = Served(tmp_path, rule)
    assert await served.score(*two(), number=1) == pytest.approx(expected)
    (line,) = served.lines()
    # FI of Q0: CoV of (0.9, 0.7) is 1/8, so 64/65; of Q1 (0.6, 0.9) 0.15/0.75 = 1/5, so 25/26
    assert line.fairness_index == pytest.approx((64 / 65 + 25 / 26) / 2)
    assert line.rewards == pytest.approx({"A": 0.75, "B": 0.8})
    assert served.history() == pytest.approx(HISTORY)
    assert len(served.node.asked) == 1


async def test_what_has_no_round_is_gathered_into_one(served, monkeypatch):
    monkeypatch.setattr(rounds, "GATHER_SECONDS", 60.0)
    monkeypatch.setattr(rounds, "GATHER_SIZE", 100)
    answers = [(f"s{n}", f"Q{n % 2}", TWO[n % 2]) for n in range(103)]
    first = await asyncio.gather(*map(served.score, answers[:100]))  # full, and so no 60 seconds
    assert [reward for (reward,) in first] == pytest.approx(MEAN_OF_TWO * 50)
    monkeypatch.setattr(rounds, "GATHER_SECONDS", 0.02)
    assert len(await served.score(*answers[100:])) == 3
    assert [(line.round, line.size) for line in served.lines()] == [(1, 100), (2, 3)]
    assert served.lines()[0].history == pytest.approx(dict(zip("AB", HISTORY, strict=True)))


@pytest.mark.parametrize("number", [None, 1])
async def test_an_id_is_scored_once_and_stands_for_one_text(served, number):
    served.node.gate.clear()
    calls = [asyncio.create_task(served.score(ONE, number=number)) for _ in range(3)]
    await asyncio.sleep(0.1)
    calls[0].cancel()
    again = await refused(served.score(OTHER, number=number))
    assert (again.status_code, f"'{OTHER[0]}' has been sent" in again.detail) == (409, True)
    served.node.gate.set()
    found = [*await asyncio.gather(*calls[1:]), await served.score(ONE, number=number)]
    assert found == [pytest.approx(MEAN_OF_TWO[:1])] * 3
    again = await refused(served.score(OTHER, number=number))
    assert (again.status_code, f"'{OTHER[0]}' has been sent" in again.detail) == (409, True)
    assert len(served.node.asked) == len(served.lines()) == 1


async def test_what_cannot_be_of_a_round_is_refused_at_once_and_the_round_goes_on(served):
    waits = asyncio.create_task(served.score(*two()[:1], number=1, size=2))
    await asyncio.sleep(0)
    for status, answers, keys in (
        (422, [("x", "Q7", "?")], {"number": 1, "size": 2}),  # of an unknown question
        (409, [("x", "Q0", "?"), ("y", "Q0", "?")], {"number": 1, "size": 2}),  # more than announced
        (409, two()[1:], {"number": 1, "size": 5}),
        (409, [("x", "Q0", "?")], {"number": 2, "size": 2}),
        (409, [("x", "Q0", "?")], {"size": 2}),  # of no round
        (409, [OTHER], {"number": 1, "size": 2}),  # of another trainer
    ):
        assert (await refused(served.score(*answers, **keys))).status_code == status
    given = [*await served.score(*two()[1:], number=1, size=2), *await waits]
    assert sorted(given) == pytest.approx(sorted(MEAN_OF_TWO))


async def test_a_trainer_that_goes_away_before_its_round_is_whole_leaves_nothing(served):
    gone = asyncio.create_task(served.score(OTHER, number=1, size=2))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    second = asyncio.create_task(served.score(*two()[1:], number=1, size=2))
    await asyncio.sleep(0.05)
    assert [*await served.score(*two()[:1], number=1, size=2), *await second] == pytest.approx(MEAN_OF_TWO)
    assert len(served.node.asked) == 1


async def test_a_trainer_that_goes_back_takes_the_state_with_it(served):
    for number in (1, 2, 3):
        await served.score(*two(number), number=number)
    # h after n rounds of the same rewards is (1 - 0.8^n) times these
    assert served.history() == pytest.approx([(1 - 0.8**3) * 0.75, (1 - 0.8**3) * 0.8])
    new = ("new", "Q0", TWO[0])
    for answers, number in ((two(2, TWO[::-1]), 2), ([new], 3), ([*two(3)[:1], new], 4)):  # one of which is scored
        assert (await refused(served.score(*answers, number=number))).status_code == 409
    await served.score(*two(2), number=2, resumed=True)  # equal answers, and yet it goes back
    assert [line.round for line in served.lines()] == [1, 2]
    for _ in range(2):  # its retry too
        assert len(await served.score(*two(2, ["0.50,0.50"] * 2), number=2, resumed=True)) == 2
    await served.score(*two(3, ["0.50,0.50"] * 2), number=3)
    assert len(served.node.asked) == 6
    # "0.50,0.50": A has 0.9 and 1.0, B 0.9 and 0.7, so the means are 0.95 and 0.8
    later = 1 - 0.8**2
    expected = [0.8**2 * 0.2 * 0.75 + later * 0.95, 0.8**2 * 0.2 * 0.8 + later * 0.8]
    assert served.history() == pytest.approx(expected)
    assert [line.round for line in served.lines()] == [1, 2, 3]
    served.open()
    await served.score(*two(4), number=4)
    assert served.history() == pytest.approx([0.8 * expected[0] + 0.2 * 0.75, 0.8 * expected[1] + 0.2 * 0.8])


@pytest.mark.parametrize("asked", [False, True])
async def test_a_trainer_that_begins_anew_takes_the_place_of_one_that_hangs(served, asked):
    served.node.gate.clear()
    hangs = asyncio.create_task(served.score(OTHER, number=1, size=1 if asked else 2))
    await asyncio.sleep(0.05)
    if asked:  # the groups are at it, so the new one has to come again
        assert (await refused(served.score(*two(), number=1, resumed=True))).status_code == 503
        served.node.gate.set()
        await hangs
    served.node.gate.set()
    new = await asyncio.gather(*(served.score(answer, number=1, size=2, resumed=True) for answer in two()))
    assert [reward for (reward,) in new] == pytest.approx(MEAN_OF_TWO)
    assert served.history() == pytest.approx(HISTORY)
    assert asked or (await refused(hangs)).status_code == 409
    served.open()  # the line of the round that was given up stands before that of the new one
    assert await served.score(*two(), number=1) == pytest.approx(MEAN_OF_TWO)
    assert [line.size for line in served.lines()] == [2]


async def test_held_out_questions_are_scored_and_leave_no_trace(served):
    await served.score(*two(), number=1)
    # "0.20,0.30,0.50" is A's own distribution of Q2. From B's (.5, .3, .2) it differs by .3 and .3 in the cumulative
    # shares, so 1 - 0.6 / 2 = 0.7. The mean of 1 and 0.85 * 0.7 + 0.15 = 0.745 is 0.8725.
    assert await served.score(("h", "Q2", "0.20,0.30,0.50"), number=2) == pytest.approx([0.8725])
    await served.score(*two(3), number=3)
    assert served.history() == pytest.approx([(1 - 0.8**2) * 0.75, (1 - 0.8**2) * 0.8])


async def test_too_few_groups_cost_nothing_and_a_silent_one_keeps_its_history(served):
    served.node.silent = {"A", "B"}
    for number in (1, None):
        failed = await refused(served.score(*two(), number=number))
        assert failed.status_code == 503
        assert int(failed.headers["Retry-After"]) > 0
    served.node.silent = set()
    await served.score(*two(), number=1)
    served.node.silent = {"B"}
    assert await served.score(*two(2), number=2) == pytest.approx([0.915, 0.66])
    assert served.history() == pytest.approx([(1 - 0.8**2) * 0.75, HISTORY[1]])
    last = served.lines()[-1]
    assert (last.missing_groups, last.rewards["B"], last.weights) == (("B",), None, {"A": 1.0, "B": 0.0})
    assert served.rounds.failed is None


async def test_what_two_trainers_of_one_name_would_do_is_said_in_log_and_reply(served, warnings):
    def request(number, *answers, **fields):
        items = [rounds.Item(id=name, question_id=question, completion=text) for name, question, text in answers]
        return served.rounds.score(rounds.ScoreBody(run="r", round=number, items=items, **fields))

    async def notices(number, **fields):
        parts = [request(number, answer, size=2, **fields) for answer in two(number)]
        return [reply.get("notice") for reply in await asyncio.gather(*parts)]

    joint = "run 'r': round 1 joins 2 requests, as of one trainer's processes; two trainers need two names"
    back = "run 'r': goes back from round 2 to 1, as a trainer that begins or resumes; two trainers need two names"
    assert await notices(1) == [joint, joint]
    assert await notices(2) == [None, None]  # said once
    assert (await request(1, ("new", "Q0", TWO[0]), resumed=True))["notice"] == back
    assert "notice" not in await request(2, *two(2))
    assert warnings() == [joint, back]


async def test_a_request_that_is_one_too_many_is_not_queued(served, monkeypatch):
    monkeypatch.setattr(rounds, "MOST_WAITING", 3)
    waits = asyncio.create_task(served.score(*two(), number=1, size=3, run="other"))
    await asyncio.sleep(0)
    for number in (None, 1):
        found = await refused(served.score(*two(), number=number))
        assert found.status_code == 429
        assert int(found.headers["Retry-After"]) > 0
    await served.score(("third", "Q0", TWO[0]), number=1, size=3, run="other")
    assert await waits == pytest.approx(MEAN_OF_TWO)
    assert await served.score(*two(), number=1) == pytest.approx(MEAN_OF_TWO)
    assert [query.arrays["question"].size for query in served.node.asked] == [3, 2]


async def test_an_equal_answer_with_an_id_of_its_own_is_a_sample_of_its_own(served):
    await served.score(ONE)
    served.node.gate.clear()
    other = asyncio.create_task(served.score(("o", "Q1", TWO[1])))
    await asyncio.sleep(0.1)  # the groups are asked, and the first answer is long delivered
    twins = [asyncio.create_task(served.score((name, "Q0", TWO[0]))) for name in "ab"]
    both = asyncio.create_task(served.score(ONE, ("o", "Q1", TWO[1])))  # one scored, one asked
    await asyncio.sleep(0.05)
    assert await served.score(ONE) == pytest.approx(MEAN_OF_TWO[:1])  # which waits for nobody
    served.node.gate.set()
    await asyncio.gather(other, both, *twins)
    assert sum(line.size for line in served.lines()) == 4


async def test_what_has_been_scored_survives_a_kill_and_is_written_before_it_is_given(served, monkeypatch):
    given = await served.score(*two(), number=1)
    path = served.folder / SERVED.name
    (line,) = path.read_text().splitlines()
    assert [answer["reward"] for answer in json.loads(line)["answers"]] == given  # each bit
    with path.open("a") as file:
        file.write(line[:100])  # a kill came while a line was written
    before = path.read_bytes()
    assert len(served.lines()) == 1
    assert path.read_bytes() == before  # a report does not write
    served.open()
    assert await served.score(*two(), number=1) == given
    assert len(served.node.asked) == 1
    await served.score(*two(2), number=2)
    assert served.history() == pytest.approx([(1 - 0.8**2) * 0.75, (1 - 0.8**2) * 0.8])

    def full(file):
        file.flush()
        file.truncate(file.tell() - 20)
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as disk:
        disk.setattr(run_writer, "sync", full)
        assert (await refused(served.score(*two(3), number=3))).status_code == 503
    await served.score(*two(3), number=3)
    assert [line.round for line in served.lines()] == [1, 2, 3]


async def test_a_group_that_is_new_after_a_restart_starts_at_the_mean_of_the_others(served):
    await served.score(*two(), number=1)
    served.node = scoring_node(TABLES | {"C": TABLES["A"]})
    served.open()
    await served.score(*two(2), number=2)
    assert served.history()[2] == pytest.approx(0.8 * np.mean(HISTORY) + 0.2 * 0.75)


async def test_the_end_refuses_who_waits_and_leaves_the_event_loop_free(served):
    served.node.gate.clear()
    scored = asyncio.create_task(served.score(*two(), number=1))
    await asyncio.sleep(0.05)
    waits = asyncio.create_task(served.score(("x", "Q0", TWO[0]), number=1, size=2, run="other"))
    await asyncio.sleep(0)
    closing = asyncio.create_task(served.rounds.close())
    await asyncio.sleep(0.05)  # would last as long as the groups take
    assert not closing.done()
    served.node.gate.set()
    async with asyncio.timeout(5.0):
        await closing
        assert await scored == pytest.approx(MEAN_OF_TWO)
        for stopped in (waits, served.rounds.in_turn(len, ())):
            assert (await refused(stopped)).status_code == 503
