from __future__ import annotations

import json
import subprocess
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from small import CHOSEN
from surveys import refused, row, write

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import lock
from appa_flwr.launch import checks
from appa_flwr.launch.endings import USER_ERROR, RunFailed
from appa_flwr.run.resume import resumable
from appa_flwr.run.run_files import ERROR_FILE, SURVEY_FILE
from appa_flwr.survey import store
from appa_flwr.survey.generate import generate

REPO = Path(__file__).resolve().parents[4]


@pytest.fixture
def survey(tmp_path):
    return write(tmp_path / "survey.jsonl", [row("q1", group) for group in ("North", "South")])


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"groups": "North,West"}, r"unknown group 'West'.*North, South"),
        ({"run.min-groups": 3}, r"run\.min-groups = 3 must be at most .* 2"),
        ({"pluralllm.unseen-groups": "Nord"}, r'unseen-groups names "Nord", which is not in .*North, South'),
        ({"pluralllm.unseen-groups": "North;South"}, "names all groups"),
    ],
)
def test_keys_that_do_not_fit_the_groups_of_a_survey_file_are_refused(survey, keys, says):
    with pytest.raises(UserError, match=says):
        checks.read_survey(Config.load({"survey": str(survey), **keys}))


def test_the_groups_of_a_run_are_those_of_the_survey_or_those_asked_for(survey):
    assert checks.read_survey(Config.load({"survey": str(survey)})).groups == ("North", "South")
    chosen = Config.load({"survey": str(survey), "groups": "South", "run.min-groups": 1})
    assert checks.read_survey(chosen).groups == ("South",)


def test_a_generated_survey_has_the_groups_that_are_asked_for_and_their_answers():
    config = Config.load({"data.num-groups": 3, "data.num-questions": 20})
    every = checks.read_survey(config)
    assert every.groups == generate(num_questions=20, num_groups=3, seed=0).groups
    last, _, first = reversed(every.groups)
    chosen = checks.read_survey(Config.load({**config.flat(), "groups": f"{last},{first}"}))
    assert chosen.groups == (last, first)
    assert chosen.answers[last].keys() == every.answers[last].keys()
    assert chosen.questions == every.questions  # the split does not depend on who takes part


def test_the_tiny_policy_on_a_real_survey_is_said_to_be_for_trying(capsys, survey):
    for keys, count in (({}, 0), ({"survey": str(survey)}, 1), ({"survey": str(survey), "run.phases": "pluralllm"}, 0)):
        checks.check_server(Config.load(keys), REPO)
        assert capsys.readouterr().err.count("preset=smollm2") == count


def test_a_resumed_run_takes_the_survey_that_it_has_kept_unless_the_source_has_changed(survey, tmp_path):
    keys = {"survey": str(survey), "run.output-dir": str(tmp_path), "run-name": "mine", "run.min-groups": 1}
    begun, config = Config.load(keys), Config.load({**keys, "run.resume": True})
    (tmp_path / "mine").mkdir()
    store.write(checks.read_survey(begun), tmp_path / "mine" / SURVEY_FILE, groups=["South"])
    assert checks.read_survey(config).groups == ("South",)
    source = survey.rename(tmp_path / "elsewhere.jsonl")
    assert checks.read_survey(config).groups == ("South",)
    write(survey, [row("q1", group) for group in ("North", "South", "West")])
    hashes = [sha256(file.read_bytes()).hexdigest()[:12] for file in (survey, source)]
    refused(".*".join(hashes), checks.read_survey, config)
    assert len(checks.read_survey(begun).groups) == 3


