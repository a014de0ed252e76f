"""Policies that train at the same time in threads of one process: the passes of a small model leave cores idle."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Lock


class SideBySide:
    """Works of which one at a time holds the run: the groups, the files, and what libraries keep for a whole process.

    A work gives the run to others in its blocks of `computing`, which must only use its own models and arrays.
    """

    def __init__(self) -> None:
        self._held, self._failed = Lock(), False

    def do(self, works: Sequence[Callable[[], None]]) -> None:
        """Do all works, the last in this thread; the error of one ends the others where they next need the run."""
        *others, own = works
        with ThreadPoolExecutor(max(1, len(others))) as executor:
            futures = [executor.submit(self._do, work) for work in others]
            with suppress(CancelledError):  # the error of another follows
                self._do(own)
            errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None and not isinstance(error, CancelledError):
                raise error

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let other works hold the run during the block; raises CancelledError at its end if one of them failed."""
        self._held.release()
        try:
            yield
        finally:
            self._held.acquire()
        self._go_on()

    def _do(self, work: Callable[[], None]) -> None:
        with self._held:
            self._go_on()
            try:
                work()
            except BaseException:
                self._failed = True
                raise

    def _go_on(self) -> None:
        if self._failed:
            raise CancelledError
