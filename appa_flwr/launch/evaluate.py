"""`appa eval`: any model's greedy answers to a served run's held-out questions, scored by the run's groups."""

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from rich.progress import Progress

from appa_flwr.core.errors import UserError
from appa_flwr.reward_client.client import Served

KEY = "APPA_EVAL_KEY"
PATIENCE, ANSWER_SECONDS = 120.0, 300.0  # seconds of retries, and of waiting for one answer
AT_ONCE = 8  # concurrent questions to an endpoint


def evaluate(served: Served, name: str, *, model: str, endpoint: str = "", plain: bool = False) -> dict[str, Any]:
    """Ask a model all held-out questions, and have the groups score its answers.

    `name` is the model's name in the tables, `model` its name at the endpoint (an OpenAI-compatible address up to
    `/v1`) or, without an endpoint, its folder or hub id. With `plain` the endpoint completes the prompt as plain text.

    Raises:
        UserError: the endpoint does not answer, a model cannot be loaded, or the service refuses.
    """
    held_out = asyncio.run(served.ask("GET", "/v1/held-out"))
    tokens = int(held_out["answer_tokens"])
    prompts = [row["prompt"] for row in held_out["questions"]]
    if endpoint:
        texts = asyncio.run(_remote(endpoint, prompts, model=model, tokens=tokens, plain=plain))
    else:
        from server_app import quiet  # here, since a group's machine has this package without the server's

        quiet(bars=True)  # before libraries that print when they are imported
        from appa_flwr.loaded import LocalModel

        texts = [*LocalModel(model).answers(prompts, answer_tokens=tokens)]
    answers = {row["question_id"]: text for row, text in zip(held_out["questions"], texts, strict=True)}
    return asyncio.run(served.ask("POST", f"/v1/models/{name}", {"answers": answers}))


async def _remote(url: str, prompts: Sequence[str], *, model: str, tokens: int, plain: bool) -> list[str]:
    """Ask a model at an OpenAI-compatible address, with a progress bar; see `evaluate`."""
    key = os.environ.get(KEY) or "none"  # ignored by an endpoint without keys
    endpoint = Served(url, key, patience=PATIENCE, read_seconds=ANSWER_SECONDS)
    path, room = f"/{'' if plain else 'chat/'}completions", asyncio.Semaphore(AT_ONCE)

    async def ask(prompt: str) -> str:
        asked = {"prompt": prompt} if plain else {"messages": [{"role": "user", "content": prompt}]}
        body = {"model": model, "max_tokens": tokens, "temperature": 0.0, **asked}
        async with room:
            reply = await endpoint.ask("POST", path, body)
        progress.advance(bar)
        try:
            choice = reply["choices"][0]
            return str((choice["text"] if plain else choice["message"]["content"]) or "")
        except (LookupError, TypeError, ValueError):
            raise UserError(f"{url}{path}: gives no answer of OpenAI's API: {str(reply)[:200]}") from None

    with Progress() as progress:
        bar = progress.add_task("answers", total=len(prompts))
        return await asyncio.gather(*map(ask, prompts))
