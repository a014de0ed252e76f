"""What the service costs: CPU of a round beyond the groups' own scoring, messages of single answers, memory of rounds.

    python -m experiments.benchmarks.service

Groups are in this process and score by random tables, so that all else is the service and its two clients.

Axis letters: G groups, Q questions, K options.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import psutil
import typer

from appa_flwr.analysis import aggregation
from appa_flwr.config import Config
from appa_flwr.core import markdown
from appa_flwr.run.served import ServedRuns
from experiments import entry
from experiments.grpo import LocalGroups
from server_app.federation.answers import parse_answers
from server_app.federation.catalogue import build_catalogue
from server_app.federation.group_rewards import aggregated_reward
from server_app.serve.phase import serving
from server_app.serve.requests import Item, Refused
from server_app.serve.service import Service
from server_app.serve.web import Door

ANSWERS, SINGLE, WARM = 96, 256, 20
MILLISECONDS, MICROSECONDS, MEBIBYTE = 1e3, 1e6, 2**20


def _cpu(work: Callable[[int], Any], times: int) -> float:
    """CPU seconds of this process for one call, after some that warm it up."""
    for number in range(WARM):
        work(number)
    started = time.process_time()
    for number in range(WARM, WARM + times):
        work(number)
    return (time.process_time() - started) / times


def measure(*, rounds: int) -> list[tuple[str, str]]:
    """Every measure with its unit, in words."""
    config = Config.load({"serve.gather-seconds": 0.02})
    catalogue, rng = build_catalogue(config), np.random.default_rng(0)
    train_J = np.flatnonzero(~catalogue.held_out_Q)
    side_GQK = rng.random((8, *catalogue.option_QK.shape)) * catalogue.option_QK
    groups = LocalGroups(tuple("ABCDEFGH"), side_GQK / side_GQK.sum(2, keepdims=True), catalogue.option_QK)
    question_J = rng.choice(train_J, ANSWERS)
    sizes = catalogue.option_QK[question_J].sum(1)
    texts = [",".join(f"{share:.2f}" for share in rng.dirichlet(np.ones(size))) for size in sizes]
    names = [catalogue.questions[q].question_id for q in question_J]
    rule = aggregation.configured(config.rule, config.appa)

    def plain(_: int) -> None:
        answers = parse_answers(config.task, texts, question_J, catalogue)
        rewards = groups.score(answers.request([config.reward_metric]))
        aggregated_reward(rule, rule.init(8), answers, rewards, metric=config.reward_metric, alignment_weight=0.85)

    def body(run: str, number: int, part: int, parts: int) -> dict[str, Any]:
        mine = range(part, ANSWERS, parts)
        items = [{"id": f"{number}/{j}", "question_id": names[j], "completion": texts[j]} for j in mine]
        return {"run": run, "round": number + 1, "size": ANSWERS, "part": part, "parts": parts, "items": items}

    found = [("a round of the groups and the rule alone, 96 answers", f"{MILLISECONDS * _cpu(plain, 100):.1f} ms")]
    process = psutil.Process()
    with (
        tempfile.TemporaryDirectory(prefix="appa-service-") as folder,
        serving(groups, catalogue, config, Path(folder)) as (url, token),
        asyncio.Runner() as runner,
    ):
        clients = [httpx.AsyncClient(base_url=url, timeout=60) for _ in range(2)]

        async def post(part: int, asked: dict[str, Any], bearer: str = f"Bearer {token}") -> Any:
            given = await clients[part].post("/v1/score", json=asked, headers={"Authorization": bearer})
            return given.json()

        async def both(number: int, *bearer: str) -> None:
            await asyncio.gather(*(post(part, body("exact", number, part, 2), *bearer) for part in (0, 1)))

        spent = _cpu(lambda number: runner.run(both(number)), 200)
        found.append(("the same by two clients over HTTP, their own work included", f"{spent * MILLISECONDS:.1f} ms"))
        refused = _cpu(lambda number: runner.run(both(number, "Bearer wrong")), 100)
        found.append(("these requests refused unread, the clients included", f"{refused * MILLISECONDS:.1f} ms"))
        again = _cpu(lambda number: runner.run(post(0, body("exact", number % WARM, 0, 2))), 100)
        found.append(("a part of 48 asked for again, client included", f"{again * MILLISECONDS:.1f} ms"))
        before = process.memory_info().rss
        for number in range(WARM + 200, WARM + 200 + rounds):
            runner.run(both(number))
        grown = (process.memory_info().rss - before) / MEBIBYTE
        found.append((f"memory added by {rounds} rounds", f"{grown:.1f} MiB"))
        size = (Path(folder) / "served.db").stat().st_size / MEBIBYTE
        found.append((f"the file of {rounds + 2 * WARM + 200} rounds", f"{size:.1f} MiB"))
        runner.run(_closed(clients))
    with tempfile.TemporaryDirectory(prefix="appa-service-") as folder:
        store = ServedRuns(Path(folder))
        service = Service(groups, rule, catalogue, config, store)

        async def single() -> int:
            items = [Item(f"s{n}", names[n % ANSWERS], texts[n % ANSWERS]) for n in range(SINGLE)]
            await asyncio.gather(*(service.stream("stream", [item]) for item in items))
            return service.asked

        found.append((f"messages to a group of {SINGLE} single answers at once", str(asyncio.run(single()))))
        door, token = Door(service, token=secrets.token_urlsafe(), body_mib=1), secrets.token_urlsafe()

        def refuse(_: int) -> None:
            with suppress(Refused):
                door.check(token)

        raw = json.dumps(body("x", 1, 0, 1))
        found.append(("a token refused", f"{_cpu(refuse, 1000) * MICROSECONDS:.0f} µs"))
        parsed = _cpu(lambda _: parse_answers(config.task, texts, question_J, catalogue), 100)
        found.append(("96 answers parsed", f"{parsed * MICROSECONDS:.0f} µs"))
        found.append(("their request read from JSON", f"{_cpu(lambda _: json.loads(raw), 100) * MICROSECONDS:.0f} µs"))
        ids = [f"s{n}" for n in range(ANSWERS)]
        kept = _cpu(lambda _: store.answers("stream", 0, ids), 100)
        found.append(("96 kept answers found", f"{kept * MICROSECONDS:.0f} µs"))
        store.close()
    return found


async def _closed(clients: list[httpx.AsyncClient]) -> None:
    for client in clients:
        await client.aclose()


def main(rounds: Annotated[int, typer.Option(min=1, help="Rounds over which memory is watched.")] = 1000) -> None:
    """Measure, and print a table."""
    print(markdown.table(["what", "CPU time of one, or number"], [list(row) for row in measure(rounds=rounds)]))


if __name__ == "__main__":
    entry.run(main)
