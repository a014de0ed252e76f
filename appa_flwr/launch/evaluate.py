"""`appa eval`: any model's greedy answers to a served run's held-out questions, scored by the run's groups."""

import asyncio
import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from rich.progress import Progress

from appa_flwr.core.errors import UserError
from appa_flwr.trainers.client import Served

KEY = "APPA_EVAL_KEY"
PATIENCE, ANSWER_SECONDS = 120.0, 300.0  # seconds of retries, and of waiting for one answer
AT_ONCE = 8  # concurrent questions to an endpoint

Put = Callable[[str, str], None]
"""Function that takes a question's id and its answer; questions come in any order."""


def evaluate(
    served: Served,
    name: str,
    *,
    model: str,
    endpoint: str = "",
    plain: bool = False,
) -> dict[str, Any]:
    """Ask a model all held-out questions, with a progress bar, and have the groups score its answers.

    Args:
        served: the served run.
        name: name of the model in the tables.
        model: name of the model at the endpoint; without an endpoint, a folder or a name on the hub.
        endpoint: OpenAI-compatible address, up to `/v1`; empty = the model is loaded here.
        plain: the endpoint completes the prompt as plain text, for models without a chat template.

    Raises:
        UserError: the endpoint does not answer, a model cannot be loaded, or the service refuses.
    """
    held_out = asyncio.run(served.ask("GET", "/v1/held-out"))
    tokens = int(held_out["answer_tokens"])
    prompts = {row["question_id"]: row["prompt"] for row in held_out["questions"]}
    answers: dict[str, str] = {}
    with Progress() as progress:
        bar = progress.add_task(f"{name}: answers", total=len(prompts))

        def put(question: str, text: str) -> None:
            answers[question] = text
            progress.advance(bar)

        if endpoint:
            asyncio.run(_remote(endpoint, prompts, put, model=model, tokens=tokens, plain=plain))
        else:
            # Imported by name, since a group has this package without the server's code.
            importlib.import_module("server_app").quiet(bars=True)
            loaded = importlib.import_module("server_app.loaded").LocalModel(model)
            texts = loaded.answers(list(prompts.values()), answer_tokens=tokens)
            for question, text in zip(prompts, texts, strict=True):
                put(question, text)
    return asyncio.run(served.ask("POST", f"/v1/models/{name}", {"answers": answers}))


async def _remote(url: str, prompts: Mapping[str, str], put: Put, *, model: str, tokens: int, plain: bool) -> None:
    """Ask a model at an OpenAI-compatible address; see `evaluate`."""
    key = os.environ.get(KEY) or "none"  # ignored by an endpoint without keys
    endpoint = Served(url, key, patience=PATIENCE, read_seconds=ANSWER_SECONDS)
    path, room = f"/{'' if plain else 'chat/'}completions", asyncio.Semaphore(AT_ONCE)

    async def ask(question: str, prompt: str) -> None:
        asked = {"prompt": prompt} if plain else {"messages": [{"role": "user", "content": prompt}]}
        body = {"model": model, "max_tokens": tokens, "temperature": 0.0, **asked}
        async with room:
            reply = await endpoint.ask("POST", path, body)
        try:
            choice = reply["choices"][0]
            put(question, str((choice["text"] if plain else choice["message"]["content"]) or ""))
        except (LookupError, TypeError, ValueError):
            raise UserError(f"{url}{path}: gives no answer of OpenAI's API: {str(reply)[:200]}") from None

    await asyncio.gather(*(ask(question, prompt) for question, prompt in prompts.items()))
