"""Requests to a served run, tried again while that can help: the service scores nothing twice."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from typing import Any

import httpx

from appa_flwr.core.errors import UserError

URL, TOKEN = "APPA_URL", "APPA_TOKEN"
READ_SECONDS = 60.0  # of one try: what waits for other processes is asked for again
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
AGAIN = (429, 502, 503, 504)
FIRST_WORD, NEXT_WORD = (
    10.0,
    60.0,
)  # seconds until it is said that an address does not answer, and between two such lines

_last_word: dict[str, float] = {}  # by address, over all requests


class Served:
    """A served run's address.

    Args:
        url: such as "http://127.0.0.1:9200"; left out, the environment's `APPA_URL`.
        token: the bearer token; left out, the environment's `APPA_TOKEN`.
        patience: seconds for which a request is tried again.

    Raises:
        UserError: url or token is given nowhere.
    """

    def __init__(self, url: str | None = None, token: str | None = None, *, patience: float = 3600.0) -> None:
        self._url, token = (url or os.environ.get(URL, "")).rstrip("/"), token or os.environ.get(TOKEN, "")
        if not self._url or not token:
            raise UserError(f"where the served run is and its token: give url and token, or set {URL} and {TOKEN}")
        self._headers, self._patience = {"Authorization": f"Bearer {token.strip()}"}, patience

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """The answer, None for one that is not there (404).

        Raises:
            UserError: it was refused, or patience is at its end; the message says why.
        """
        until, pause = time.monotonic() + self._patience, FIRST_PAUSE
        timeout = httpx.Timeout(READ_SECONDS, connect=10.0)
        async with client_of(self._url, self._headers, timeout) as client, said_to_be_silent(self._url) as failed:
            while True:
                wait = pause
                try:
                    given = await client.request(method, f"{self._url}{path}", json=body)
                    if given.is_success:
                        found: dict[str, Any] = given.json()
                        return found
                    if given.status_code == 404:
                        return None
                    why = f"{given.status_code}: {_reason(given)}"
                    if given.status_code not in AGAIN:
                        raise UserError(f"{self._url}{path}: {why}")
                    wait = min(LONGEST_PAUSE, float(given.headers.get("Retry-After", pause)))
                except httpx.TransportError as error:
                    why = failed["last"] = f"{type(error).__name__}: {error}"
                    if isinstance(error, httpx.ReadTimeout):  # a round waits for those who are there
                        wait = 0.0
                if time.monotonic() + wait > until:
                    raise UserError(f"{self._url}{path}: no answer in {self._patience:.0f} s; the last: {why}")
                await asyncio.sleep(wait)
                pause = min(LONGEST_PAUSE, 2 * pause)


def client_of(url: str, headers: Mapping[str, str], timeout: httpx.Timeout) -> httpx.AsyncClient:
    """A client of this address; none of the environment's proxies stands between this machine and itself.

    Raises:
        UserError: it is no address, or a SOCKS proxy is set and httpx lacks what that needs.
    """
    try:
        host = httpx.URL(url).host
        here = host == "localhost"
        with suppress(ValueError):
            here = ip_address(host).is_loopback
        return httpx.AsyncClient(
            headers=headers, timeout=timeout, transport=httpx.AsyncHTTPTransport() if here else None
        )
    except (httpx.InvalidURL, ImportError) as error:
        raise UserError(f"{url}: {error}") from None


@asynccontextmanager
async def said_to_be_silent(url: str) -> AsyncIterator[dict[str, str]]:
    """Within the block it is said on stderr, after seconds and then each minute, that this address has not answered.

    Yields:
        where the block puts the reason, as "last".
    """
    failed: dict[str, str] = {}
    started = time.monotonic()

    async def say() -> None:
        pause = FIRST_WORD
        while True:
            await asyncio.sleep(pause)
            pause, now = NEXT_WORD, time.monotonic()
            if now - _last_word.get(url, -math.inf) >= NEXT_WORD:
                _last_word[url] = now
                why = f" ({failed['last']})" if failed else ""
                print(f"{url}: no answer for {now - started:.0f} s{why}; waiting", file=sys.stderr, flush=True)

    task = asyncio.create_task(say())
    try:
        yield failed
    finally:
        task.cancel()


def _reason(given: httpx.Response) -> str:
    try:
        return str(given.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return given.text[:200]
