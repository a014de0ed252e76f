"""Requests to a served run, tried again while that can help: the service scores nothing twice."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any

import httpx

from appa_flwr.core.errors import UserError

URL, TOKEN = "APPA_URL", "APPA_TOKEN"
READ_SECONDS = 60.0  # of one try: what waits for other processes is asked for again
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
AGAIN = (429, 502, 503, 504)


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
        async with httpx.AsyncClient(headers=self._headers, timeout=timeout) as client:
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
                    why = f"{type(error).__name__}: {error}"
                if time.monotonic() + wait > until:
                    raise UserError(f"{self._url}{path}: no answer in {self._patience:.0f} s; the last: {why}")
                await asyncio.sleep(wait)
                pause = min(LONGEST_PAUSE, 2 * pause)


def _reason(given: httpx.Response) -> str:
    try:
        return str(given.json()["error"])
    except (ValueError, KeyError, TypeError):
        return given.text[:200]
