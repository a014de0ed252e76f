"""Replacement for Flower's `flwr-clientapp` at a group, which runs only bundles that the owner's policy allows.

Bundles come from the submitter of a run, so the check must not come from a bundle: it is the owner's own copy. The
group's start script puts this program first on the PATH, and Flower starts it for each message.
"""

import argparse
import atexit
import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from flwr.common.args import add_args_flwr_app_common, try_obtain_flwr_app_token
from flwr.supercore.tls import validate_and_resolve_root_certificates
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
    except (KeyError, UserError) as error:
        print(error, file=sys.stderr)  # into the node's own log
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
    program.run_clientapp(**_arguments())


def _arguments() -> dict[str, Any]:
    """Read the command line of `flwr-clientapp`, as Flower's own command does.

    Importing Flower's command would also import the SuperNode, a third of a message's processor time.
    """
    parser = argparse.ArgumentParser(description="Run a Flower ClientApp")
    parser.add_argument("--runtime-api-address", required=True)
    add_args_flwr_app_common(parser)
    args = parser.parse_args()
    return {
        "runtime_api_address": args.runtime_api_address,
        "token": try_obtain_flwr_app_token(args),
        "insecure": args.insecure,
        "certificates": validate_and_resolve_root_certificates(args.root_certificates, args.insecure),
        "parent_pid": args.parent_pid,
        "runtime_dependency_install": args.runtime_dependency_install,
    }


if __name__ == "__main__":
    main()
