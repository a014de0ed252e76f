"""Ends what a killed launcher has left: a process of its own, which waits for the launcher's end."""

import shutil
import sys
from contextlib import suppress

import psutil


def main(home: str) -> None:
    """Wait until the launcher, which holds the other end of standard input, has ended; then kill and remove the rest.

    Processes are known by their Flower home; Ray's workers hide theirs, and end with Ray.
    """
    sys.stdin.read()
    while left := [
        process
        for process in psutil.process_iter(["environ"])  # None for another user's process
        if (process.info["environ"] or {}).get("FLWR_HOME", "").startswith(home)
    ]:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)
    shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
