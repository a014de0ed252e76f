"""Policies that train at the same time in threads of one process: the passes of a small model leave cores idle."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import RLock

from server_app import log


class SideBySide:
    """Tasks of which one at a time holds the run: the groups, the files, and what libraries keep for a whole process.

    A task gives the run to others in its blocks of `computing`, which must only use its own models and arrays.
    """

    def __init__(self) -> None:
        self._run, self._stopped = RLock(), False  # an RLock knows the thread that holds it

    def do(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Do all tasks, the last in this thread, and raise the first error after all have ended.

        An error ends its own task alone. A signal ends the others where they next need the run.
        """
        *others, own = tasks
        with ThreadPoolExecutor(max(1, len(others))) as executor, self._noticing_signals():
            futures = [executor.submit(self._do, task, alone=False) for task in others]
            with suppress(CancelledError):  # the signal follows
                self._do(own, alone=not others)
            errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, CancelledError):
                raise error

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let other tasks hold the run during the block; raises CancelledError at its end after a signal."""
        self._run.release()
        try:
            yield
        finally:
            self._run.acquire()
        self._go_on()

    def _do(self, task: Callable[[], None], *, alone: bool) -> None:
        try:
            with self._noticing_signals():
                self._run.acquire()
                self._go_on()
                task()
        except Exception as error:
            if not (alone or isinstance(error, CancelledError)):
                log.warning("one of the policies ends with an error, the others go on: %s", error)
            raise
        finally:
            with suppress(RuntimeError):  # a signal may come while another task holds the run
                self._run.release()

    @contextmanager
    def _noticing_signals(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self._stopped = True
            raise

    def _go_on(self) -> None:
        if self._stopped:
            raise CancelledError
