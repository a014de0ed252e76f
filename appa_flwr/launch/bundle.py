"""The Flower app: its checkout, the files that `flwr run` sends to every party, and their hash."""

import hashlib
import shutil
import subprocess
import sysconfig
import tempfile
import tomllib
from pathlib import Path

import appa_flwr
from appa_flwr.core.errors import UserError

APP_NAME, PROJECT = "appa-flwr", "pyproject.toml"
APP_FOLDER = Path(appa_flwr.__file__).parent.parent
"""The checkout in which this package lies."""


def sent_files(home: Path, *, app_folder: Path = APP_FOLDER) -> Path:
    """Copy to `home` what `flwr run` sends; in a checkout it would scan all files, even 60,000 of an environment.

    Raises:
        UserError: the folder is not a checkout.
    """
    copy = home / APP_NAME
    try:
        table = tomllib.loads((app_folder / PROJECT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        table = {}
    if table.get("project", {}).get("name") != APP_NAME:
        raise UserError(f"{app_folder}: is no checkout of {APP_NAME}; pip install --editable a clone")
    for pattern in (PROJECT, *table["tool"]["flwr"]["app"]["fab-include"]):
        for path in app_folder.glob(pattern):
            target = copy / path.relative_to(app_folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    return copy


def bundle_hash(app_folder: Path = APP_FOLDER) -> str:
    """SHA-256 of a checkout's bundle, by which owners' policies pin it; see `sent_files`.

    Raises:
        UserError: the folder is not a checkout, or Flower cannot build the bundle.
    """
    with tempfile.TemporaryDirectory() as scratch:
        flower = Path(sysconfig.get_path("scripts")) / "flwr"  # whether an environment is activated or not
        command = [str(flower), "build", "--app", str(sent_files(Path(scratch), app_folder=app_folder))]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
        built = list(Path(scratch).glob("*.fab"))
        if done.returncode or not built:
            raise UserError(f"{app_folder}: flwr build failed: {(done.stderr or done.stdout).strip()}")
        return hashlib.sha256(built[0].read_bytes()).hexdigest()
