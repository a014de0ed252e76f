"""The trainers' clients against a real service on a loopback port."""

import asyncio
import inspect
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
from runs import HISTORY, MEAN_OF_TWO, TWO, TWO_QUESTIONS, serving

from appa_flwr.core.errors import UserError
from appa_flwr.reward_client import client, engines
from appa_flwr.reward_client.trl import RemoteGroupRewards
from server_app.serve import rounds


@pytest.fixture
def service(tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "GATHER_SECONDS", 0.02)
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.01)
    with serving(tmp_path) as served:
        yield served


async def asked(rewards, texts=TWO, questions=TWO_QUESTIONS, *, step=0, **columns):
    given = {"prompts": ["?"] * len(texts), "completions": texts, "question_id": questions and questions[: len(texts)]}
    return await rewards.group_reward(**given, trainer_state=SimpleNamespace(global_step=step), **columns)


def call(*given, **more):
    return asyncio.run(asked(*given, **more))


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:1", "socks5://127.0.0.1:1"])
def test_this_machine_is_called_without_the_environment_s_proxy(service, proxy, monkeypatch):
    for name in ("HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy)
    assert call(RemoteGroupRewards(patience=0.0)) == pytest.approx(MEAN_OF_TWO)


def test_engines_that_ask_for_one_answer(service, monkeypatch):
    prompt, sample = "<s>Q: what?", SimpleNamespace(response=TWO[0], label="Q0")
    reward, parts = pytest.approx(MEAN_OF_TWO[0]), {"alignment": pytest.approx(0.8), "format": 1.0}

    async def ask():
        verl = [engines.compute_score("appa", TWO[0], "Q0", {"index": n}, more=None) for n in range(3)]
        return await asyncio.gather(*verl, engines.custom_rm(None, sample))

    *verl, slime = asyncio.run(ask())
    assert verl == [{"score": reward, **parts}] * 3
    assert slime == reward
    monkeypatch.setenv(client.RUN, "mine")
    openrlhf = engines.reward_func([f"<pad>{prompt}{TWO[0]}<|im_end|>\n<pad><pad>"], [prompt], ["Q0"])
    assert openrlhf == {"rewards": reward, "scores": reward, "extra_logs": parts}
    with pytest.raises(UserError, match="does not contain its prompt"):
        engines.reward_func([TWO[0]], [prompt], ["Q0"])
    sizes = {run: [line.size for line in service.lines(run)] for run in ("slime", "openrlhf", "mine")}
    assert sizes == {"slime": [1], "openrlhf": [], "mine": [1]}
    assert sum(line.size for line in service.lines("verl")) == 3
    # The mean rewards of A and B are 0.9 and 0.7, and no run stands on another's
    assert list(service.lines("mine")[0].history.values()) == pytest.approx([0.2 * 0.9, 0.2 * 0.7])


@pytest.mark.parametrize(("text", "seconds"), [("7", 7.0), ("", 3.0), ("nan", 3.0), ("-1", 3.0), ("Wed, 21 Oct", 3.0)])
def test_retry_after_is_a_number(text, seconds):
    assert client.retry_after(httpx.Response(503, headers={"Retry-After": text}), 3.0) == seconds


def test_an_address_that_does_not_answer_is_warned_of_and_stops_the_trainer(monkeypatch):
    monkeypatch.setattr(client, "SILENCE_SECONDS", 0.0)
    nowhere = "http://127.0.0.1:1"
    with pytest.warns(match=f"{nowhere} .*ConnectError"), pytest.raises(UserError, match=r"no answer .*ConnectError"):
        call(RemoteGroupRewards(nowhere, "a-token", patience=2.0))


def message(*contents):
    return [{"role": "assistant", "content": content} for content in contents]


@pytest.mark.parametrize(
    "completions",
    [TWO, [message("1.00,0.00", text) for text in TWO], [message([{"type": "text", "text": text}]) for text in TWO]],
)
def test_a_call_is_a_round(service, completions):
    logged, extra = {}, {}
    found = call(RemoteGroupRewards(), completions, log_metric=logged.__setitem__, log_extra=extra.__setitem__)
    assert found == pytest.approx(MEAN_OF_TWO)
    assert logged["group_reward/group/A"] == pytest.approx(0.75)
    assert logged["group_reward/fairness_index"] == pytest.approx((64 / 65 + 25 / 26) / 2)
    assert "group_reward/fell_back" not in logged  # average has no threshold
    assert extra == {"alignment": pytest.approx([0.8, 0.75]), "format": [1.0, 1.0]}
    assert list(service.lines("trl")[-1].history.values()) == pytest.approx(HISTORY)
    assert inspect.iscoroutinefunction(RemoteGroupRewards.group_reward)


def test_a_trainer_that_is_resumed_goes_on_and_one_that_goes_back_takes_the_state_with_it(service):
    first = RemoteGroupRewards()
    for step in (0, 1):
        call(first, step=step)
    call(first, step=2)
    call(first, ["0.20,0.30,0.50"], ["Q2"], step=2)  # an evaluation at the same step
    call(RemoteGroupRewards(), step=3)  # resumed at its last checkpoint
    assert [line.round for line in service.lines("trl")] == [1, 1001, 2001, 2002, 3001]
    call(RemoteGroupRewards(), TWO[::-1], TWO_QUESTIONS[::-1], step=1)  # killed, and resumed from an older one
    assert [line.round for line in service.lines("trl")] == [1, 1001]
    h = 1 - 0.8**2
    assert list(service.lines("trl")[-1].history.values()) == pytest.approx([h * 0.75, h * 0.8])


def test_processes_get_what_one_process_gets_bit_for_bit(service, monkeypatch):
    texts = [f"{share / 100:.2f},{1 - share / 100:.2f}" for share in range(3, 99, 8)]
    half = len(texts) // 2

    async def two_steps(run, *shares):
        processes, found = [RemoteGroupRewards(run=run) for _ in shares], []
        for step in range(2):
            calls = []
            for rank, share in enumerate(shares):
                monkeypatch.setenv("RANK", str(rank))
                monkeypatch.setenv("WORLD_SIZE", str(len(shares)))
                calls.append(asyncio.create_task(asked(processes[rank], share, TWO_QUESTIONS * half, step=step)))
                await asyncio.sleep(0)  # until it knows its rank
            found.append([reward for part in await asyncio.gather(*calls) for reward in part])
        return found

    one = asyncio.run(two_steps("one", texts))
    assert one == asyncio.run(two_steps("two", texts[:half], texts[half:]))
    assert len(set(one[0])) > half
    assert service.lines("one")[-1].history == service.lines("two")[-1].history


def test_a_process_that_waits_for_the_others_asks_again_at_once(service, monkeypatch):
    monkeypatch.setattr(client, "READ_SECONDS", 0.2)
    monkeypatch.setattr(client, "FIRST_PAUSE", 60.0)
    started = time.monotonic()
    service.node.gate.clear()
    threading.Timer(0.5, service.node.gate.set).start()
    assert call(RemoteGroupRewards()) == pytest.approx(MEAN_OF_TWO)
    assert time.monotonic() - started < 30
    assert len(service.node.asked) == 1


def test_too_few_groups_are_waited_for(service, monkeypatch):
    monkeypatch.setattr(rounds, "RETRY_SECONDS", 1)
    service.node.silent = {"A", "B"}
    threading.Timer(0.5, lambda: service.node.silent.clear()).start()
    assert call(RemoteGroupRewards()) == pytest.approx(MEAN_OF_TWO)


@pytest.mark.parametrize(
    ("keys", "questions", "says"),
    [
        ({}, None, "no column question_id"),
        ({}, ["Q0", "Q7"], "422: .*answer '1/000001': no question_id 'Q7'"),
        ({"token": "wrong"}, TWO_QUESTIONS, "401"),
        ({"run": "a/b"}, TWO_QUESTIONS, r'422: .*"run".*String should match'),
    ],
)
def test_what_cannot_be_scored_stops_the_trainer_with_a_reason(service, keys, questions, says):
    with pytest.raises(UserError, match=says):
        call(RemoteGroupRewards(**keys), questions=questions)
