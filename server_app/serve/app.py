"""Serving as a phase of a run, over HTTP: who may ask, what, and until when. `engines` has other engines' routes.

No axis letters: there are no arrays here.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file
from appa_flwr.core.ports import listening
from appa_flwr.run.records import ServedRound
from appa_flwr.run.run_files import SERVE_PHASE, STOP_FILE, TOKEN_FILE
from appa_flwr.secure.roster import read_file
from appa_flwr.trainers.client import TOKEN
from server_app.evaluation import round_in_words
from server_app.inputs import RunInputs
from server_app.serve.engines import LOOK_SECONDS, answered, engine_routes
from server_app.serve.judge import Judge
from server_app.serve.requests import ModelAnswers, RunName, ScoreRequest
from server_app.serve.rounds import Rounds

MEBIBYTE = 2**20
BODY_MIB = 32  # of the largest request
END_SECONDS = 10
TOKEN_BYTES = 32
OPEN_PATHS = ("/docs", "/openapi.json")
MOST_ERRORS = 10  # of a request's body that are named
TOKEN_LETTERS = re.compile(r"[!\"$&-.0->@-~]+")  # printable ASCII without / ? # %, which a path cannot hold


class Door:
    """Lets in whoever has the token, as a bearer's or as the path's second part, and no request above `BODY_MIB`."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it (401, 413)."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        kind, _, bearer = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        _, _, in_path = scope["path"][1:].partition("/")
        token = bearer.strip() if kind.lower() == b"bearer" else in_path.partition("/")[0].encode()
        if not secrets.compare_digest(token, self._token):  # which takes as long however much of it is right
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


def web_app(rounds: Rounds, judge: Judge, token: str) -> FastAPI:
    """The application: rewards by rounds and by the engines' routes, and models that are judged."""
    app = FastAPI(title="APPA: the groups' rewards", version="1")
    app.add_middleware(Door, token=token)
    app.include_router(engine_routes(rounds))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        # FastAPI's body without the input, which may be long, or be nothing that JSON can hold.
        first = error.errors()[:MOST_ERRORS]
        return JSONResponse({"detail": [{key: one[key] for key in ("type", "loc", "msg")} for one in first]}, 422)

    @app.post("/v1/score")
    async def score(request: Request, body: ScoreRequest) -> JSONResponse:
        """Score answers, as a round of the rule or a share of one."""
        return JSONResponse(await answered(request, rounds.score(body)))  # FastAPI would walk through all of it

    @app.get("/v1/held-out")
    async def held_out() -> dict[str, Any]:
        """Give the held-out questions' prompts, which a model is to answer."""
        return judge.questions()

    @app.post("/v1/models/{name}")
    async def model(body: ModelAnswers, name: RunName) -> Any:
        """Have the groups score a model's answers; all models' scores, with intervals."""
        return await rounds.in_turn(judge.scores, name, body.answers)

    return app


def check(config: Config) -> None:
    """See before anything is trained that it could listen; UserError as of `serve`."""
    listening(config.serve.host, config.serve.port).close()
    find_token(config.run_folder)


def serve(run: RunInputs) -> None:
    """Score other trainers' answers until the run's folder has a file `stop`, or a signal asks for the end.

    Raises:
        UserError: it cannot listen, or its token cannot be used.
        Exception: an error that no request can be answered after, such as Flower's SuperLink gone.
    """
    config, stop = run.config, run.folder.path / STOP_FILE
    token, token_source = find_token(run.folder.path)
    with run.folder.phase(SERVE_PHASE) as phase, listening(config.serve.host, config.serve.port) as listener:
        stop.unlink(missing_ok=True)

        def closed(name: str, last: ServedRound) -> None:
            text = f"run {name}, round {last.round}: {last.size} answers, "
            phase.step(last.iteration, last.iteration, text + round_in_words(last, f"{last.seconds:.2f} s"))

        rounds = Rounds(run, closed=closed)
        where = f"http://{config.serve.host}:{listener.getsockname()[1]}"
        phase.step(0, 1, f"at {where}, its token in {token_source}")
        asyncio.run(until(lambda: rounds.failed or stop.exists(), rounds, Judge(run), token, listener))
        stop.unlink(missing_ok=True)
        if rounds.failed:
            raise rounds.failed


async def until(ended: Callable[[], object], rounds: Rounds, judge: Judge, token: str, listener: socket.socket) -> None:
    """Answer requests until the end, or until a signal has come."""
    server = uvicorn.Server(
        uvicorn.Config(
            web_app(rounds, judge, token),
            access_log=False,  # paths may hold the token
            log_config=None,
            timeout_graceful_shutdown=END_SECONDS,
        )
    )
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not (server.should_exit or running.done() or ended()):
        await asyncio.sleep(LOOK_SECONDS)
    await rounds.close()
    server.should_exit = True
    await running


def find_token(folder: Path) -> tuple[str, str | Path]:
    """The token, and where it stands: in the environment, or in a file of the run's folder, for its user alone.

    Raises:
        UserError: it cannot be used.
    """
    chosen, path = os.environ.get(TOKEN), folder / TOKEN_FILE
    if not (chosen or path.exists()):
        replace_file(path, (secrets.token_urlsafe(TOKEN_BYTES) + "\n").encode(), mode=0o600)
    token, source = (chosen, TOKEN) if chosen else (read_file(path).decode(errors="replace"), path)
    if not TOKEN_LETTERS.fullmatch(token.strip()):
        raise UserError(f"{source}: a token is one word of letters, digits and the like, without / ? # %")
    return token.strip(), source
