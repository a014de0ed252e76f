"""`appa eval`: any model's answers to a served run's held-out questions, judged by its groups.

No axis letters: there are no arrays here.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.table import Table

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import keep_lines, writing
from appa_flwr.run.records import MODEL
from appa_flwr.trainers.client import Served

KEY = "APPA_EVAL_KEY"
TRIES, PAUSE, ANSWER_SECONDS = 6, 1.0, 300.0
MEASURES = ("Avg AS", "Min AS", "FI")

Say = Callable[[str], None]


def evaluate(
    served: Served,
    name: str,
    *,
    model: str,
    endpoint: str,
    temperature: float,
    concurrency: int,
    kept: Path,
    say: Say,
) -> dict[str, Any]:
    """Ask the model what it has not answered yet, and have the groups judge all of its answers.

    Args:
        served: the run.
        name: of the model in the tables.
        model: what the endpoint calls it; without one, a folder or a name on the hub.
        endpoint: OpenAI-compatible, up to `/v1`; empty = the model is loaded here.
        temperature: 0 = greedy.
        concurrency: questions that the endpoint has at once.
        kept: file that answers go to at once, so that a stopped evaluation goes on.
        say: gets lines of progress.

    Raises:
        UserError: the endpoint does not answer, a model cannot be loaded, or the service refuses.
    """
    asked = asyncio.run(served.ask("GET", "/v1/held-out"))
    if asked is None:
        raise UserError("the served run judges no models; it has to be one of appa serve")
    prompts = {row["question_id"]: row["prompt"] for row in asked["questions"]}
    keep_lines(kept)
    answers = {row["question_id"]: row["completion"] for row in map(json.loads, kept.read_text().splitlines())}
    left = {asked: prompt for asked, prompt in prompts.items() if asked not in answers}
    say(f"{name}: {len(prompts)} held-out questions, {len(prompts) - len(left)} answered before")
    tokens = int(asked["answer_tokens"])

    def put(question_id: str, completion: str) -> None:
        answers[question_id] = completion
        with writing(kept), kept.open("a") as file:
            file.write(json.dumps({"question_id": question_id, "completion": completion}) + "\n")
        if len(answers) % max(1, len(prompts) // 10) == 0:
            say(f"{name}: {len(answers)}/{len(prompts)} answered")

    if endpoint:
        asyncio.run(_ask_all(endpoint, model, left, put, tokens=tokens, temperature=temperature, most=concurrency))
    elif left:
        # By name: the server's code lies above this package, which a group has without it.
        local = importlib.import_module("server_app.serve.local_model")
        for question_id, text in zip(
            left, local.answers(model, list(left.values()), answer_tokens=tokens), strict=True
        ):
            put(question_id, text)
    found = asyncio.run(served.ask("POST", f"/v1/models/{name}", {"answers": {key: answers[key] for key in prompts}}))
    assert found is not None
    return found


async def _ask_all(
    endpoint: str,
    model: str,
    prompts: Mapping[str, str],
    put: Callable[[str, str], None],
    *,
    tokens: int,
    temperature: float,
    most: int,
) -> None:
    key = os.environ.get(KEY, "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    room = asyncio.Semaphore(most)
    async with httpx.AsyncClient(headers=headers, timeout=ANSWER_SECONDS) as client:

        async def one(question_id: str, prompt: str) -> None:
            async with room:
                messages = [{"role": "user", "content": prompt}]
                body = {"model": model, "messages": messages, "temperature": temperature, "max_tokens": tokens}
                put(question_id, await _completion(client, f"{endpoint.rstrip('/')}/chat/completions", body))

        await asyncio.gather(*(one(question_id, prompt) for question_id, prompt in prompts.items()))


async def _completion(client: httpx.AsyncClient, url: str, body: Mapping[str, Any]) -> str:
    pause, why = PAUSE, ""
    for _ in range(TRIES):
        try:
            given = await client.post(url, json=body)
            if given.is_success:
                return str(given.json()["choices"][0]["message"]["content"] or "")
            why = f"{given.status_code}: {given.text[:200]}"
            if given.status_code < 500 and given.status_code not in (408, 429):
                break
        except (httpx.TransportError, ValueError, LookupError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
        await asyncio.sleep(pause)
        pause *= 2
    raise UserError(f"{url}: no answer ({why}); what was answered is kept")


def tables(found: Mapping[str, Any], name: str) -> Iterator[Table]:
    """All models beside the trivial answers and ceilings, and this one's differences from all others."""
    for survey in (True, False) if any(row["survey"] for row in found["rows"]) else (False,):
        against = "survey answers" if survey else "predictions"
        shown = Table("method", "FI", *MEASURES[:2], "worst group", "readable", "format", title=f"Against {against}")
        for row in sorted(found["rows"], key=lambda row: -(row["survey"] if survey else row)["avg_as"]):
            scores = row["survey"] if survey else row
            worst = min((value, name) for name, value in scores["per_group"].items() if value is not None)[1]
            numbers = [f"{scores[key]:.3f}" for key in ("fi", "avg_as", "min_as")]
            more = ["-" if row[key] is None else f"{row[key]:.2f}" for key in ("readable", "format_score")]
            shown.add_row(row["method"].removeprefix(MODEL), *numbers, worst, *more)
        yield shown
        less = Table("less", *MEASURES, title=f"{name}, against {against}: 95 % intervals over questions")
        kind = "survey" if survey else "predictions"
        for one in found["compared"]:
            if (one["model"], one["against"]) == (name, kind):
                less.add_row(one["less"] or "(its own)", *(_interval(one[measure]) for measure in MEASURES))
        yield less


def _interval(numbers: Sequence[float]) -> str:
    return "{:+.3f} ({:+.3f} to {:+.3f})".format(*numbers)
