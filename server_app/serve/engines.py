"""The shapes in which training engines ask for rewards; docs/engines.md says how each is set up.

All ask for one answer at a time and name none, so these are stream mode and `Service.sample`. They send no header of
ours, so the token is in the path; the run's name is a query parameter, `?run=`, and the engine's name without one.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import BaseModel, ConfigDict

from server_app.serve.requests import Refused, Scored
from server_app.serve.web import Door, RunName, checked

_ENDS = re.compile(r"(?:\s*<[^<>\s]{1,40}>)+\s*$")
"""Special tokens at the end of an answer, such as <|im_end|>, which OpenRLHF decodes too."""


class OpenRLHFRequest(BaseModel):
    """Of `--reward.remote_url`; a query is its prompt with the answer behind it, a label the question_id."""

    query: list[str]
    prompts: list[str]
    labels: list[str]


class SlimeRequest(BaseModel):
    """Of `--rm-url`; the label is the question_id."""

    prompt: Any = None
    response: str
    label: str


class NeMoGymRequest(BaseModel):
    """Of `/verify`: a row of the data set, of which `question_id` is a column, and the model's response."""

    model_config = ConfigDict(extra="allow")
    question_id: str
    response: dict[str, Any]


def engine_routes(door: Door) -> APIRouter:
    """The engines' routes."""

    def token_in_path(token: Annotated[str, Path()]) -> None:
        door.check(token)

    def run_named(default: str) -> Any:
        def named(run: Annotated[RunName, Query()] = default) -> str:
            return run

        return Depends(named)

    router = APIRouter(dependencies=[Depends(token_in_path)], include_in_schema=False)

    async def one(request: Request, run: str, question_id: str, completion: str) -> tuple[float, Scored]:
        scored = await door.answer(request, door.service.sample(run, question_id, completion))
        return scored.items[0]["reward"], scored

    @router.post("/openrlhf/{token}")
    async def openrlhf(request: Request, run: str = run_named("openrlhf")) -> dict[str, Any]:
        asked = await door.read(request, OpenRLHFRequest)
        if not len(asked.query) == len(asked.prompts) == len(asked.labels) == 1:
            raise Refused(422, "query, prompts and labels must hold one text each")
        _, found, completion = asked.query[0].rpartition(asked.prompts[0])
        if not found:  # it would be read as a part of the answer
            raise Refused(422, "query does not hold its prompt; was that cut, by a max_len that is too short?")
        reward, scored = await one(request, run, asked.labels[0], _ENDS.sub("", completion))
        return {"rewards": reward, "scores": reward, "extra_logs": dict(scored.items[0]["components"])}

    @router.post("/slime/{token}")
    async def slime(request: Request, run: str = run_named("slime")) -> dict[str, Any]:
        asked = await door.read(request, SlimeRequest)
        reward, scored = await one(request, run, asked.label, asked.response)
        return {"reward": reward, **scored.items[0]["components"]}

    @router.post("/nemo-gym/{token}/seed_session")
    async def seed_session(request: Request) -> dict[str, Any]:
        await door.json(request)
        return {}

    @router.post("/nemo-gym/{token}/verify")
    async def verify(request: Request, run: str = run_named("nemo-gym")) -> dict[str, Any]:
        row = await door.json(request)
        asked = checked(row, NeMoGymRequest)
        reward, scored = await one(request, run, asked.question_id, _text(asked.response))
        components = dict(scored.items[0]["components"])
        return {**row, "reward": reward, "reward_components": components, "failure_reason": None}

    return router


def _text(response: dict[str, Any]) -> str:
    """Text of the last message of a response in OpenAI's layout, which reasoning and tool calls may precede."""
    try:
        messages = [part for part in response.get("output", ()) if part.get("type") == "message"]
        content = messages[-1]["content"] if messages else ""
        return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    except (AttributeError, KeyError, TypeError):
        raise Refused(422, "response: its output must be a list of messages with content") from None
