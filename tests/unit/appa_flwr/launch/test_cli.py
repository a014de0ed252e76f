import io
import sys
import tomllib
from pathlib import Path

from flwr.common.config import flatten_dict
from report_runs import predictor_card, progressed, write_run
from surveys import row, write

from appa_flwr.analysis.rules import RULES
from appa_flwr.config import SECTIONS, Config
from appa_flwr.launch import deploy, flower
from appa_flwr.owner.owner_policy import read_owner_policy
from appa_flwr.run.resume import resumable
from appa_flwr.run.run_files import write_config


def test_a_stopped_run_is_resumed_with_its_keys_where_it_lies_until_it_is_finished(tmp_path, monkeypatch, appa):
    launched = []
    monkeypatch.setattr(flower, "launch", lambda config, **_: launched.append(config) or config.run_folder)
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    write_config(folder, Config.load({"run.output-dir": "elsewhere", "run-name": "before-it-was-moved", "seed": 3}))
    progressed(folder, "ppo")
    monkeypatch.chdir(folder)
    here = {"run.output-dir": str(folder.parent), "run-name": "mine", "run.resume": True}
    for name in (folder, Path()):
        assert resumable(name) == Config.load({"seed": 3, **here})
    appa("run", "--resume", folder, "run.reply-timeout=9")
    assert launched == [Config.load({"seed": 3, "run.reply-timeout": 9.0, **here})]
    progressed(folder, "report")
    assert "the run is finished" in appa("run", "--resume", folder, code=2)


def test_the_predictor_alone_shows_its_scores_and_where_its_weights_are(tmp_path, monkeypatch, appa):
    def launch(config, **_):
        assert config.run.phases == "pluralllm"
        return write_run(config.run_folder, config={}, pluralllm=predictor_card())

    monkeypatch.setattr(flower, "launch", launch)
    said = appa("pluralllm", f"run.output-dir={tmp_path}", "run-name=p", "run.phases=all")
    assert "0.930" in said
    assert f"pluralllm.checkpoint={tmp_path}/p/pluralllm.safetensors" in said


def test_config_shows_every_key_with_what_it_does_as_a_file_that_loads_and_goes_into_pyproject(
    monkeypatch, appa, tmp_path
):
    monkeypatch.chdir(tmp_path)
    text = appa("config", "seed=9", "ppo.kl-coefficient=0.125")
    for line in (
        "ppo.kl-coefficient = 0.125  # weight of the KL penalty to the SFT policy (PPO table) (number)",
        f"# {SECTIONS['run'].__doc__}",
        "# set SECTION.KEY=VALUE, or preset=NAME: deployed, paper, paper-oqa, smollm2",
    ):
        assert line in text.splitlines()
    (tmp_path / "full.toml").write_text(text)
    assert appa("config", "full.toml") == text
    pasted = tomllib.loads(f"[tool.flwr.app.config]\n{text}")["tool"]["flwr"]["app"]["config"]
    assert flatten_dict(pasted) == Config.load({"seed": 9, "ppo.kl-coefficient": 0.125}).flat()


def test_diagnose_shows_every_rule_and_the_best_shared_answers(appa):
    keys = ["data.num-questions=30", "data.num-groups=3", "appa.fairness-threshold=0.5"]
    shown = appa("survey", "generated", "--diagnose", *keys)
    for rule in (*(name for name in RULES if name != "alpha"), "ceiling-average", "ceiling-min"):
        assert f"│ {rule} " in shown
    (appa_row,) = [line for line in shown.splitlines() if line.startswith("│ appa ")]
    assert appa_row.split("│")[-2].strip() == "1.000"  # of the iterations take the plain mean
    assert shown.splitlines()[-1].startswith("rules can")


def test_a_deployment_says_what_is_left_out_and_what_the_owners_policies_pin(monkeypatch, appa, tmp_path):
    rows = [row(f"q{number}", group) for group in ("North", "South") for number in (1, 2)]
    survey = write(tmp_path / "survey.jsonl", [*rows, row("q1", "A;B")])
    folder, own = tmp_path / "parties", "ab" * 32
    arguments = ["deploy", str(folder), f"survey={survey}", "run.output-dir=/else", "seed=3"]
    monkeypatch.setattr(deploy, "bundle_hash", lambda: own)
    first = appa(*arguments)
    assert "with a semicolon, which stands between the names of several: row 5 (q1)" in first
    assert own in first
    assert {path.name for path in (folder / "groups").iterdir()} == {"north", "south"}
    assert read_owner_policy(folder / "groups" / "north" / "policy.toml").bundle == own
    keys = tomllib.loads((folder / "server" / "keys.toml").read_text())
    assert (keys["seed"], keys["survey"], "output-dir" in keys["run"]) == (3, "questions.jsonl", False)


def test_letters_that_stdout_lacks_are_escaped(monkeypatch, appa, tmp_path):
    monkeypatch.chdir(tmp_path)
    survey = write(tmp_path / "survey.jsonl", [row("q1", group) for group in ("México", "Perú")])
    monkeypatch.setattr(sys, "stdout", stdout := io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    appa("survey", survey)
    stdout.flush()
    assert rb"M\xe9xico" in stdout.buffer.getvalue()
