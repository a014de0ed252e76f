"""`appa eval`: any model's answers to a served run's held-out questions, judged by its groups.

No axis letters: there are no arrays here.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import keep_lines, writing
from appa_flwr.protocol import formats
from appa_flwr.report.findings import duration
from appa_flwr.trainers.client import Served

KEY = "APPA_EVAL_KEY"
PAUSES, LONGEST_PAUSE, ANSWER_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0), 60.0, 300.0
ALTERNATIVES = 20  # as many of the likeliest tokens as OpenAI and vLLM tell
LINES = 10  # of progress

Say = Callable[[str], None]
Put = Callable[[str, Any], None]


class Job(NamedTuple):
    """What a model is asked; `sample` counts from 0, `size` is of the options."""

    question_id: str
    prompt: str
    size: int
    sample: int = 0


Ask = Callable[[Mapping[str, Job], Put], None]
"""Asks jobs by key, and hands over what comes of each, in any order."""


class NoChoicesError(Exception):
    """The endpoint does not tell what the model would choose, and why not."""


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
        kept: file that answers go to at once, so that a stopped evaluation goes on.
        say: gets lines of progress.

    Raises:
        UserError: the endpoint does not answer, a model cannot be loaded, or the service refuses.
    """
    if samples > 1 and not temperature:
        raise UserError("--samples above 1 needs a --temperature above 0: greedy answers are all the same")
    asked = asyncio.run(served.ask("GET", "/v1/held-out"))
    if asked is None:
        raise UserError("the served run judges no models; it has to be one of appa serve")
    questions, tokens = asked["questions"], int(asked["answer_tokens"])
    asks: dict[str, Ask]
    if endpoint:
        found = Endpoint(endpoint, model, plain=plain, most=concurrency)
        asks = {"say": functools.partial(found.answers, tokens=tokens, temperature=temperature), "do": found.choices}
    else:
        asks = _local(model, tokens=tokens, temperature=temperature)
    of = {"say": [model, plain, temperature], "do": [model, plain]}

    def told(kind: str, jobs: Iterable[Job]) -> list[Any]:
        by_key = {hashlib.sha256(json.dumps([kind, *of[kind], *job]).encode()).hexdigest()[:16]: job for job in jobs}
        return _told(kept, by_key, asks[kind], lambda line: say(f"{name}, {kind}: {line}"))

    jobs = [
        Job(one["question_id"], one["prompt"], len(one["options"]), sample)
        for one in questions
        for sample in range(samples)
    ]
    texts = told("say", jobs)
    answers: dict[str, list[str]] = {one["question_id"]: [] for one in questions}
    for job, text in zip(jobs, texts, strict=True):
        answers[job.question_id].append(text)
    if samples > 1 and all(len(set(of_one)) == 1 for of_one in answers.values()):
        say(f"{name}: NOTE: all samples of each question are the same; does the endpoint sample at all?")
    body: dict[str, Any] = {"answers": answers}
    try:
        chosen = told(
            "do",
            [Job(q["question_id"], q["choice_prompt"], len(q["options"])) for q in questions if "choice_prompt" in q],
        )
    except NoChoicesError as why:
        say(f"{name}: NOTE: no row (do) of what it would choose: {why}")
        chosen = []
    if chosen:
        body["choices"] = {q["question_id"]: one["share"] for q, one in zip(questions, chosen, strict=True)}
        say(f"{name}, do: {sum(one['mass'] for one in chosen) / len(chosen):.0%} of the probability on letters")
    judged = asyncio.run(served.ask("POST", f"/v1/models/{name}", body))
    assert judged is not None
    return judged


