"""Loading of users' code by "module:name", for aggregation rules."""

import hashlib
import importlib
import os
import sys
from pathlib import Path
from typing import Final

from appa_flwr.core.errors import UserError

_WORD: Final = "[A-Za-z_][A-Za-z0-9_]*"
NAME: Final = rf"{_WORD}(\.{_WORD})*:{_WORD}"
"""Pattern of "module:name", an importable module and a name in it."""
FOLDER: Final = "APPA_CODE"
"""Environment variable that tells the server's process the folder in which the run was started."""


def load(name: str) -> object:
    """Load a rule's "module:name", also from the folder where the run was started; None if the module lacks the name.

    Raises:
        UserError: the module cannot be imported.
    """
    module, _, held = name.partition(":")
    try:
        if (folder := os.environ.get(FOLDER) or os.getcwd()) not in sys.path:
            sys.path.append(folder)
        return getattr(importlib.import_module(module), held, None)
    except (Exception, SystemExit) as error:  # the module's code can raise anything
        there = not (isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0])
        advice = "" if there else "; it has to lie in the folder where the run starts, or be installed"
        raise UserError(f'rule "{name}": {module} cannot be imported ({in_words(error)}){advice}') from error


def text_hash(name: str) -> str:
    """Hash of the file of the module of a loaded "module:name"; empty for the name of a rule of this package."""
    file = Path(getattr(sys.modules.get(name.partition(":")[0]), "__file__", None) or "")
    return hashlib.sha256(file.read_bytes()).hexdigest() if ":" in name and file.is_file() else ""


def in_words(error: BaseException) -> str:
    """Describe an exception of foreign code in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
