"""Requests to a served run, tried again while that can help: the service scores nothing twice."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from appa_flwr.core.errors import UserError

URL, TOKEN = "APPA_URL", "APPA_TOKEN"
READ_SECONDS, CONNECT_SECONDS = 60.0, 10.0  # of one try: what waits for other processes is asked for again
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
AGAIN = (429, 502, 503, 504)
FIRST_WORD, NEXT_WORD = 10.0, 60.0  # seconds until it is said that an address is silent, and between two such lines

_last_word: dict[str, float] = {}  # by address, over all requests
_Kept = dict[bool, tuple[httpx.AsyncClient, AsyncGenerator[httpx.AsyncClient, None]]]
_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, _Kept] = WeakKeyDictionary()
"""Event loop -> its client for this machine (True) and for others; making one reads all certificates."""


class Served:
    """A served run's address.

    Args:
        url: such as "http://127.0.0.1:9200"; left out, the environment's `APPA_URL`.
        token: the bearer token; left out, the environment's `APPA_TOKEN`.
        patience: seconds for which a request is tried again.
        read_seconds: how long one try waits for its answer.

    Raises:
        UserError: url or token is given nowhere.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        patience: float = 3600.0,
        read_seconds: float = READ_SECONDS,
    ) -> None:
        self._url, token = (url or os.environ.get(URL, "")).rstrip("/"), token or os.environ.get(TOKEN, "")
        if not self._url or not token:
            raise UserError(f"where the served run is and its token: give url and token, or set {URL} and {TOKEN}")
        self._headers, self._patience = {"Authorization": f"Bearer {token.strip()}"}, patience
        self._timeout = httpx.Timeout(read_seconds, connect=CONNECT_SECONDS)

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """The answer, None for one that is not there (404).

        Raises:
            UserError: it was refused, or patience is at its end; the message says why.
        """
        started, pause = time.monotonic(), FIRST_PAUSE
        client, url = await client_of(self._url), f"{self._url}{path}"
        while True:
            wait = pause
            try:
                reply = await client.request(method, url, json=body, headers=self._headers, timeout=self._timeout)
                if reply.is_success:
                    content: dict[str, Any] = reply.json()
                    return content
                if reply.status_code == 404:
                    return None
                why = f"{reply.status_code}: {_reason(reply)}"
                if reply.status_code not in AGAIN:
                    raise UserError(f"{url}: {why}")
                wait = min(LONGEST_PAUSE, retry_after(reply, pause))
            except httpx.TransportError as error:
                why = f"{type(error).__name__}: {error}"
                if isinstance(error, httpx.ReadTimeout):  # a round waits for those who are there
                    wait = 0.0
            if time.monotonic() + wait > started + self._patience:
                raise UserError(f"{url}: no answer in {self._patience:.0f} s; the last: {why}")
            say_silence(self._url, started, why)
            await asyncio.sleep(wait)
            pause = min(LONGEST_PAUSE, 2 * pause)


async def client_of(url: str) -> httpx.AsyncClient:
    """The running event loop's client for an address, closed when the loop ends.

    None of the environment's proxies stands between this machine and itself.

    Raises:
        UserError: it is no address, or a SOCKS proxy is set and httpx lacks what that needs.
    """
    try:
        if (address := httpx.URL(url)).scheme not in ("http", "https"):
            raise UserError(f"{url}: an address begins with http:// or https://")
        host = address.host
        here = host == "localhost"
        with suppress(ValueError):
            here = ip_address(host).is_loopback
        clients = _clients.setdefault(asyncio.get_running_loop(), {})
        if here not in clients:
            lifetime = _lifetime(here)
            clients[here] = await anext(lifetime), lifetime
        return clients[here][0]
    except (httpx.InvalidURL, ImportError) as error:
        raise UserError(f"{url}: {error}") from None


async def _lifetime(here: bool) -> AsyncGenerator[httpx.AsyncClient, None]:
    """A client; `asyncio.run` ends the generators of its event loop, and so closes it."""
    limits = httpx.Limits(max_connections=None)  # any number of answers may wait for their round
    client = httpx.AsyncClient(limits=limits, transport=httpx.AsyncHTTPTransport(limits=limits) if here else None)
    try:
        yield client
    finally:
        _clients.pop(asyncio.get_running_loop(), None)
        await client.aclose()


def retry_after(reply: httpx.Response, otherwise: float) -> float:
    """Seconds of a reply's `Retry-After`, a number or a date; `otherwise` where it has none that can be read."""
    text = reply.headers.get("Retry-After", "")
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return otherwise


def say_silence(url: str, started: float, why: str) -> None:
    """Say on stderr that an address has not answered since `started`: after some seconds, and then each minute."""
    now = time.monotonic()
    if now - started >= FIRST_WORD and now - _last_word.get(url, -math.inf) >= NEXT_WORD:
        _last_word[url] = now
        print(f"{url}: no answer for {now - started:.0f} s ({why}); waiting", file=sys.stderr, flush=True)


def _reason(reply: httpx.Response) -> str:
    """What a refusal says; of a body that is wrong, FastAPI lists places and reasons."""
    try:
        detail = reply.json()["detail"]
        if isinstance(detail, list):
            return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in detail)
        return str(detail)
    except (ValueError, KeyError, TypeError):
        return reply.text[:200]
