"""A server with a party's certificates, to be called by TLS."""

import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


@contextmanager
def listening(folder: Path | None, *, port: int = 0, ahead: float = 0.0, tells: bool = True) -> Iterator[int]:
    """A server with the certificates in this folder, or one that speaks no TLS; gives its port.

    This machine's clock is so many seconds `ahead` of the one that it tells, if it does.
    """

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response_only(200)
            if tells:
                self.send_header("Date", formatdate(time.time() - ahead, usegmt=True))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", port), Answer) as server:
        if folder is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(folder / "server.crt", folder / "server.key")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
