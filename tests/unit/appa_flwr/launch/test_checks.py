import math
import os
import sys
from hashlib import sha256

import pytest
from small import config_in
from surveys import refused, row
from surveys import write as write_survey

from appa_flwr.analysis import rule_choice
from appa_flwr.analysis.rule_choice import check_rules
from appa_flwr.analysis.rules import Mix
from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import lock
from appa_flwr.launch import checks
from appa_flwr.run.resume import claim, resumable, rule_values
from appa_flwr.run.schema import ERROR_FILE, RULE_VALUES, SURVEY_FILE, write
from appa_flwr.survey import store


@pytest.fixture
def survey(tmp_path):
    return write_survey(
        tmp_path / "survey.jsonl", [row(q, group) for q in ("q1", "q2") for group in ("North", "South")]
    )


def test_a_resumed_run_takes_the_survey_that_it_has_kept_unless_the_source_has_changed(survey, tmp_path):
    keys = {"survey": str(survey), "run.output-dir": str(tmp_path), "run-name": "mine", "run.min-groups": 1}
    begun, config = Config.load(keys), Config.load({**keys, "run.resume": True})
    (tmp_path / "mine").mkdir()
    store.write(checks.read_survey(begun), tmp_path / "mine" / SURVEY_FILE, groups=["South"])
    assert checks.read_survey(config).groups == ("South",)
    source = survey.rename(tmp_path / "elsewhere.jsonl")
    assert checks.read_survey(config).groups == ("South",)
    write_survey(survey, [row(q, group) for q in ("q1", "q2") for group in ("North", "South", "West")])
    hashes = [sha256(file.read_bytes()).hexdigest()[:12] for file in (survey, source)]
    refused(".*".join(hashes), checks.read_survey, config)
    assert len(checks.read_survey(begun).groups) == 3


def test_a_resumed_run_keeps_the_text_and_the_values_of_a_rule_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(rule_choice.CODE_FOLDER, str(tmp_path))
    text = "from appa_flwr.analysis.rules import Mix\nhalf = Mix(worst_share=0.5)\n"
    (tmp_path / "kept_rules.py").write_text(text)
    keys = {"rule": "kept_rules:half", "data.num-questions": 20, "run.output-dir": str(tmp_path), "run-name": "mine"}
    begun, config = Config.load(keys), Config.load({**keys, "run.resume": True})
    claim(begun).release()
    checks.read_survey(config)  # stopped before its server began
    values = rule_values(begun, check_rules(begun))
    write(tmp_path / "mine" / RULE_VALUES.name, values)
    assert values["kept_rules:half"].parameters == {"ema_decay": "0.8", "worst_share": "0.5"}
    assert (values["kept_rules:half"].text, values["average"].text) == (sha256(text.encode()).hexdigest(), "")
    checks.read_survey(config)
    (tmp_path / "kept_rules.py").write_text(text + "\n")
    refused('rule "kept_rules:half": ', checks.read_survey, config)
    checks.read_survey(begun)  # a new run may
    (tmp_path / "kept_rules.py").write_text(text)
    monkeypatch.setattr(sys.modules["kept_rules"], "half", Mix(worst_share=0.4))
    refused('rule "kept_rules:half": ', checks.read_survey, config)


def test_a_cache_that_cannot_be_written_is_said_before_the_run(monkeypatch, tmp_path):
    (tmp_path / "home").touch()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(UserError, match=r"the cache cannot be written .*home.*XDG_CACHE_HOME"):
        checks.check_server(Config.load({}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checks.check_server(Config.load({}))
    assert (tmp_path / "cache" / "appa-flwr").is_dir()


def test_a_run_folder_belongs_to_one_run_which_can_be_resumed_from_then_on(tmp_path):
    keys = {"run.output-dir": str(tmp_path), "run-name": "mine", "rule": "alpha", "appa.alpha": -math.inf}
    config = Config.load(keys)
    claim(config).release()
    folder = config.run_folder
    resumed = resumable(folder)
    assert resumed == Config.load({**config.flat(), "run.resume": True})
    before = (folder / "config.json").read_bytes()
    with pytest.raises(UserError, match=f'^run-name = "mine".*--resume {folder}$'):
        claim(Config.load({**config.flat(), "seed": 1}))
    assert (folder / "config.json").read_bytes() == before
    with pytest.raises(UserError, match=r"^seed = 1, but .* began with 0"):
        claim(Config.load({**resumed.flat(), "seed": 1}))
    for name in (ERROR_FILE, "superlink.log"):
        (folder / name).write_text("why it ended")
    held = lock(folder / "run.log")
    with pytest.raises(UserError, match=f"^{folder}: another run is writing here"):
        claim(resumed)
    held.release()
    claim(resumed).release()
    assert [path.name for path in folder.iterdir() if path.name != ".run.log.lock"] == ["config.json"]


def test_of_two_launchers_of_one_name_the_second_is_refused_before_a_server_begins(tmp_path):
    config = config_in(tmp_path)
    config.run_folder.mkdir()
    (log := config.run_folder / "flower.log").write_text("timed out during startup, when it began first")
    held = claim(config, launcher=True)
    assert not log.exists()
    with pytest.raises(UserError, match=rf"another run is writing here \(process {os.getpid()}\)"):
        claim(config, launcher=True)
    claim(config).release()  # by the first one's server
    held.release()
