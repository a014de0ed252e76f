"""`appa eval`: any model's answers to a served run's held-out questions, judged by its groups.

No axis letters: there are no arrays here.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import keep_lines, writing
from appa_flwr.core.text import duration
from appa_flwr.survey.sources import sha256_of
from appa_flwr.trainers.client import Served, client_of, retry_after, say_silence

KEY = "APPA_EVAL_KEY"
PAUSES, LONGEST_PAUSE, ANSWER_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0), 60.0, 300.0
LINES = 10  # of progress

Say = Callable[[str], None]
Put = Callable[[str, str], None]


class Job(NamedTuple):
    """What a model is asked; `sample` counts from 0."""

    question_id: str
    prompt: str
    sample: int


Ask = Callable[[Mapping[str, Job], Put], None]
"""Asks jobs by key, and hands over what comes of each, in any order."""


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
    kept: Path,
    say: Say,
) -> dict[str, Any]:
    """Ask the model what it has not answered yet, and have the groups judge all of its answers.

    Args:
        served: the run.
        name: of the model in the tables.
        model: what the endpoint calls it; without one, a folder or a name on the hub.
        endpoint: OpenAI-compatible, up to `/v1`; empty = the model is loaded here.
        plain: the endpoint goes on with the prompt as a text, for models without a chat template.
        temperature: 0 = greedy.
        samples: answers to each question.
        concurrency: questions that the endpoint has at once.
        kept: file that answers go to at once, so that a stopped evaluation goes on. They count for the same model (for
            a folder: the same files), endpoint, prompt, length and temperature; an endpoint cannot tell of another
            model of the same name, so it is said how many are taken from the file.
        say: gets lines of progress.

    Raises:
        UserError: the endpoint does not answer, a model cannot be loaded, or the service refuses.
    """
    if samples > 1 and not temperature:
        raise UserError("--samples above 1 needs a --temperature above 0: greedy answers are all the same")
    held_out = asyncio.run(served.ask("GET", "/v1/held-out"))
    if held_out is None:
        raise UserError("the served run judges no models; it has to be one of appa serve")
    questions, tokens = held_out["questions"], int(held_out["answer_tokens"])
    ask: Ask
    if endpoint:
        remote = Endpoint(endpoint, model, plain=plain, most=concurrency, tokens=tokens, temperature=temperature)
        ask = remote.answers
    else:
        ask = functools.partial(_local, model=model, tokens=tokens, temperature=temperature)
    jobs = [Job(row["question_id"], row["prompt"], sample) for row in questions for sample in range(samples)]
    same_for_all = [model, endpoint.rstrip("/"), _files_of(model), plain, temperature, tokens]
    by_key = {hashlib.sha256(json.dumps([*same_for_all, *job]).encode()).hexdigest()[:16]: job for job in jobs}
    texts = _texts(kept, by_key, ask, lambda line: say(f"{name}: {line}"))
    answers: dict[str, list[str]] = {row["question_id"]: [] for row in questions}
    for job, text in zip(jobs, texts, strict=True):
        answers[job.question_id].append(text)
    if samples > 1 and all(len(set(samples_of)) == 1 for samples_of in answers.values()):
        say(f"{name}: NOTE: all samples of each question are the same; does the endpoint sample at all?")
    judged = asyncio.run(served.ask("POST", f"/v1/models/{name}", {"answers": answers}))
    assert judged is not None
    return judged


def _files_of(model: str) -> str:
    """A hash of a local model's files, and of the base's that an adapter names; empty for a name on the hub."""
    adapter = Path(model) / "adapter_config.json"
    try:
        base = json.loads(adapter.read_bytes())["base_model_name_or_path"] if adapter.exists() else ""
        return sha256_of(model) + (sha256_of(base) if base else "")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{model}: cannot be read ({error})") from None


def _texts(kept: Path, jobs: Mapping[str, Job], ask: Ask, say: Say) -> list[str]:
    """The answer to each job; only those that the file lacks are asked."""
    keep_lines(kept)
    text_of: dict[str, str] = {}
    for number, line in enumerate(kept.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            if row["key"] in jobs:
                text_of[row["key"]] = row["found"]
        except (ValueError, LookupError, TypeError):
            raise UserError(f"{kept}: line {number} is no answer that appa eval has kept; move the file away") from None
    started, before = time.monotonic(), len(text_of)
    say(f"{len(jobs)} answers" + (f", {before} of them from before; {kept} has them" if before else ""))

    def put(key: str, text: str) -> None:
        text_of[key] = text
        with writing(kept), kept.open("a", encoding="utf-8") as file:
            row = {"question_id": jobs[key].question_id, "sample": jobs[key].sample, "key": key, "found": text}
            file.write(json.dumps(row) + "\n")
        if len(text_of) % max(1, len(jobs) // LINES) == 0:
            seconds = (time.monotonic() - started) / (len(text_of) - before) * (len(jobs) - len(text_of))
            say(f"{len(text_of)}/{len(jobs)}" + (f" ({duration(seconds)} left)" if seconds else ""))

    if len(text_of) < len(jobs):
        ask({key: job for key, job in jobs.items() if key not in text_of}, put)
    return [text_of[key] for key in jobs]


def _local(jobs: Mapping[str, Job], put: Put, *, model: str, tokens: int, temperature: float) -> None:
    """Ask a model of this machine; see `Ask`."""
    # By name: the server's code lies above this package, which a group has without it.
    importlib.import_module("server_app").quiet(bars=True)
    loaded = importlib.import_module("server_app.serve.judge").LocalModel(model)
    prompts = [job.prompt for job in jobs.values()]
    for key, text in zip(jobs, loaded.answers(prompts, answer_tokens=tokens, temperature=temperature), strict=True):
        put(key, text)


class Endpoint:
    """A model at an OpenAI-compatible address."""

    def __init__(self, url: str, model: str, *, plain: bool, most: int, tokens: int, temperature: float) -> None:
        self._url = f"{url.rstrip('/')}/{'' if plain else 'chat/'}completions"
        self._plain, self._most = plain, most
        self._asked_of_all = {"model": model, "max_tokens": tokens, "temperature": temperature}

    def answers(self, jobs: Mapping[str, Job], put: Put) -> None:
        """What it writes; see `Ask`."""
        asyncio.run(self._all(jobs, put))

    async def _all(self, jobs: Mapping[str, Job], put: Put) -> None:
        key = os.environ.get(KEY, "")
        headers, room = {"Authorization": f"Bearer {key}"} if key else {}, asyncio.Semaphore(self._most)
        client = await client_of(self._url)
        post = functools.partial(client.post, self._url, headers=headers, timeout=ANSWER_SECONDS)

        async def one(name: str, job: Job) -> None:
            async with room:
                put(name, await self._answer(post, job))

        await asyncio.gather(*(one(name, job) for name, job in jobs.items()))

    async def _answer(self, post: Callable[..., Awaitable[httpx.Response]], job: Job) -> str:
        """What it writes, once that comes."""
        prompt = {"prompt": job.prompt} if self._plain else {"messages": [{"role": "user", "content": job.prompt}]}
        drawn = {"seed": job.sample} if self._asked_of_all["temperature"] else {}
        why, started = "", time.monotonic()
        for pause in (*PAUSES, 0.0):
            wait = pause
            try:
                reply = await post(json={**self._asked_of_all, **prompt, **drawn})
                if reply.is_success:
                    choice = reply.json()["choices"][0]
                    return str((choice["text"] if self._plain else choice["message"]["content"]) or "")
                why = f"{reply.status_code}: {reply.text[:200]}"
                if reply.status_code < 500 and reply.status_code not in (408, 429):
                    break
                wait = min(LONGEST_PAUSE, retry_after(reply, pause))
            except (httpx.TransportError, ValueError, LookupError, TypeError) as error:
                why = f"{type(error).__name__}: {error}"
            say_silence(self._url, started, why)
            await asyncio.sleep(wait)
        raise UserError(f"{self._url}: no answer ({why}); what was answered is kept")
