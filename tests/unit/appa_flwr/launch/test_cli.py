"""What commands print and write."""

import io
import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
from flwr.common.config import flatten_dict
from report_runs import predictor_card, progressed, write_run
from surveys import row, write

import appa_flwr
from appa_flwr.analysis.rules import RULES
from appa_flwr.config import SECTIONS, Config
from appa_flwr.launch import checks, deploy, flower
from appa_flwr.owner.ledger import Ledger, Release
from appa_flwr.owner.owner_policy import read_owner_policy
from appa_flwr.run.resume import resumable
from appa_flwr.run.schema import write_config
from appa_flwr.survey import noise, store
from appa_flwr.survey.generate import generate


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


def test_the_version_is_printed(appa):
    assert appa("--version") == f"appa-flwr {appa_flwr.__version__}\n"


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


def test_noise_says_how_many_answers_it_took_and_that_it_sets_groups_apart(monkeypatch, appa, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(noise, "draw", lambda counts, line: counts / noise.UNITS)
    people = [f"{group},{n % 2},{n % 3}" for n in range(300) for group in "AB"]
    people += [f"C,{n % 2},{n % 3 if n < 2 else ''}" for n in range(300)]  # nobody sees two people
    Path("f.csv").write_text("\n".join(["g,q,r", *people]))
    appa("survey", "f.csv", "data.group-by=g", "--write", "f.jsonl")
    (book := Path("f.codebook.toml")).write_text(re.sub(r"(, seen = true|\nguessed = .*)", "", book.read_text()))
    said = appa("survey", "f.csv", "--codebook", str(book), "--epsilon=4", "--write", "n.jsonl", "--diagnose")
    assert "1 of 6 answers are left out" in said
    assert "noise, too, sets groups apart" in said
    assert "sets groups apart" not in appa("survey", "f.jsonl", "--diagnose")


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


def test_the_command_shows_a_survey_and_writes_nothing_unless_asked_to(tmp_path, monkeypatch, appa):
    monkeypatch.chdir(tmp_path)
    options = ["Yes", "No", "Refused"]
    rows = [
        row("q1", "[red]Small[/red]", [0.5, 0.25, 0.25], options=options),
        row("q1", "Large", [0.5, 0.5, 0.0], options=options, n=50),
        row("q2", "Large", [0.5, 0.5, 0.0], options=options, n=70),
        row("q2", "[red]Small[/red]", [0.9, 0.9, 0.9], options=options),
    ]
    write(tmp_path / "mine.jsonl", rows)
    args = ["survey", "mine.jsonl", "data.refusals=drop"]
    said = appa(*args)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.jsonl"]
    lines = said.splitlines()
    (small,) = [line for line in lines if line.startswith("│ [red]Small")]
    (large,) = [line for line in lines if line.startswith("│ Large")]
    assert lines.index(large) < lines.index(small)
    assert "60" in large  # the median of 50 and 70
    assert lines[-1] == "2 questions, 2 groups"
    assert any("row 4 ([red]Small[/red], q2)" in line for line in lines)  # what was left out
    said = appa(*args, "--out", "split", "--write", "all.jsonl")
    split = tmp_path / "split"
    files = ["groups/large.jsonl", "groups/red-small-red.jsonl", "questions.jsonl"]
    assert sorted(path.relative_to(split).as_posix() for path in split.rglob("*.*")) == files
    assert said.splitlines()[-1] == "public, for the server: split/questions.jsonl"
    small = store.read(split / "groups" / "red-small-red.jsonl")
    np.testing.assert_allclose(small.answers["[red]Small[/red]"]["q1"], [2 / 3, 1 / 3])
    assert store.read(tmp_path / "all.jsonl").groups == ("[red]Small[/red]", "Large")
    args = ["survey", "mine.jsonl", "--out", "o", "groups=Large", "data.min-respondents=80"]
    assert "no usable answer" in appa(*args, code=2)
    assert not (tmp_path / "o").exists()


def test_an_audit_counts_replies_by_run_and_by_the_words_of_the_policy(appa, tmp_path):
    ledger = Ledger(tmp_path / "a.ledger.sqlite")
    for run, kind, numbers, refused in (
        ("7", "rewards", 10, ""),
        ("7", "rewards", 12, ""),
        ("7", "votes", 0, "no"),
        ("8", "rewards, truth", 5, ""),
    ):
        ledger.write(Release(0.0, run, kind, "A", numbers, "ab", refused))
    printed = appa("group", "audit", ledger.path)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines()]
    assert [row[:5] for row in rows if row[:1] in (["7"], ["8"])] == [
        ["7", "rewards", "2", "0", "22"],
        ["7", "votes", "0", "1", "0"],
        ["8", "rewards, truth", "1", "0", "5"],
    ]


def test_a_node_forgets_all_runs_and_never_its_ledger(appa, tmp_path):
    ledger = Ledger(tmp_path / "a.ledger.sqlite")
    ledger.write(Release(0.0, "7", "votes", "A", 1, "ab", ""))
    folder = tmp_path / "a.ledger.memory"
    folder.mkdir()
    for name in ("17.sqlite", "17.sqlite-journal", "18.sqlite"):
        (folder / name).write_text("answers")
    assert appa("group", "forget", ledger.path) == "forgotten: 17, 18\n"
    assert list(folder.iterdir()) == []
    assert ledger.path.exists()


def test_a_policy_as_it_is_printed_can_be_used(appa, tmp_path):
    written = store.write_split(generate(num_questions=20, num_groups=3, seed=4), tmp_path)
    policy = tmp_path / "policy.toml"
    policy.write_text(appa("group", "policy"))
    check = ["group", "check", next(iter(written.groups.values())), "--questions", written.questions]
    said = appa(*check, "--policy", policy)
    assert f"{policy}: can be used" in said
    (name,) = store.read(check[2]).groups
    answered = len(store.read(check[2]).answers[name])
    assert [cell.strip() for cell in said.splitlines()[3].split("│")][1:4] == [name, f"{answered}", f"{answered} of 20"]


def test_too_few_held_out_questions_are_said(tmp_path, appa, capsys):
    rng, file = np.random.default_rng(0), tmp_path / "x.csv"
    questions = {f"q{n}": rng.choice(["a", "b"], 60) for n in range(11)}
    pd.DataFrame({"g": ["N", "S"] * 30, "q": [*"abc"] * 20, **questions}).to_csv(file, index=False)
    said = appa("survey", file, "data.group-by=g", "--write", tmp_path / "x.jsonl", "--out", tmp_path / "out")
    assert "too few to score" in said
    checks.read_survey(Config.load({"survey": str(tmp_path / "x.jsonl")}))
    assert "too few to score" in capsys.readouterr().out
    group, public = tmp_path / "out" / "groups" / "n.jsonl", tmp_path / "out" / "questions.jsonl"
    assert "too few to score" in appa("group", "check", group, "--questions", public)
