"""Version of the code: a hash of the files that affect a run's numbers."""

import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

CODE: Final = ("appa_flwr", "client_app", "server_app", "pluralllm")
SHOWING: Final = ("report", "launch")
HASH_DIGITS: Final = 8


@cache
def code_version() -> str:
    """Hash of the Python and TOML files of the four packages, except report and launch."""
    code = hashlib.sha256()
    for package in CODE:
        spec = find_spec(package)  # without an import: a server does not import a group's package
        for root in map(Path, (spec and spec.submodule_search_locations) or ()):
            for path in sorted(path for ending in ("*.py", "*.toml") for path in root.rglob(ending)):
                if path.relative_to(root).parts[0] not in SHOWING:
                    code.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return code.hexdigest()[:HASH_DIGITS]