def _told(kept: Path, jobs: Mapping[str, Job], ask: Ask, say: Say) -> list[Any]:
    """What came of each job; asked is what the file does not have."""
    keep_lines(kept)
    found: dict[str, Any] = {}
    for number, line in enumerate(kept.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            if row["key"] in jobs:
                found[row["key"]] = row["found"]
        except (ValueError, LookupError, TypeError):
            raise UserError(f"{kept}: line {number} is no answer that appa eval has kept; move the file away") from None
    started, before = time.monotonic(), len(found)
    say(f"{len(jobs)} answers" + (f", {before} of them kept from before" if before else ""))

    def put(key: str, of: Any) -> None:
        found[key] = of
        with writing(kept), kept.open("a", encoding="utf-8") as file:
            row = {"question_id": jobs[key].question_id, "sample": jobs[key].sample, "key": key, "found": of}
            file.write(json.dumps(row) + "\n")
        if len(found) % max(1, len(jobs) // LINES) == 0:
            seconds = (time.monotonic() - started) / (len(found) - before) * (len(jobs) - len(found))
            say(f"{len(found)}/{len(jobs)}" + (f" ({duration(seconds)} left)" if seconds else ""))

    if len(found) < len(jobs):
        ask({key: job for key, job in jobs.items() if key not in found}, put)
    return [found[key] for key in jobs]


def _local(model: str, *, tokens: int, temperature: float) -> dict[str, Ask]:
    """A model of this machine, which is loaded once it is asked."""

    @functools.cache
    def loaded() -> Any:
        # By name: the server's code lies above this package, which a group has without it.
        return importlib.import_module("server_app.serve.local_model").LocalModel(model)

    def answers(jobs: Mapping[str, Job], put: Put) -> None:
        prompts = [job.prompt for job in jobs.values()]
        for key, text in zip(
            jobs, loaded().answers(prompts, answer_tokens=tokens, temperature=temperature), strict=True
        ):
            put(key, text)

    def choices(jobs: Mapping[str, Job], put: Put) -> None:
        sizes = [job.size for job in jobs.values()]
        for key, of in zip(jobs, loaded().choices([job.prompt for job in jobs.values()], sizes=sizes), strict=True):
            put(key, {"share": None, "mass": 0.0} if of is None else {"share": of[0], "mass": of[1]})

    return {"say": answers, "do": choices}


class Endpoint:
    """A model at an OpenAI-compatible address."""

    def __init__(self, url: str, model: str, *, plain: bool, most: int) -> None:
        self._url = f"{url.rstrip('/')}/{'' if plain else 'chat/'}completions"
        self._model, self._plain, self._most = model, plain, most

    def answers(self, jobs: Mapping[str, Job], put: Put, *, tokens: int, temperature: float) -> None:
        """What it writes; see `Ask`."""

        def body(job: Job) -> dict[str, Any]:
            drawn = {"seed": job.sample} if temperature else {}
            return {"max_tokens": tokens, "temperature": temperature, **drawn}

        def text(of: Mapping[str, Any], job: Job) -> str:
            return str((of["text"] if self._plain else of["message"]["content"]) or "")

        asyncio.run(self._all(jobs, body, text, put))

    def choices(self, jobs: Mapping[str, Job], put: Put) -> None:
        """What it would choose, as far as the likeliest tokens tell.

        Raises:
            NoChoicesError: they are not told.
        """
        told = {"logprobs": ALTERNATIVES} if self._plain else {"logprobs": True, "top_logprobs": ALTERNATIVES}
        asked = {"max_tokens": 1, "temperature": 0.0, **told}
        first = dict([next(iter(jobs.items()))])
        try:
            asyncio.run(self._all(first, lambda job: asked, self._choice, put))
        except UserError as refused:
            raise NoChoicesError(str(refused)) from None
        rest = {key: job for key, job in jobs.items() if key not in first}
        asyncio.run(self._all(rest, lambda job: asked, self._choice, put))

    def _choice(self, of: Mapping[str, Any], job: Job) -> dict[str, Any]:
        try:
            (told,) = of["logprobs"]["top_logprobs" if self._plain else "content"][:1]
            pairs = told.items() if self._plain else [(one["token"], one["logprob"]) for one in told["top_logprobs"]]
        except (LookupError, TypeError, ValueError):
            raise NoChoicesError("the endpoint tells no top_logprobs") from None
        place = {letter: k for k, letter in enumerate(formats.letters(job.size))}
        share = [0.0] * job.size
        for token, logprob in pairs:
            if (k := place.get(token.strip())) is not None:
                share[k] += math.exp(logprob)
        mass = sum(share)
        return {"share": [one / mass for one in share] if mass else None, "mass": mass}

    async def _all(
        self,
        jobs: Mapping[str, Job],
        body: Callable[[Job], Mapping[str, Any]],
        read: Callable[[Mapping[str, Any], Job], Any],
        put: Put,
    ) -> None:
        key = os.environ.get(KEY, "")
        headers, room = {"Authorization": f"Bearer {key}"} if key else {}, asyncio.Semaphore(self._most)
        async with httpx.AsyncClient(headers=headers, timeout=ANSWER_SECONDS) as client:

            async def one(name: str, job: Job) -> None:
                async with room:
                    put(name, await self._asked(client, job, body(job), read))

            await asyncio.gather(*(one(name, job) for name, job in jobs.items()))

    async def _asked(
        self,
        client: httpx.AsyncClient,
        job: Job,
        body: Mapping[str, Any],
        read: Callable[[Mapping[str, Any], Job], Any],
    ) -> Any:
        """What is read of the answer, once it comes."""
        prompt = {"prompt": job.prompt} if self._plain else {"messages": [{"role": "user", "content": job.prompt}]}
        why = ""
        for pause in (*PAUSES, 0.0):
            wait = pause
            try:
                given = await client.post(self._url, json={"model": self._model, **prompt, **body})
                if given.is_success:
                    return read(given.json()["choices"][0], job)
                why = f"{given.status_code}: {given.text[:200]}"
                if given.status_code < 500 and given.status_code not in (408, 429):
                    break
                wait = min(LONGEST_PAUSE, float(given.headers.get("Retry-After", pause)))
            except (httpx.TransportError, ValueError, LookupError, TypeError) as error:
                why = f"{type(error).__name__}: {error}"
            await asyncio.sleep(wait)
        raise UserError(f"{self._url}: no answer ({why}); what was answered is kept")
