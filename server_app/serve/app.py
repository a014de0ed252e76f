"""The serving phase of a run: an HTTP application, its access control, and its start and end."""

import asyncio
import secrets
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appa_flwr.core.ports import listening
from appa_flwr.run.records import ServedRound
from appa_flwr.run.schema import SERVE_PHASE, STOP_FILE, TOKEN_FILE
from server_app.evaluation import round_in_words
from server_app.inputs import RunInputs
from server_app.serve import external_models, prompts
from server_app.serve.rounds import Rounds, RunName, ScoreBody, Text

MEBIBYTE = 2**20
BODY_MIB = 32  # size of the largest request
LOOK_SECONDS, END_SECONDS = 0.2, 10
OPEN_PATHS = ("/docs", "/openapi.json")
MOST_ERRORS = 10  # most errors of a request's body in the reply
CLIENT_GONE = 499


class ModelAnswers(BaseModel):
    """The body of POST /v1/models/{name}: question_id -> answer, for all held-out questions."""

    answers: dict[str, Text]


class Door:
    """Refuses requests without the token, and requests larger than `BODY_MIB`."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it (401, 413)."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        kind, _, token = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        # A comparison in constant time does not tell how much of the token is right.
        if kind.lower() != b"bearer" or not secrets.compare_digest(token.strip(), self._token):
            refusal = {"detail": "a bearer token is needed: Authorization: Bearer TOKEN"}
            return await JSONResponse(refusal, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > BODY_MIB * MEBIBYTE:
                raise HTTPException(413, f"the request is larger than {BODY_MIB} MiB")
            return message

        await self._app(scope, limited, send)


def web_app(rounds: Rounds, run: RunInputs, token: str) -> FastAPI:
    """Build the application, which gives rewards and scores models."""
    app = FastAPI(title="APPA: the groups' rewards", version="1")
    app.add_middleware(Door, token=token)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        # FastAPI's body without the input, which may be long or impossible to write as JSON.
        first = error.errors()[:MOST_ERRORS]
        return JSONResponse({"detail": [{key: one[key] for key in ("type", "loc", "msg")} for one in first]}, 422)

    @app.post("/v1/score")
    async def score(request: Request, body: ScoreBody) -> JSONResponse:
        """Score answers, as a round of the rule or a part of a round."""
        return JSONResponse(await answered(request, rounds.score(body)))  # FastAPI would first walk through a dict

    @app.get("/v1/held-out")
    async def held_out() -> dict[str, Any]:
        """Return the held-out questions with their prompts, for a model to answer."""
        rows = prompts.rows(run.config, run.questions(run.catalogue.held_out_Q), plain=True)
        return {"questions": rows, "answer_tokens": run.config.ppo.response_length}

    @app.post("/v1/models/{name}")
    async def model(body: ModelAnswers, name: RunName) -> Any:
        """Let the groups score a model's answers; returns the scores of all models, with intervals."""
        return await rounds.in_turn(external_models.scores, run, name, body.answers)

    return app


async def answered(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Run `work`, and cancel it if the client disconnects.

    Otherwise a trainer that is killed and started again would have an old part of a round scored with new parts.
    """
    task = asyncio.create_task(work)
    while not (await asyncio.wait({task}, timeout=LOOK_SECONDS))[0]:
        if await request.is_disconnected():
            task.cancel()
            raise HTTPException(CLIENT_GONE, "the client has gone")
    return task.result()


def serve(run: RunInputs) -> None:
    """Score other trainers' answers until the run's folder has a file `stop`, or a signal arrives.

    Raises:
        UserError: the address or the token cannot be used.
        Exception: an error after which no request can succeed, such as the loss of Flower's SuperLink.
    """
    config, stop = run.config, run.folder.path / STOP_FILE
    token = run.folder.token()
    phase = run.folder.phase(SERVE_PHASE)
    with listening(config.serve.host, config.serve.port) as listener:
        stop.unlink(missing_ok=True)

        def closed(name: str, last: ServedRound) -> None:
            text = f"run {name}, round {last.round}: {last.size} answers, "
            phase.step(last.iteration, last.iteration, text + round_in_words(last, f"{last.seconds:.2f} s"))

        rounds = Rounds(run, closed=closed)
        where = f"http://{config.serve.host}:{listener.getsockname()[1]}"
        phase.step(0, 1, f"at {where}, its token in {run.folder.path / TOKEN_FILE}")
        asyncio.run(until(lambda: rounds.failed or stop.exists(), rounds, run, token, listener))
        stop.unlink(missing_ok=True)
        if rounds.failed:
            raise rounds.failed


async def until(
    ended: Callable[[], object], rounds: Rounds, run: RunInputs, token: str, listener: socket.socket
) -> None:
    """Answer requests until `ended` returns a true value, or a signal arrives."""
    options: dict[str, Any] = {"access_log": False, "log_config": None, "timeout_graceful_shutdown": END_SECONDS}
    server = uvicorn.Server(uvicorn.Config(web_app(rounds, run, token), **options))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not (server.should_exit or running.done() or ended()):
        await asyncio.sleep(LOOK_SECONDS)
    await rounds.close()
    server.should_exit = True
    await running
