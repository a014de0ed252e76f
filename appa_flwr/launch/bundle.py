"""The Flower app: its folder, the files that `flwr run` sends to every party, and their hash."""

import shutil
import subprocess
import sysconfig
import tempfile
import tomllib
from pathlib import Path

import appa_flwr
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import sha256_of

APP_NAME, PROJECT = "appa-flwr", "pyproject.toml"
APP_FOLDER = Path(appa_flwr.__file__).parent.parent
"""The checkout in which this package lies, or the folder in which it is installed."""


def sent_files(home: Path, *, app_folder: Path = APP_FOLDER) -> Path:
    """Write to `home` Flower's app folder: what `flwr run` sends of a checkout, or the same of an installed package.

    In a checkout itself, `flwr run` would scan all files, even 60,000 of an environment.

    Raises:
        UserError: the folder is neither a checkout nor has the installed package.
    """
    copy = home / APP_NAME
    wheel = app_folder / "appa_flwr" / "project"  # where setup.py puts the project's own files
    project = wheel if wheel.exists() else app_folder
    try:
        table = tomllib.loads((project / PROJECT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        table = {}
    if table.get("project", {}).get("name") != APP_NAME:
        raise UserError(f"{app_folder}: is no checkout of {APP_NAME}, and {APP_NAME} is not installed there")
    for pattern in (PROJECT, *table["tool"]["flwr"]["app"]["fab-include"]):
        folder = app_folder if "/" in pattern else project
        for path in folder.glob(pattern):
            target = copy / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    return copy


def bundle_hash(app_folder: Path = APP_FOLDER) -> str:
    """SHA-256 of the app's bundle, by which owners' policies pin it; equal for a checkout and its wheel.

    Raises:
        UserError: see `sent_files`; or Flower cannot build the bundle.
    """
    with tempfile.TemporaryDirectory() as scratch:
        flower = Path(sysconfig.get_path("scripts")) / "flwr"  # whether an environment is activated or not
        command = [str(flower), "build", "--app", str(sent_files(Path(scratch), app_folder=app_folder))]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
        built = list(Path(scratch).glob("*.fab"))
        if done.returncode or not built:
            raise UserError(f"{app_folder}: flwr build failed: {(done.stderr or done.stdout).strip()}")
        return sha256_of(built[0])
