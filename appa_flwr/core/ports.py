"""Ports of this machine."""

import socket

from appa_flwr.core.errors import UserError

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """Find a loopback port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def listening(host: str, port: int) -> socket.socket:
    """Open the socket of `appa serve`; port 0 = a free port.

    Raises:
        UserError: the port is in use, or the address does not belong to this machine.
    """
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise UserError(f"serve.host, serve.port: {host}:{port} cannot be used ({error})") from None
