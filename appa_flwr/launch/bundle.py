"""Files that `flwr run` sends to every party: the app's bundle."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sysconfig
import tempfile
import tomllib
from pathlib import Path

from appa_flwr.core.errors import UserError
from appa_flwr.launch.checks import APP_NAME


def sent_files(app_folder: Path, home: Path) -> Path:
    """A copy of what `flwr run` sends; in a checkout it would look at all files, an environment's 60,000 too."""
    copy = home / APP_NAME
    project = app_folder / "pyproject.toml"
    sent = tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["fab-include"]
    for path in (project, *(path for pattern in sent for path in app_folder.glob(pattern))):
        target = copy / path.relative_to(app_folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
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
