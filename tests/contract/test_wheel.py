"""A wheel holds what a checkout has: from any folder, what is installed runs the same app."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from appa_flwr import __version__
from appa_flwr.launch.bundle import bundle_hash

REPO = Path(__file__).parents[2]
ASK = """
from pathlib import Path
from appa_flwr.launch.bundle import bundle_hash
from appa_flwr.launch.bundle import find_app_folder
folder = find_app_folder(Path.cwd())
print(folder, bundle_hash(folder))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder of packages with nothing but the wheel in it."""
    folder = tmp_path_factory.mktemp("wheel")
    checkout = folder / "checkout"  # builds leave their files, and would find those of earlier ones
    for name in ("appa_flwr", "pluralllm", "server_app", "client_app", "experiments"):
        shutil.copytree(REPO / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPO / name, checkout)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", str(checkout)]
    subprocess.run([*command, "--wheel-dir", str(folder)], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "packages")
    return folder / "packages"


def test_what_is_installed_sends_the_bundle_of_the_checkout(installed, tmp_path):
    command = [sys.executable, "-c", ASK]
    # -c puts the working folder first on the path; PYTHONPATH comes before the environment's own packages
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(installed)}, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.split() == [str(installed), bundle_hash(REPO)]


def test_there_is_one_version():
    assert tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["version"] == __version__
