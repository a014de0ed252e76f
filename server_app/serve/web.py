"""The service over HTTP: who may ask, what a request may be, and its own endpoints; `engines` has those of others.

No axis letters: there are no arrays here.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import secrets
from collections.abc import Awaitable
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Path, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from server_app.serve.models import Models
from server_app.serve.requests import Item, Part, Refused
from server_app.serve.service import Service

MEBIBYTE = 2**20
BODY_MIB = 32  # of the largest request
CLIENT_GONE = 499

RunName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=0, lt=2**53)]

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class Asked(BaseModel):
    """Something that a client sends."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


class AskedItem(Asked):
    """An answer to be scored."""

    id: Name
    question_id: Name
    completion: str


class ScoreRequest(Asked):
    """The body of POST /v1/score; see `server_app.serve.service.Part`. In stream mode run and items are enough."""

    run: RunName
    mode: Literal["exact", "stream"] = "exact"
    round: Count = 0
    attempt: Count = 0
    size: Count | None = None
    part: Count = 0
    parts: Annotated[int, Field(ge=1, le=4096)] = 1
    items: Annotated[list[AskedItem], Field(min_length=1)]


class ModelAnswers(Asked):
    """The body of POST /v1/models/{name}: question_id -> the answer, or as many samples for each, of all held out."""

    answers: dict[Name, str | list[str]]


class Door:
    """Lets in whoever has the token, and reads what they send, up to a size.

    Attributes:
        service: behind it.
    """

    def __init__(self, service: Service, *, token: str) -> None:
        self.service, self._token = service, _digest(token)

    def check(self, token: str) -> None:
        """Let a token in. How long that takes does not depend on how much of it is right.

        Raises:
            Refused: it is another one.
        """
        if not secrets.compare_digest(_digest(token), self._token):
            raise Refused(401, "a bearer token is needed: Authorization: Bearer TOKEN")

    def bearer(self, request: Request) -> None:
        """The same of a request's header."""
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        self.check(token.strip() if kind.lower() == "bearer" else "")

    async def json(self, request: Request) -> Any:
        """A request's body.

        Raises:
            Refused: it is too large, or not JSON as the standard has it.
        """
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY_MIB * MEBIBYTE:
                raise Refused(413, f"the request is larger than {BODY_MIB} MiB")
        try:
            found = json.loads(body.decode(), parse_constant=_no_number)
            json.dumps(found, ensure_ascii=False).encode()  # a half of a surrogate pair is no text
        except (ValueError, RecursionError) as error:
            raise Refused(422, f"the body is not JSON in UTF-8 ({type(error).__name__}: {error})"[:200]) from None
        return found

    async def read(self, request: Request, kind: type[M]) -> M:
        """The body as a model.

        Raises:
            Refused: see `json`; or a field is wrong, which is named.
        """
        return checked(await self.json(request), kind)

    async def answer(self, request: Request, work: Awaitable[T]) -> T:
        """Do the work while the client is there; once it is gone, nobody waits any more.

        Raises:
            Refused: the client has gone, which nobody will read.
        """
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Refused(CLIENT_GONE, "the client has gone")
            return task.result()
        finally:
            gone.cancel()
            task.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)


def checked(found: Any, kind: type[M]) -> M:
    """JSON as a model.

    Raises:
        Refused: a field is wrong.
    """
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise Refused(422, f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}") from None


def web_app(door: Door, engines: APIRouter, models: Models) -> FastAPI:
    """The application; `engines` are the routes of other clients, `models` judges whole models."""
    app = FastAPI(title="APPA: the groups' rewards", description=__doc__.partition("\n")[0], version="1")
    app.add_exception_handler(Refused, _refusal)
    service, mine = door.service, APIRouter(prefix="/v1", dependencies=[Depends(door.bearer)])

    @app.get("/healthz")
    async def health() -> dict[str, str]:
        """Say that the service is up; needs no token."""
        return {"status": "ok"}

    schema = {"required": True, "content": {"application/json": {"schema": ScoreRequest.model_json_schema()}}}

    @mine.post("/score", openapi_extra={"requestBody": schema})
    async def score(request: Request) -> JSONResponse:
        """Score answers: a part of a batch (`exact`), or answers as they come (`stream`)."""
        asked = await door.read(request, ScoreRequest)
        items = [Item(item.id, item.question_id, item.completion) for item in asked.items]
        if asked.mode == "stream":
            scored = await door.answer(request, service.stream(asked.run, items))
        else:
            if not asked.round:
                raise Refused(422, "round: exact mode needs it, from 1")
            size = asked.parts * len(items) if asked.size is None else asked.size
            part = Part(asked.run, asked.round, asked.attempt, size, asked.part, asked.parts, items)
            scored = await door.answer(request, service.score(part))
        found = [{"id": item.id, **answer} for item, answer in zip(items, scored.items, strict=True)]
        of_round = {"run": asked.run, "round": scored.round, "exact": scored.exact, "metrics": dict(scored.metrics)}
        return JSONResponse({**of_round, "items": found})  # as it is: FastAPI would walk through all of it

    @mine.get("/runs/{run}")
    async def status(run: str) -> dict[str, Any]:
        """Tell a run's rounds, what it waits for, and which groups are missing."""
        return service.status(run)

    @mine.get("/held-out")
    async def held_out() -> dict[str, Any]:
        """Give the held-out questions' prompts, which a model is to answer."""
        return models.questions()

    @mine.post("/models/{name}")
    async def judge(request: Request, name: Annotated[RunName, Path()]) -> Any:
        """Have the groups score a model's answers; all models' scores, with intervals."""
        asked = await door.read(request, ModelAnswers)
        return await service.in_turn(models.judge, name, asked.answers)

    app.include_router(mine)
    app.include_router(engines)
    return app


async def _refusal(request: Request, refused: Exception) -> Response:
    assert isinstance(refused, Refused)
    headers = {"WWW-Authenticate": "Bearer"} if refused.status == 401 else {}
    if refused.retry_after is not None:
        headers["Retry-After"] = str(math.ceil(refused.retry_after))
    return JSONResponse({"error": str(refused)}, refused.status, headers)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
