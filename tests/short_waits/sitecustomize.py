"""On the PYTHONPATH of the processes that a test starts: their waits are short.

Python imports this file by its name before anything else; a module named here gets its constants once it is imported.
"""

from __future__ import annotations

import importlib.machinery
import sys
import time
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace

LONGEST_SLEEP = 0.3
CONSTANTS = {
    "server_app.federation.grid": {"LEAST_SECONDS": 6.0},
    # an idle SuperNode asks for messages every three seconds
    "flwr.supernode.start_client_internal": {
        "time": SimpleNamespace(**{**vars(time), "sleep": lambda seconds: time.sleep(min(seconds, LONGEST_SLEEP))})
    },
}


class _Finder:
    """Finds the modules of `CONSTANTS`, and sets these once a module has run."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in CONSTANTS else None
        if spec is None or spec.loader is None:
            return None
        loader, run = spec.loader, spec.loader.exec_module

        def run_and_set(module: ModuleType) -> None:
            run(module)
            vars(module).update(CONSTANTS[name])

        loader.exec_module = run_and_set  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
