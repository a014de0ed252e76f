"""Ports of this machine."""

from __future__ import annotations

import socket

from appa_flwr.core.errors import UserError

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A loopback port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def listening(host: str, port: int) -> socket.socket:
    """The socket at which `appa serve` gets requests; port 0 = a free one.

    Raises:
        UserError: the port is in use, or the address is none of this machine's.
    """
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise UserError(f"serve.host, serve.port: {host}:{port} cannot be used ({error})") from None
