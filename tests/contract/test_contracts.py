"""What holds the house together: import directions, the defaults that stand twice, what Flower ships."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import flatten_dict

from appa_flwr.config import Config

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("appa_flwr", "pluralllm", "server_app", "client_app", "experiments")
SHIPPED = PACKAGES[:4]


def pyproject() -> dict:
    return tomllib.loads((REPO / "pyproject.toml").read_text())


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command; lint_imports_command()",
            "--no-cache",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_imports_run_one_way_in_this_checkout():
    done = lint_imports(REPO)
    assert done.returncode == 0, done.stdout
    assert "3 kept, 0 broken" in done.stdout


@pytest.fixture
def house(tmp_path):
    """Empty packages under the contracts of this checkout."""
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "appa_flwr" / "wire.py").write_text("import flwr\n")
    return tmp_path


@pytest.mark.parametrize(
    ("package", "imported"),
    [
        ("appa_flwr", "pluralllm"),
        ("appa_flwr", "server_app"),
        ("appa_flwr", "client_app"),
        ("pluralllm", "client_app"),
        ("server_app", "client_app"),
        ("client_app", "server_app"),
        ("client_app", "experiments"),
        ("appa_flwr", "flwr"),
        ("pluralllm", "flwr"),
        ("appa_flwr", "torch"),
    ],
)
def test_the_contracts_turn_red_on_a_forbidden_import(house, package, imported):
    (house / package / "wrong.py").write_text(f"import {imported}\n")
    done = lint_imports(house)
    assert done.returncode == 1
    assert f"{package}.wrong -> {imported}" in done.stdout


def test_the_contracts_stay_green_on_the_allowed_imports(house):
    for package, imported in (
        ("experiments", "server_app"),
        ("experiments", "client_app"),
        ("server_app", "pluralllm"),
        ("client_app", "appa_flwr"),
        ("pluralllm", "torch"),
        ("client_app", "flwr"),
    ):
        (house / package / f"uses_{imported}.py").write_text(f"import {imported}\n")
    done = lint_imports(house)
    assert done.returncode == 0, done.stdout


def test_the_defaults_in_pyproject_are_the_defaults_of_the_config():
    table = flatten_dict(pyproject()["tool"]["flwr"]["app"]["config"])
    defaults = Config.load({}).flat()
    assert table == defaults
    # Equal is not enough: 1 == 1.0 == True, and Flower sends the type on.
    assert {key: type(value) for key, value in table.items()} == {key: type(v) for key, v in defaults.items()}


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return match[0].lower().replace("_", "-")


def _requirements() -> set[str]:
    project = pyproject()["project"]
    extras = project["optional-dependencies"].values()
    return {_name(r) for r in (*project["dependencies"], *(r for extra in extras for r in extra))}


def test_flower_is_told_to_install_none_of_our_requirements():
    # One left out is looked up on the network at each `flwr run`, which fails offline; uv resolves extras.
    assert set(pyproject()["tool"]["uv"]["exclude-dependencies"]) == _requirements()


def test_every_requirement_is_pinned():
    lines = (REPO / "constraints.txt").read_text().splitlines()
    pinned = {_name(line) for line in lines if re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)}
    assert _requirements() <= pinned


def test_the_bundle_holds_the_code_and_no_data(tmp_path):
    for package in SHIPPED:
        shutil.copytree(REPO / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
        (tmp_path / package / "answers.jsonl").write_text("{}\n")
    for name in ("pyproject.toml", ".gitignore"):
        shutil.copy(REPO / name, tmp_path)
    for name in ("survey.json", "survey.yaml", "notes.md", "private.py", "runs/r/metrics.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    bundle = zipfile.ZipFile(io.BytesIO(build_fab_from_disk(tmp_path)))
    shipped = {path.relative_to(REPO).as_posix() for package in SHIPPED for path in (REPO / package).rglob("*.py")}
    assert set(bundle.namelist()) == shipped | {"pyproject.toml", ".info/CONTENT"}
    # The server app builds the report from the bundle, where there are no files but these.
    bundle.extractall(app := tmp_path / "app")
    code = f"""
import pathlib
from appa_flwr import report
from appa_flwr.config import Config
from appa_flwr.run.files import write_config
folder = pathlib.Path({str(tmp_path)!r}, "run")
folder.mkdir()
write_config(folder, Config())
print(report.__file__, report.build(folder))
"""
    env = {**os.environ, "PYTHONPATH": str(app)}
    built = subprocess.run([sys.executable, "-c", code], cwd=app, env=env, capture_output=True, text=True, check=False)
    assert built.stdout.split() == [str(app / "appa_flwr/report/__init__.py"), str(tmp_path / "run/report.html")], built
    assert "<h2>Configuration</h2>" in (tmp_path / "run/report.html").read_text()
