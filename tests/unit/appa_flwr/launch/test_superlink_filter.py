"""What other machines find at the server's port: what nodes need, and nothing else."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest
from flwr.superlink.main import create_app

from appa_flwr.launch.superlink_filter import filtered

PATHS = ("/docs", "/openapi.json", *create_app().openapi()["paths"])
HERE, THERE = ("127.0.0.1", 5000), ("192.0.2.7", 5000)


def let_in(path: str, *, client: tuple[str, int] | None, kind: str = "http") -> bool:
    """Whether the app behind the filter was called; if it was not, the caller was refused."""
    called, sent = [], []

    async def app(*given: Any) -> None:
        called.append(given)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": kind, "path": path, "client": client, "headers": [(b"x-forwarded-for", b"127.0.0.1")]}
    asyncio.run(filtered(app)(scope, None, send))
    assert bool(called) != (bool(sent) and sent[0]["status"] == 403)
    return bool(called)


def test_of_all_paths_of_flower_s_server_others_find_those_of_nodes():
    assert {path.split("/")[2] for path in PATHS if path.startswith("/v1/")} >= {"control", "fleet", "runtime"}
    for path in PATHS:
        assert let_in(path, client=HERE)
        assert let_in(path, client=THERE) == (path.startswith("/v1/fleet/") or path == "/health"), path


@pytest.mark.parametrize("client", [None, ("192.0.2.7", 1), ("::ffff:192.0.2.7", 1), ("2001:db8::1", 1)])
def test_nobody_submits_from_elsewhere_by_any_name(client):
    for path in ("/v1/control/start-run", "//v1/fleet/", "/v1/fleet", "/V1/FLEET/x", "/"):
        assert not let_in(path, client=client)
    assert not let_in("/v1/control/start-run", client=client, kind="websocket")
    assert let_in("", client=client, kind="lifespan")


@pytest.mark.parametrize("client", [HERE, ("127.8.0.1", 1), ("::1", 1)])
def test_the_machine_s_own_programs_are_let_in(client):
    assert let_in("/v1/control/start-run", client=client)


STARTED = """
import os, socket, uvicorn
from appa_flwr.launch import superlink_filter

def listen(*, proxy_headers):
    socket.create_server(("127.0.0.1", 0))
    print("open", proxy_headers, flush=True)

uvicorn.run = lambda app, proxy_headers: listen(proxy_headers=proxy_headers)
# by uvicorn.run; as by another web server; not at all
for start in (lambda: uvicorn.run(app=None), lambda: listen(proxy_headers=True), lambda: None):
    if (child := os.fork()) == 0:  # nothing takes an audit hook away
        superlink_filter.flower_superlink = start
        try:
            superlink_filter.main()
        except RuntimeError:
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_flower_that_starts_in_another_way_is_not_left_open():
    done = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True, check=False)
    assert (done.stdout.splitlines(), done.stderr) == (["open False", "0", "1", "1"], "")
