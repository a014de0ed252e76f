"""The Flower app: the checkout it lies in, the files that `flwr run` sends of it to every party, and their hash."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sysconfig
import tempfile
import tomllib
from contextlib import suppress
from pathlib import Path

import appa_flwr
from appa_flwr.core.errors import UserError

APP_NAME, PROJECT = "appa-flwr", "pyproject.toml"
APP_FOLDER = Path(appa_flwr.__file__).parent.parent
"""The checkout in which this package lies."""
OWN_PACKAGES = ("appa_flwr", "pluralllm", "server_app", "client_app")


def project(app_folder: Path) -> str:
    """The text of a checkout's pyproject.toml, which says what is sent.

    Raises:
        UserError: it is no checkout.
    """
    with suppress(OSError, ValueError):
        text = (app_folder / PROJECT).read_text(encoding="utf-8")
        if tomllib.loads(text).get("project", {}).get("name") == APP_NAME:
            return text
    raise UserError(f"{app_folder}: is no checkout of {APP_NAME}; pip install --editable a clone")


def own_code(name: str, here: Path) -> Path | None:
    """The file or folder in `here` that holds the module of code named module:name; None for other names."""
    top = name.partition(":")[0].partition(".")[0] if ":" in name else ""
    spec = importlib.util.find_spec(top) if top and top not in OWN_PACKAGES else None
    if spec is None:
        return None
    # What Python would import, of several by that name: a file, a package, or a folder without __init__.py.
    lies = Path(spec.origin) if spec.origin else Path(next(iter(spec.submodule_search_locations or ()), ""))
    path = lies.parent if lies.name == "__init__.py" else lies
    return path if path.parent.resolve() == here.resolve() else None


def sent_files(home: Path, *own: Path | None, app_folder: Path | None = None) -> Path:
    """A copy of what `flwr run` sends; in a checkout it would look at all files, an environment's 60,000 too.

    Args:
        home: where the copy goes.
        own: files of modules and folders of packages that go along.
        app_folder: the checkout; None = `APP_FOLDER`.

    Raises:
        UserError: it is no checkout.
    """
    app_folder, copy = app_folder or APP_FOLDER, home / APP_NAME
    text = project(app_folder)
    sent = tomllib.loads(text)["tool"]["flwr"]["app"]["fab-include"]
    code = {path.relative_to(app_folder): path for pattern in sent for path in app_folder.glob(pattern)}
    for mine in dict.fromkeys(filter(None, own)):
        pattern = mine.name if mine.is_file() else f"{mine.name}/**/*.py"
        text = text.replace("fab-include = [", f'fab-include = ["{pattern}", ')
        code |= {path.relative_to(mine.parent): path for path in mine.parent.glob(pattern)}
    for name, path in code.items():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    (copy / PROJECT).write_text(text, encoding="utf-8")
    return copy


def bundle_hash(app_folder: Path | None = None) -> str:
    """The SHA-256 of the bundle of a checkout, by which nodes know it; see `sent_files`.

    Raises:
        UserError: it is no checkout, or Flower cannot build it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        flower = Path(sysconfig.get_path("scripts")) / "flwr"  # whether an environment is activated or not
        command = [str(flower), "build", "--app", str(sent_files(Path(scratch), app_folder=app_folder))]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
        built = list(Path(scratch).glob("*.fab"))
        if done.returncode or not built:
            raise UserError(f"{app_folder or APP_FOLDER}: flwr build failed: {(done.stderr or done.stdout).strip()}")
        return hashlib.sha256(built[0].read_bytes()).hexdigest()
