"""Replacement for Flower's `flwr-clientapp` at a group, which runs only bundles that the owner's policy allows.

Bundles come from the submitter of a run, so the check must not come from a bundle: it is the owner's own copy. The
group's start script puts this program first on the PATH, and Flower starts it for each message.
"""

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
    """Check that the owner's policy, the file named by APPA_POLICY, pins this bundle or no bundle at all.

    Raises:
        UserError: it pins other bundles or cannot be read; the message leaves the group and holds nothing private.
    """
    try:
        pinned = read_owner_policy(Path(os.environ[OWNER_POLICY_VARIABLE])).bundle.split()
    except (KeyError, UserError):
        raise UserError(UNREADABLE) from None
    if pinned and hashlib.sha256(content).hexdigest() not in pinned:
        raise UserError(NOT_PINNED)


def main() -> None:
    """Run Flower's program with a `check` before a bundle is unpacked.

    Flower unpacks into a new empty folder and loads apps from this folder, so a server cannot name a bundle of an
    earlier run. The guard's own modules are removed from `sys.modules`, so that the bundle's modules run.
    """
    base = Path(os.environ.get("FLWR_HOME") or tempfile.gettempdir())
    base.mkdir(parents=True, exist_ok=True)
    os.environ["FLWR_HOME"] = home = tempfile.mkdtemp(prefix="bundle-", dir=base)
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    # A patch, since Flower 1.41 checks only signatures of its hub's apps, and one program both pulls and runs a bundle.
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
