"""The Flower app: the folder it lies in, the files that `flwr run` sends of it to every party, and their hash."""

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
OWN_PACKAGES = ("appa_flwr", "pluralllm", "server_app", "client_app")


def project_file(app_folder: Path, name: str) -> Path:
    """A file of the project in a checkout, or where the wheel has put it (setup.py)."""
    installed = app_folder / "appa_flwr" / "project" / name
    return installed if installed.exists() else app_folder / name


def find_app_folder(start: Path) -> Path:
    """The folder with the Flower app: the checkout that `start` lies in, or the one where the package is installed.

    Raises:
        UserError: neither is there.
    """
    for folder in (start, *start.parents, Path(appa_flwr.__file__).parent.parent):
        with suppress(OSError, ValueError):
            table = tomllib.loads(project_file(folder, PROJECT).read_text(encoding="utf-8"))
            if table.get("project", {}).get("name") == APP_NAME and "app" in table.get("tool", {}).get("flwr", {}):
                return folder
    raise UserError(f"no checkout of {APP_NAME} in {start} or above: run inside a clone, or pip install one")


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


def sent_files(app_folder: Path, home: Path, *own: Path | None) -> Path:
    """A copy of what `flwr run` sends; in a checkout it would look at all files, an environment's 60,000 too.

    `own`: files of modules and folders of packages that go along.
    """
    copy = home / APP_NAME
    text = project_file(app_folder, PROJECT).read_text(encoding="utf-8")
    sent = tomllib.loads(text)["tool"]["flwr"]["app"]["fab-include"]
    code = {path.relative_to(app_folder): path for pattern in sent for path in app_folder.glob(pattern)}
    code |= {Path(name): project_file(app_folder, name) for name in sent if "*" not in name}
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


def bundle_hash(app_folder: Path) -> str:
    """The SHA-256 of the bundle of this checkout, by which nodes know it.

    Raises:
        UserError: Flower cannot build it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        flower = Path(sysconfig.get_path("scripts")) / "flwr"  # whether an environment is activated or not
        command = [str(flower), "build", "--app", str(sent_files(app_folder, Path(scratch)))]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
        built = list(Path(scratch).glob("*.fab"))
        if done.returncode or not built:
            raise UserError(f"{app_folder}: flwr build failed: {(done.stderr or done.stdout).strip()}")
        return hashlib.sha256(built[0].read_bytes()).hexdigest()
