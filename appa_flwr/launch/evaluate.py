"""`appa eval`: any model's answers to a served run's held-out questions, judged by its groups."""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import httpx

from appa_flwr.core.errors import UserError
from appa_flwr.core.text import duration
from appa_flwr.trainers.client import Served, client_of, retry_after, say_silence

KEY = "APPA_EVAL_KEY"
PAUSES, LONGEST_PAUSE, ANSWER_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0), 60.0, 300.0
LINES = 10  # of progress


class Job(NamedTuple):
    """What a model is asked; `sample` counts from 0."""

    question_id: str
    prompt: str
    sample: int


Put = Callable[[Job, str], None]
"""Takes the answer to a job, in any order."""


def evaluate(
    served: Served,
    name: str,
    *,
    model: str,
    endpoint: str = "",
    plain: bool = False,
    temperature: float = 0.0,
    samples: int = 1,
    concurrency: int = 8,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Ask the model all held-out questions, and have the groups judge its answers.

    Args:
        served: the run.
        name: of the model in the tables.
        model: what the endpoint calls it; without one, a folder or a name on the hub.
        endpoint: OpenAI-compatible, up to `/v1`; empty = the model is loaded here.
        plain: the endpoint goes on with the prompt as a text, for models without a chat template.
        temperature: 0 = greedy.
        samples: answers to each question.
        concurrency: questions that the endpoint has at once.
        say: gets lines of progress.

    Raises:
        UserError: the endpoint does not answer, a model cannot be loaded, or the service refuses.
    """
    if samples > 1 and not temperature:
        raise UserError("--samples above 1 needs a --temperature above 0: greedy answers are all the same")
    held_out = asyncio.run(served.ask("GET", "/v1/held-out"))
    if held_out is None:
        raise UserError("the served run judges no models; it has to be one of appa serve")
    tokens = int(held_out["answer_tokens"])
    jobs = [
        Job(row["question_id"], row["prompt"], sample) for row in held_out["questions"] for sample in range(samples)
    ]
    text_of: dict[Job, str] = {}
    started = time.monotonic()

    def put(job: Job, text: str) -> None:
        text_of[job] = text
        if (count := len(text_of)) % max(1, len(jobs) // LINES) == 0:
            left = (time.monotonic() - started) / count * (len(jobs) - count)
            say(f"{name}: {count}/{len(jobs)} answers" + (f" ({duration(left)} left)" if left else ""))

    if endpoint:
        remote = Endpoint(endpoint, model, plain=plain, tokens=tokens, temperature=temperature)
        asyncio.run(remote.answers(jobs, put, concurrency=concurrency))
    else:
        _local(jobs, put, model=model, tokens=tokens, temperature=temperature)
    answers: dict[str, list[str]] = {}
    for job in jobs:
        answers.setdefault(job.question_id, []).append(text_of[job])
    if samples > 1 and all(len(set(texts)) == 1 for texts in answers.values()):
        say(f"{name}: NOTE: all samples of each question are the same; does the endpoint sample at all?")
    judged = asyncio.run(served.ask("POST", f"/v1/models/{name}", {"answers": answers}))
    assert judged is not None
    return judged


def _local(jobs: Sequence[Job], put: Put, *, model: str, tokens: int, temperature: float) -> None:
    """Ask a model of this machine."""
    # By name: the server's code lies above this package, which a group has without it.
    importlib.import_module("server_app").quiet(bars=True)
    loaded = importlib.import_module("server_app.serve.judge").LocalModel(model)
    texts = loaded.answers([job.prompt for job in jobs], answer_tokens=tokens, temperature=temperature)
    for job, text in zip(jobs, texts, strict=True):
        put(job, text)


class Endpoint:
    """A model at an OpenAI-compatible address; see `evaluate` for the arguments."""

    def __init__(self, url: str, model: str, *, plain: bool, tokens: int, temperature: float) -> None:
        self._url = f"{url.rstrip('/')}/{'' if plain else 'chat/'}completions"
        self._plain = plain
        self._body = {"model": model, "max_tokens": tokens, "temperature": temperature}

    async def answers(self, jobs: Sequence[Job], put: Put, *, concurrency: int) -> None:
        """Ask all jobs, `concurrency` of them at once.

        Raises:
            UserError: it refuses a job, or does not answer it in all tries.
        """
        key, room = os.environ.get(KEY, ""), asyncio.Semaphore(concurrency)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        client = await client_of(self._url)
        post = functools.partial(client.post, self._url, headers=headers, timeout=ANSWER_SECONDS)

        async def ask(job: Job) -> None:
            async with room:
                put(job, await self._answer(post, job))

        await asyncio.gather(*map(ask, jobs))

    async def _answer(self, post: Callable[..., Any], job: Job) -> str:
        prompt = {"prompt": job.prompt} if self._plain else {"messages": [{"role": "user", "content": job.prompt}]}
        seed = {"seed": job.sample} if self._body["temperature"] else {}
        why, started = "", time.monotonic()
        for pause in (*PAUSES, 0.0):
            wait = pause
            try:
                reply: httpx.Response = await post(json={**self._body, **prompt, **seed})
                if reply.is_success:
                    choice = reply.json()["choices"][0]
                    return str((choice["text"] if self._plain else choice["message"]["content"]) or "")
                why = f"{reply.status_code}: {' '.join(reply.text[:200].split())}"
                if reply.status_code < 500 and reply.status_code not in (408, 429):
                    break
                wait = min(LONGEST_PAUSE, retry_after(reply, pause))
            except (httpx.TransportError, ValueError, LookupError, TypeError) as error:
                why = f"{type(error).__name__}: {error}"
            say_silence(self._url, started, why)
            await asyncio.sleep(wait)
        raise UserError(f"{self._url}: no answer ({why})")
