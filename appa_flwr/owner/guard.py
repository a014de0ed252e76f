"""Program in place of Flower's `flwr-clientapp` at a group, which runs no bundle that the owner has not pinned.

Bundles come from the submitter, so what checks them must not come in one: this is the owner's own copy. The group's
start script puts it first on the PATH, and Flower starts it for each message.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from flwr.supernode.cli.flwr_clientapp import flwr_clientapp
from flwr.supernode.runtime import run_clientapp

from appa_flwr.core.errors import UserError
from appa_flwr.owner.owner_policy import OWNER_POLICY_VARIABLE, read_owner_policy

NOT_PINNED = "its owner's policy pins other bundles (bundle)"
UNREADABLE = "its owner's policy cannot be read"


def check(content: bytes) -> None:
    """Refuse a bundle that the owner's policy, the file that APPA_POLICY names, does not pin.

    Raises:
        UserError: it is not pinned, or that policy cannot be read; nothing in the text is private, for it leaves.
    """
    try:
        pinned = read_owner_policy(Path(os.environ[OWNER_POLICY_VARIABLE])).bundle.split()
    except (KeyError, UserError):
        raise UserError(UNREADABLE) from None
    if pinned and hashlib.sha256(content).hexdigest() not in pinned:
        raise UserError(NOT_PINNED)


def main() -> None:
    """Run Flower's program, which unpacks a bundle after `check` alone.

    It unpacks into an empty folder, and loads what the server names from there: another bundle, of an earlier run, is
    not to be had. What the guard has imported is forgotten, so that the bundle's own modules run.
    """
    base = Path(os.environ.get("FLWR_HOME") or tempfile.gettempdir())
    base.mkdir(parents=True, exist_ok=True)
    os.environ["FLWR_HOME"] = home = tempfile.mkdtemp(prefix="bundle-", dir=base)
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    # A patch: Flower 1.41 checks signatures of its hub's apps alone, and the program that pulls a bundle runs it too.
    program: Any = run_clientapp
    unpack = program.install_from_fab

    def guarded(content: bytes, *args: Any, **kwargs: Any) -> Any:
        check(content)
        for name in [name for name in sys.modules if name.partition(".")[0] == "appa_flwr"]:
            del sys.modules[name]
        return unpack(content, *args, **kwargs)

    program.install_from_fab = guarded
    flwr_clientapp()


if __name__ == "__main__":
    main()
