"""What `flwr build` makes of this checkout, which every run sends to every party."""

from __future__ import annotations

import io
import shutil
import tomllib
import zipfile
from pathlib import Path

from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import FAB_MAX_SIZE
from flwr.supercore.fab_format_version import normalize_and_validate_fab_format

REPO = Path(__file__).parents[2]


def test_the_bundle_holds_the_app_with_its_licence_and_nothing_else(tmp_path):
    bundle = build_fab_from_disk(_copy(tmp_path))
    names = set(zipfile.ZipFile(io.BytesIO(bundle)).namelist())
    assert {"LICENSE", "README.md", "pyproject.toml", "server_app/main.py", "client_app/main.py"} <= names
    code = {name for name in names if name.endswith(".py")}
    assert {name.split("/")[0] for name in code} == {"appa_flwr", "client_app", "pluralllm", "server_app"}
    assert len(names - code) == 4, names - code  # those three, and Flower's list
    assert len(bundle) < FAB_MAX_SIZE / 10


def test_the_bundle_says_for_which_flower_it_is(tmp_path):
    table = tomllib.loads((REPO / "pyproject.toml").read_text())
    found = normalize_and_validate_fab_format(table)
    assert (found.fab_format_version, found.flwr_version_min) == (1, "1.41")
    pins = (REPO / "constraints.txt").read_text().splitlines()
    assert f"flwr=={found.flwr_version_target}" in pins  # the one that is tested


def _copy(folder: Path) -> Path:
    """The checkout without environments and caches, whose 60,000 files Flower would look at."""
    for pattern in ("*", "*/**/*"):
        for path in REPO.glob(pattern):
            inside = path.relative_to(REPO)
            if path.is_file() and not any(part.startswith(".") or part == "runs" for part in inside.parts):
                (folder / inside).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, folder / inside)
    return folder
