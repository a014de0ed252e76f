"""The server's SuperLink behind a filter: other machines reach only Flower's Fleet API.

Flower 1.41 serves nodes, submitters and its own processes at one port, and authenticates only nodes. Without the filter
any machine that reaches the port could submit a run, whose code runs at the server and at every group that has not
pinned another bundle. With it, runs are submitted only from the server's own machine.
"""

import sys
from ipaddress import ip_address
from typing import Any

import uvicorn
from flwr.superlink.cli.flower_superlink import flower_superlink
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

FOR_ALL = ("/v1/fleet/", "/health")
REFUSED = "this server takes runs from its own machine alone\n"


def filtered(app: ASGIApp) -> ASGIApp:
    """Wrap an app so that other machines reach only the paths that nodes need."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client") or ("0.0.0.0", 0)
        from_here = ip_address(client[0]).is_loopback
        let_in = scope["type"] == "lifespan" or scope["path"].startswith(FOR_ALL) or from_here
        await (app if let_in else PlainTextResponse(REFUSED, 403))(scope, receive, send)

    return checked


def main() -> None:
    """Run Flower's program with `uvicorn.run` replaced, so that Flower's app is wrapped.

    Raises:
        RuntimeError: Flower binds a port, or ends, without a call of `uvicorn.run`; no client can connect then.
    """
    program: Any = uvicorn
    run, is_filtered = program.run, False

    def run_filtered(app: ASGIApp, **given: Any) -> None:
        nonlocal is_filtered
        is_filtered = True
        # Proxy headers are ignored, since a caller could claim any address in them.
        run(filtered(app), **given, proxy_headers=False)

    def check(event: str = "socket.bind", _: object = None) -> None:
        if event == "socket.bind" and not is_filtered:
            raise RuntimeError("this version of Flower does not start by uvicorn.run: the server would be open to all")

    sys.addaudithook(check)
    program.run = run_filtered
    flower_superlink()
    check()


if __name__ == "__main__":
    main()
