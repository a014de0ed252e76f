"""Ports of this machine."""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"
LAST_PORT = 65535


def free_port() -> int:
    """A loopback port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int) -> bool:
    """True if a server can listen there, on all of this machine's addresses."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, to come again at once
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
