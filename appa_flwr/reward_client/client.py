"""Requests to a served run, with retries after transient failures; the service scores no answer twice."""

import asyncio
import os
import ssl
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from ipaddress import ip_address
from typing import Any

import httpx

from appa_flwr.core.errors import UserError

URL, TOKEN, RUN = "APPA_URL", "APPA_TOKEN", "APPA_RUN"
READ_SECONDS, CONNECT_SECONDS = 60.0, 10.0  # of one attempt; requests that wait for other processes are repeated
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
AGAIN = (429, 502, 503, 504)
MOST_SHOWN = 500  # characters of a refusal
SILENCE_SECONDS = 10.0  # time without an answer after which a warning is given


class Served:
    """Client of a served run at a URL such as "http://127.0.0.1:9200", with its bearer token.

    Their defaults are the environment's `APPA_URL` and `APPA_TOKEN`. A request is repeated for `patience` seconds; one
    attempt waits `read_seconds` for its answer.

    Raises:
        UserError: url or token is missing.
    """

    def __init__(
        self, url: str = "", token: str = "", *, patience: float = 3600.0, read_seconds: float = READ_SECONDS
    ) -> None:
        self._url, token = (url or os.environ.get(URL, "")).rstrip("/"), token or os.environ.get(TOKEN, "")
        if not self._url or not token:
            raise UserError(f"the served run's URL or token is missing: pass url and token, or set {URL} and {TOKEN}")
        self._headers, self._patience = {"Authorization": f"Bearer {token.strip()}"}, patience
        self._timeout = httpx.Timeout(read_seconds, connect=CONNECT_SECONDS)

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request, with retries after transient failures, and return the answer.

        Raises:
            UserError: the request was refused, or `patience` has elapsed; the message gives the reason.
        """
        started, pause = time.monotonic(), FIRST_PAUSE
        url = f"{self._url}{path}"
        async with _client(self._url) as client:
            while True:
                wait = pause
                try:
                    reply = await client.request(method, url, json=body, headers=self._headers, timeout=self._timeout)
                    if reply.is_success:
                        if not isinstance(content := reply.json(), dict):
                            raise ValueError
                        return content
                    why = f"{reply.status_code}: {reply.text[:MOST_SHOWN]}"
                    if reply.status_code not in AGAIN:
                        raise UserError(f"{url}: {why}")
                    wait = min(LONGEST_PAUSE, retry_after(reply, pause))
                except ValueError:
                    raise UserError(f"{url}: the answer is not a JSON object: {reply.text[:MOST_SHOWN]}") from None
                except httpx.TransportError as error:
                    why = f"{type(error).__name__}: {error}"
                    if isinstance(error, httpx.ReadTimeout):  # the round waits for other processes
                        wait = 0.0
                if time.monotonic() + wait > started + self._patience:
                    raise UserError(f"{url}: no answer in {self._patience:.0f} s; last failure: {why}")
                if time.monotonic() > started + SILENCE_SECONDS:  # Python shows the same warning only once
                    warnings.warn(f"{self._url} does not answer ({why}); the request is repeated", stacklevel=2)
                await asyncio.sleep(wait)
                pause = min(LONGEST_PAUSE, 2 * pause)


def _client(url: str) -> httpx.AsyncClient:
    """Make a client for an address; requests to this machine ignore the environment's proxies.

    Raises:
        UserError: the address is invalid, or a SOCKS proxy is set and httpx lacks the package for it.
    """
    try:
        if (address := httpx.URL(url)).scheme not in ("http", "https"):
            raise UserError(f"{url}: the address must begin with http:// or https://")
        here = address.host == "localhost"
        with suppress(ValueError):
            here = ip_address(address.host).is_loopback
        return httpx.AsyncClient(verify=_certificates(), trust_env=not here)
    except (httpx.InvalidURL, ImportError) as error:
        raise UserError(f"{url}: {error}") from None


@cache
def _certificates() -> ssl.SSLContext:
    """TLS context with the public authorities, read once, since reading takes longer than a request."""
    return httpx.create_ssl_context()


def retry_after(reply: httpx.Response, otherwise: float) -> float:
    """Seconds of a reply's `Retry-After`; `otherwise` if it is missing or a date."""
    text = reply.headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdigit() else otherwise
