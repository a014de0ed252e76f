"""Exceptions of the launcher: a run that failed, and a signal to stop."""

from __future__ import annotations

import signal


class RunFailed(Exception):
    """The run started and did not complete; the message says why and where the log lies."""


class Stopped(BaseException):
    """A signal asked the launcher to stop; raised in its place so that everything started is ended first."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum
