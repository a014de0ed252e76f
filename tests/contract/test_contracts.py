"""Contracts of the whole code: import directions, the defaults that stand twice, what Flower ships.

That the imports keep to their contracts in this checkout is what `make check` looks at.
"""

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
from flwr.supercore.fab_format_version import normalize_and_validate_fab_format

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.launch.bundle import bundle_hash
from appa_flwr.owner import guard
from appa_flwr.owner.owner_policy import OWNER_POLICY_VARIABLE

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("appa_flwr", "pluralllm", "server_app", "client_app", "experiments")
SHIPPED = PACKAGES[:4]


def pyproject() -> dict:
    return tomllib.loads((REPO / "pyproject.toml").read_text())


def contracts() -> list[dict]:
    return pyproject()["tool"]["importlinter"]["contracts"]


# One forbidden import of every kind, by the contract that it breaks.
WRONG = {
    "imports run one way": {
        "appa_flwr": ("pluralllm", "server_app", "client_app"),
        "pluralllm": ("client_app",),
        "server_app": ("client_app",),
        "client_app": ("server_app", "experiments"),
    },
    "only the modules of messages know Flower": {"appa_flwr": ("flwr",), "pluralllm": ("flwr",)},
    "what both sides may know needs no torch": {"appa_flwr": ("torch",)},
    "a group joins": {
        "client_app": (
            *("appa_flwr.analysis", "appa_flwr.run", "appa_flwr.report", "appa_flwr.launch"),
            *("trl", "matplotlib"),
        ),
        # through others: a client may import PluralLLM and the survey reader, and so neither may import this
        "pluralllm.data": ("appa_flwr.analysis",),
        "appa_flwr.survey.types": ("transformers",),
    },
    "a trainer of another maker": {
        "appa_flwr.trainers.client": ("numpy",),
        "appa_flwr.trainers": ("pydantic", "appa_flwr.run"),
    },
    "the layers of appa_flwr": {
        "appa_flwr.survey": ("appa_flwr.report",),
        "appa_flwr.report": ("appa_flwr.launch",),
        "appa_flwr.run": ("appa_flwr.report", "appa_flwr.analysis"),
        "appa_flwr.config": ("appa_flwr.survey", "appa_flwr.analysis"),
        "appa_flwr.protocol": ("appa_flwr.analysis",),
        "appa_flwr.owner": ("appa_flwr.config",),
        "appa_flwr.core": ("appa_flwr.owner",),
    },
    "the layers of the server": {
        "server_app.evaluation": ("server_app.main",),
        "server_app.models": ("server_app.ppo",),
        "server_app.federation": ("server_app.predictor",),
        "server_app.engine": ("server_app.models",),
    },
}


def test_every_contract_turns_red_on_a_forbidden_import(tmp_path):
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        shutil.copytree(REPO / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for contract, (begin, wrong) in zip(contracts(), WRONG.items(), strict=True):
        assert contract["name"].startswith(begin)
        for importer, planted in wrong.items():
            path = tmp_path.joinpath(*importer.split("."))
            with (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).open("a") as file:
                file.writelines(f"import {imported}\n" for imported in planted)
    lint = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", lint, "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    for begin, wrong in WRONG.items():
        assert re.search(rf"^{begin}[^-]*? BROKEN", done.stdout, re.MULTILINE), done.stdout
        for importer, planted in wrong.items():
            for imported in planted:
                assert f"{importer} -> {imported} " in done.stdout, (importer, imported)


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


def test_the_bundle_says_that_it_is_for_the_flower_that_is_tested():
    found = normalize_and_validate_fab_format(tomllib.loads((REPO / "pyproject.toml").read_text()))
    assert found.fab_format_version == 1
    assert f"flwr=={found.flwr_version_target}" in (REPO / "constraints.txt").read_text().splitlines()


def test_the_bundle_holds_the_code_and_no_data(tmp_path, monkeypatch):
    for package in SHIPPED:
        shutil.copytree(REPO / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
        (tmp_path / package / "answers.jsonl").write_text("{}\n")
    for name in ("pyproject.toml", ".gitignore", "LICENSE", "README.md"):
        shutil.copy(REPO / name, tmp_path)
    for name in ("survey.json", "survey.yaml", "notes.md", "private.py", "runs/r/metrics.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    fab = build_fab_from_disk(tmp_path)  # as `flwr run` does
    # The app that `appa deploy` pins and `appa run` sends is this one, and a node's guard knows it from any other.
    (pins := tmp_path / "policy.toml").write_text(f'bundle = "{bundle_hash(tmp_path)}"\n')
    monkeypatch.setenv(OWNER_POLICY_VARIABLE, str(pins))
    guard.check(fab)
    with pytest.raises(UserError, match=re.escape(guard.NOT_PINNED)):
        guard.check(fab + b" ")
    bundle = zipfile.ZipFile(io.BytesIO(fab))
    shipped = {path.relative_to(REPO).as_posix() for package in SHIPPED for path in (REPO / package).rglob("*.py")}
    assert set(bundle.namelist()) == shipped | {"LICENSE", "README.md", "pyproject.toml", ".info/CONTENT"}
    # The server app builds the report from the bundle, where there are no files but these.
    bundle.extractall(app := tmp_path / "app")
    code = f"""
import pathlib
from appa_flwr import report
from appa_flwr.config import Config
from appa_flwr.run.run_files import write_config
folder = pathlib.Path({str(tmp_path)!r}, "run")
folder.mkdir()
write_config(folder, Config())
print(report.__file__, report.build(folder))
"""
    env = {**os.environ, "PYTHONPATH": str(app)}
    built = subprocess.run([sys.executable, "-c", code], cwd=app, env=env, capture_output=True, text=True, check=False)
    assert built.stdout.split() == [str(app / "appa_flwr/report/__init__.py"), str(tmp_path / "run/report.html")], built
    assert "<h2>Configuration</h2>" in (tmp_path / "run/report.html").read_text()
