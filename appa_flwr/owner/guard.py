"""No bundle runs at a group that its owner has not pinned.

Bundles are whoever's who submits a run, so what checks them must not come in one: this is the owner's own copy, which
`ready`, his program in place of Flower's, runs for each message.
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

from appa_flwr.errors import UserError
from appa_flwr.owner.policy import POLICY_VARIABLE, read_policy

NOT_PINNED = "its owner's policy pins other bundles (bundle)"
UNREADABLE = "its owner's policy cannot be read"


def check(content: bytes) -> None:
    """Whether the owner lets this bundle run; his policy is the file that APPA_POLICY names.

    Raises:
        UserError: he does not, or the policy cannot be read; nothing in the text is private, for it leaves.
    """
    try:
        pinned = read_policy(Path(os.environ[POLICY_VARIABLE])).bundle.split()
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
    program: Any = run_clientapp
    unpack = program.install_from_fab

    def guarded(content: bytes, *args: Any, **kwargs: Any) -> Any:
        check(content)
        for name in [name for name in sys.modules if name.partition(".")[0] == "appa_flwr"]:
            del sys.modules[name]
        return unpack(content, *args, **kwargs)

    program.install_from_fab = guarded
    flwr_clientapp()
