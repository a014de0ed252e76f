"""Serving as a phase of a run: it ends when somebody asks for it.

No axis letters: there are no arrays here.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from appa_flwr.analysis import aggregation
from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file
from appa_flwr.run.records import ServedRound
from appa_flwr.run.run_files import SERVE_PHASE, STOP_FILE, TOKEN_FILE
from appa_flwr.run.served import ServedRuns
from appa_flwr.secure.roster import read_file
from appa_flwr.trainers.client import TOKEN
from server_app.inputs import RunInputs
from server_app.serve.engines import engine_routes
from server_app.serve.models import Models
from server_app.serve.service import Service
from server_app.serve.web import Door, web_app

LOOK_SECONDS, END_SECONDS = 0.2, 10
TOKEN_BYTES = 32


def check(config: Config) -> None:
    """See before anything is trained that it could listen; UserError as of `serve`."""
    _given_token()
    _listening(config.serve.host, config.serve.port).close()


def serve(run: RunInputs) -> None:
    """Score other trainers' answers until the run's folder has a file `stop`, or a signal asks for the end.

    Raises:
        UserError: it cannot listen, or its token cannot be used.
        Exception: an error that no request can be answered after, such as Flower's SuperLink gone.
    """
    config, folder = run.config, run.folder.path
    stop, (token, token_source) = folder / STOP_FILE, _token(folder)
    with run.folder.phase(SERVE_PHASE) as phase, _listening(config.serve.host, config.serve.port) as listener:
        stop.unlink(missing_ok=True)
        store = ServedRuns(folder)
        failed: list[Exception] = []

        def closed(name: str, record: ServedRound) -> None:
            means = [mean for mean in record.rewards.values() if mean is not None]
            missing = f"; MISSING: {', '.join(record.missing_groups)}" if record.missing_groups else ""
            number = record.iteration
            phase.step(
                number,
                number,
                f"run {name}, round {record.round}: {record.size} answers, reward {sum(means) / len(means):.3f}, worst "
                f"group {min(means):.3f}, FI {record.fairness_index:.4f}, {record.seconds:.2f} s{missing}",
            )

        rule = aggregation.configured(config.rule, config.appa)
        service = Service(run.federation, rule, run.catalogue, config, store, broken=failed.append, closed=closed)
        where = f"http://{config.serve.host}:{listener.getsockname()[1]}"
        phase.step(0, 1, f"at {where}, its token in {token_source}")
        try:
            asyncio.run(_answer(service, Models(run), token, listener, ended=lambda: bool(failed) or stop.exists()))
        finally:
            store.close()
        stop.unlink(missing_ok=True)
        if failed:
            raise failed[0]


async def _answer(
    service: Service, models: Models, token: str, listener: socket.socket, *, ended: Callable[[], bool]
) -> None:
    """Answer requests until the end, or until a signal has come."""
    door = Door(service, token=token)
    server = uvicorn.Server(
        uvicorn.Config(
            web_app(door, engine_routes(door), models),
            access_log=False,  # paths may hold the token
            log_config=None,
            timeout_graceful_shutdown=END_SECONDS,
        )
    )
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not (server.should_exit or running.done() or ended()):
        await asyncio.sleep(LOOK_SECONDS)
    await service.close()
    server.should_exit = True
    await running


def _given_token() -> str | None:
    """The token of the environment, None where it gives none."""
    given = os.environ.get(TOKEN)
    return _usable(given, TOKEN) if given else None


def _token(folder: Path) -> tuple[str, str | Path]:
    """The token, and where it stands: in the environment, or in a file of the run's folder, for its user alone."""
    if (given := _given_token()) is not None:
        return given, TOKEN
    path = folder / TOKEN_FILE
    if not path.exists():
        replace_file(path, (secrets.token_urlsafe(TOKEN_BYTES) + "\n").encode(), mode=0o600)
    return _usable(read_file(path).decode(errors="replace"), path), path


def _usable(text: str, source: str | Path) -> str:
    """The token in a text."""
    token = text.strip()
    if not token or set(token) & set(" /?#%") or not (token.isascii() and token.isprintable()):
        raise UserError(f"{source}: a token is one word of letters, digits and the like, without / ? # %")
    return token


def _listening(host: str, port: int) -> socket.socket:
    """The socket that requests come to."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise UserError(f"serve.host, serve.port: {host}:{port} cannot be used ({error})") from None
