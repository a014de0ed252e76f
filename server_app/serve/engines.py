"""The shapes in which training engines ask for rewards; docs/engines.md says how each is set up.

All ask for one answer at a time and give no id. They send no header of ours, so the token is in the path; the run's
name is a query parameter, `?run=`, and the engine's name without one.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Body, HTTPException, Request
from pydantic import BaseModel

from server_app.serve.requests import Item, Name, RunName, ScoreRequest, Text
from server_app.serve.rounds import Rounds

LOOK_SECONDS, CLIENT_GONE = 0.2, 499

_ENDS = re.compile(r"(?:\s*<[^<>\s]{1,40}>)+\s*$")
"""Special tokens at the end of an answer, such as <|im_end|>, which OpenRLHF decodes too."""

One = Body(min_length=1, max_length=1)


class _Part(BaseModel, extra="allow"):
    text: Text = ""


class _Message(BaseModel, extra="allow"):
    type: str
    content: Text | list[_Part] | None = None


class _Response(BaseModel, extra="allow"):
    output: list[_Message] = []


class NeMoGymRequest(BaseModel, extra="allow"):
    """Of `/verify`: a row of the data set, of which `question_id` is a column, and the model's response."""

    question_id: Name
    response: _Response


def engine_routes(rounds: Rounds) -> APIRouter:
    """The engines' routes."""
    router = APIRouter(include_in_schema=False)

    async def reward(request: Request, run: str, question_id: str, completion: str) -> tuple[float, dict[str, float]]:
        items = [Item(question_id=question_id, completion=completion)]
        reply = await answered(request, rounds.score(ScoreRequest(run=run, items=items)))
        return reply["items"][0]["reward"], reply["items"][0]["components"]

    @router.post("/openrlhf/{token}")
    async def openrlhf(
        request: Request,
        query: Annotated[list[Text], One],
        prompts: Annotated[list[Text], One],
        labels: Annotated[list[Name], One],
        run: RunName = "openrlhf",
    ) -> dict[str, Any]:
        """Of `--reward.remote_url`; a query is its prompt with the answer behind it, a label the question_id."""
        _, prompt, completion = query[0].rpartition(prompts[0])
        if not prompt:  # it would be read as a part of the answer
            raise HTTPException(422, "query does not hold its prompt; was that cut, by a max_len that is too short?")
        value, components = await reward(request, run, labels[0], _ENDS.sub("", completion))
        return {"rewards": value, "scores": value, "extra_logs": components}

    @router.post("/slime/{token}")
    async def slime(
        request: Request, response: Annotated[Text, Body()], label: Annotated[Name, Body()], run: RunName = "slime"
    ) -> dict[str, Any]:
        """Of `--rm-url`; the label is the question_id."""
        value, components = await reward(request, run, label, response)
        return {"reward": value, **components}

    @router.post("/nemo-gym/{token}/seed_session")
    async def seed_session() -> dict[str, Any]:
        return {}

    @router.post("/nemo-gym/{token}/verify")
    async def verify(request: Request, body: NeMoGymRequest, run: RunName = "nemo-gym") -> dict[str, Any]:
        # Reasoning and tool calls may precede the last message.
        contents = [part.content for part in body.response.output if part.type == "message"]
        content = contents[-1] if contents else ""
        text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
        value, components = await reward(request, run, body.question_id, text)
        rewarded = {"reward": value, "reward_components": components, "failure_reason": None}
        return {**body.model_dump(exclude_unset=True), **rewarded}

    return router


async def answered(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Do the work while the client is there; once it is gone, nobody waits any more."""
    task = asyncio.create_task(work)
    while not (await asyncio.wait({task}, timeout=LOOK_SECONDS))[0]:
        if await request.is_disconnected():
            task.cancel()
            raise HTTPException(CLIENT_GONE, "the client has gone")
    return task.result()
