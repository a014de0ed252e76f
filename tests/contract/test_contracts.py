"""Contracts of the whole code: the defaults that stand twice, what Flower ships, and what a wheel does."""

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
from appa_flwr.config.sources import preset
from appa_flwr.core.errors import UserError
from appa_flwr.launch.bundle import bundle_hash
from appa_flwr.owner import guard
from appa_flwr.owner.owner_policy import OWNER_POLICY_VARIABLE

REPO = Path(__file__).resolve().parents[2]
SHIPPED = ("appa_flwr", "pluralllm", "server_app", "client_app")


def pyproject() -> dict:
    return tomllib.loads((REPO / "pyproject.toml").read_text())


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
    shipped |= {f"appa_flwr/survey/{name}.toml" for name in ("columns", "nonanswers", "questionnaire")}
    shipped |= {"LICENSE", "README.md", "pyproject.toml"}
    assert set(bundle.namelist()) == shipped | {".info/CONTENT"}


def test_make_real_takes_the_paper_s_countries_for_its_survey():
    for survey, groups in (("globalqa.jsonl", preset("paper")["groups"]), ("mine.jsonl", "")):
        command = ["make", "--dry-run", "real", f"SURVEY={survey}", f"VENV={sys.prefix}"]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
        assert f'survey="{survey}" groups="{groups}"' in done.stdout
        assert "Error" not in done.stderr


def test_the_site_has_every_page():
    pages = re.findall(r"\w+\.md", (REPO / "mkdocs.yml").read_text())
    assert sorted(pages) == sorted(path.name for path in (REPO / "docs").glob("*.md"))


def test_the_installed_command_refuses_a_wrong_key_on_one_line():
    command = [Path(sys.executable).with_name("appa"), "run", "no.such=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "no.such" in done.stderr


# --- a wheel sends Flower the app of its checkout, from any folder ---

FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
HASH = "from appa_flwr.launch.bundle import APP_FOLDER, bundle_hash; print(APP_FOLDER, bundle_hash())"


def test_an_installed_wheel_has_the_bundle_of_its_checkout(tmp_path):
    # a copy, since a build leaves files in the checkout and would take those of earlier builds
    for name in (*SHIPPED, "experiments"):
        shutil.copytree(REPO / name, tmp_path / "clone" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(REPO / name, tmp_path / "clone")
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", "./clone"]
    subprocess.run([sys.executable, *command], cwd=tmp_path, check=True)
    (wheel,) = (tmp_path / "dist").iterdir()
    installed = tmp_path / "packages"
    zipfile.ZipFile(wheel).extractall(installed)
    assert not (installed / "experiments").exists()  # for a checkout: a wheel's top level is the app
    (here := tmp_path / "empty").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", HASH], cwd=here, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(installed), bundle_hash(REPO)]
