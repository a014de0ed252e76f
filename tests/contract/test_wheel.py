"""A wheel sends Flower the app of its checkout, from any folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from appa_flwr.launch.bundle import bundle_hash

REPO = Path(__file__).resolve().parents[2]
SOURCES = ("appa_flwr", "pluralllm", "server_app", "client_app", "experiments")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
HASH = "from appa_flwr.launch.bundle import APP_FOLDER, bundle_hash; print(APP_FOLDER, bundle_hash())"


def test_an_installed_wheel_has_the_bundle_of_its_checkout(tmp_path):
    # a copy, since a build leaves files in the checkout and would take those of earlier builds
    for name in SOURCES:
        shutil.copytree(REPO / name, tmp_path / "clone" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(REPO / name, tmp_path / "clone")
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", "./clone"]
    subprocess.run([sys.executable, *command], cwd=tmp_path, check=True)
    (wheel,) = (tmp_path / "dist").iterdir()
    installed = tmp_path / "packages"
    zipfile.ZipFile(wheel).extractall(installed)
    (here := tmp_path / "empty").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", HASH], cwd=here, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(installed), bundle_hash(REPO)]