def test_a_machine_that_is_short_of_something_is_said_in_a_line_each(monkeypatch, tmp_path):
    config = Config.load({"run.output-dir": str(tmp_path / "not" / "there")})
    memory, disk, load = [checks.GIBIBYTE * 9], [checks.GIBIBYTE * 9], [1.9]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=memory[0]))
    monkeypatch.setattr(psutil, "getloadavg", lambda: (load[0], 9.0, 9.0))
    monkeypatch.setattr(
        checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=disk[0] if path == tmp_path else 0)
    )
    monkeypatch.setattr(checks.os, "cpu_count", lambda: 2)
    assert list(checks.machine_warnings(config)) == []
    memory[0], disk[0], load[0] = checks.GIBIBYTE * 3 // 2, checks.GIBIBYTE // 2, 2.1
    assert [line.partition(" a run")[0].partition(", and")[0] for line in checks.machine_warnings(config)] == [
        "1.5 GiB of memory are free",
        f"0.5 GiB of disk are free in {tmp_path}/not/there; a full one ends",
        "this machine is busy (load 2.1 on 2 cores):",
    ]
    memory[0], disk[0], load[0] = checks.GIBIBYTE * 5, checks.GIBIBYTE * 9, 0.0
    assert list(checks.machine_warnings(config)) == []
    (line,) = checks.machine_warnings(Config.load({**config.flat(), **CHOSEN, "model": "smollm2"}))
    assert line.startswith("5.0 GiB of memory are free, and a run of model smollm2 takes")


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [(0, None, ""), (USER_ERROR, UserError, "no such model"), (1, RunFailed, f"the server's code in {REPO} cannot be")],
)
def test_what_the_server_s_code_finds_wrong_is_said_before_the_run(code, error, text, monkeypatch):
    asked = []

    def run(command, **given):
        asked.append((command[1:], json.loads(given["input"])["model"]))
        return subprocess.CompletedProcess(command, code, stdout="no such model\n")

    monkeypatch.setattr(checks.subprocess, "run", run)
    with nullcontext() if error is None else pytest.raises(error, match=f"^{text}"):
        checks.check_server(Config.load({**CHOSEN, "model": "a/model"}), REPO)
    assert asked == [(["-m", "server_app.preflight"], "a/model")]
    checks.check_server(Config.load({}), REPO)
    assert len(asked) == 1  # the tiny one is built by the run


def test_a_cache_that_cannot_be_written_is_said_before_the_run(monkeypatch, tmp_path):
    (tmp_path / "home").touch()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(UserError, match=r"the cache cannot be written .*home.*XDG_CACHE_HOME"):
        checks.check_server(Config.load({}), REPO)


def test_find_app_folder_looks_upwards_skips_other_projects_and_falls_back_to_the_installed_package(
    tmp_path, monkeypatch
):
    assert checks.find_app_folder(tmp_path) == REPO
    monkeypatch.setattr(checks.appa_flwr, "__file__", str(tmp_path / "site" / "appa_flwr" / "__init__.py"))
    with pytest.raises(UserError, match="clone"):
        checks.find_app_folder(tmp_path)
    (inner := tmp_path / "other").mkdir()
    for folder, name in ((tmp_path, "appa-flwr"), (inner, "another")):
        (folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n[tool.flwr.app]\npublisher = "p"\n')
    assert checks.find_app_folder(inner) == tmp_path


@pytest.fixture
def config(tmp_path):
    return Config.load({"run.output-dir": str(tmp_path), "run-name": "mine"})


def test_a_run_folder_belongs_to_one_run_which_can_be_resumed_from_then_on(config):
    folder = checks.claim_run_folder(config)
    resumed = resumable(folder)
    assert resumed == Config.load({**config.flat(), "run.resume": True})
    before = (folder / "config.json").read_bytes()
    with pytest.raises(UserError, match=f'^run-name = "mine".*--resume {folder}$'):
        checks.claim_run_folder(Config.load({**config.flat(), "seed": 1}))
    assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [("config.json", before)]
    for name in (ERROR_FILE, "superlink.log"):
        (folder / name).write_text("why it ended")
    held = lock(folder / "run.log")
    with pytest.raises(UserError, match=f"^{folder}: another run is writing here"):
        checks.claim_run_folder(resumed)
    held.release()
    assert checks.claim_run_folder(resumed) == folder
    assert [path.name for path in folder.iterdir() if path.name != ".run.log.lock"] == ["config.json"]


@pytest.mark.parametrize("log", [ERROR_FILE, "superlink.log"])
def test_a_run_that_failed_at_once_leaves_its_name_and_one_that_had_begun_does_not(log, config, tmp_path):
    folder = checks.claim_run_folder(config)
    for name in (log, "run.log", "progress.jsonl", "flower.log"):
        (folder / name).write_text("x")
    (folder / "pluralllm.safetensors").write_text("weights")
    with pytest.raises(UserError, match="holds a run already"):
        checks.claim_run_folder(config)
    (folder / "pluralllm.safetensors").unlink()
    (folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="holds a run already"):
        checks.claim_run_folder(config)
    (folder / "metrics.jsonl").write_text("")  # as a server leaves it that Ray gave no group
    held = lock(folder / "run.log")  # somebody has resumed it
    with pytest.raises(UserError, match="another run is writing here"):
        checks.claim_run_folder(config)
    held.release()
    (folder / "config.json").rename(tmp_path / "kept")
    with pytest.raises(UserError, match="holds a run already"):  # logs of something else
        checks.claim_run_folder(config)
    (tmp_path / "kept").rename(folder / "config.json")
    assert checks.claim_run_folder(config) == folder
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_an_output_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^run\.output-dir"):
        checks.claim_run_folder(Config.load({"run.output-dir": str(tmp_path / "file"), "run-name": "mine"}))
