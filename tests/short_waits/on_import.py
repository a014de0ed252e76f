"""Sets constants of modules once these are imported: in a session of tests, and in the processes that they start."""

import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

SIZES = {
    "pluralllm.data": {
        "EMBEDDING_DIM": 16,
        "QUESTION_PART": slice(0, 8),
        "OPTION_PART": slice(8, 13),
        "HIDDEN_DIM": 8,
        "NUM_BLOCKS": 1,
        "RANK": 8,
    },
    "server_app.policy.tiny": {"STEPS": 20, "COUNTED_STEPS": 20},
    "server_app.ppo_phase": {"CHECKPOINT_EVERY": 1},
}
"""Module -> constants of what tests build: small; a checkpoint after every iteration."""


class _Finder:
    """Finds modules by name, and sets their constants once they have run."""

    def __init__(self, constants: Mapping[str, Mapping[str, object]]) -> None:
        self._constants = constants

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in self._constants else None
        if spec is None or spec.loader is None:
            return None
        loader, run = spec.loader, spec.loader.exec_module

        def run_and_set(module: ModuleType) -> None:
            run(module)
            assert vars(module).keys() >= self._constants[name].keys()
            vars(module).update(self._constants[name])

        loader.exec_module = run_and_set  # type: ignore[method-assign]
        return spec


def set_constants(constants: Mapping[str, Mapping[str, object]]) -> None:
    """Module -> its constants by name; what it makes of them while it is imported is made of the old ones."""
    sys.meta_path.insert(0, _Finder(constants))  # type: ignore[arg-type]
