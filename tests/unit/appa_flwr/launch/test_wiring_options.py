"""Every option of every command changes what it prints, writes or calls: one row of tests/cases/options.toml each."""

import json
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import report_runs
import typer
from surveys import row, write
from wires import content

from appa_flwr import public, report
from appa_flwr.config import Config
from appa_flwr.launch import cli, deploy, evaluate, flower, group
from appa_flwr.owner.ledger import MEMORY_SUFFIX, Ledger, Release
from appa_flwr.report import frames
from appa_flwr.run.run_files import write_config
from appa_flwr.survey import codebook as codebooks
from appa_flwr.survey.noise import Promise
from appa_flwr.survey.sources import convert

TABLE = tomllib.loads((Path(__file__).parents[3] / "cases" / "options.toml").read_text())
ROWS = [(command, option) for command, options in TABLE.items() for option in options]


def commands(of, name=""):
    """Every command, with the names of its options and arguments."""
    for own, command in getattr(of, "commands", {"": of}).items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name}{own} ")
        else:
            names = (p.opts[0] if p.param_type_name == "option" else p.name for p in command.params)
            yield name + own, {*names} - {"--help"}


def test_every_option_has_a_row():
    options = {name: options for name, options in commands(typer.main.get_command(cli.app)) if options}
    assert {command: {*rows} for command, rows in TABLE.items()} == options


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Files that commands read, in a folder of their own."""
    folder = tmp_path_factory.mktemp("inputs")
    shares = [row(f"q{n}", g, (0.05 * n, 0.6, 0.4 - 0.05 * n)) for n in range(8) for g in ("North", "South")]
    write(folder / "two.jsonl", shares)
    write(folder / "one.jsonl", shares[:6])
    people = [{"G": "NS"[n % 2], "W": 0.5 + n % 3 / 4, "Q1": n % 3 + 1, "Q2": n % 2 + 1} for n in range(40)]
    pd.DataFrame(people).to_csv(folder / "people.csv", index=False)
    made = convert(folder / "people.csv", group_by="G", weight="W", missing="3")
    codebooks.write(made.codebook, draft := folder / "draft.toml")
    for name in ("edited.toml", "released.toml"):  # an owner has confirmed every guess
        (folder / name).write_text(re.sub(r", (seen|guessed) = [^,}]+", "", draft.read_text()))
    convert(folder / "people.csv", codebook=folder / "released.toml", promise=Promise(2.0, cap=1.0))
    asked = {"question_id": "Q1", "question": "Q1", "options": ["1", "2", "3"]}
    (folder / "asked.jsonl").write_text(json.dumps(asked) + "\n")
    for name, keys in {"half": {}, "served": {"run.phases": "serve"}}.items():
        (folder / name).mkdir()
        write_config(folder / name, Config.load({"run-name": name, **keys}))
    (folder / "policy.toml").touch()
    for name, run in ("a", "7"), ("b", "8"):
        ledger = Ledger(folder / f"{name}.sqlite")
        ledger.write(Release(0.0, run, "votes", "A", 1, "ab", ""))
        memory = ledger.path.with_suffix(MEMORY_SUFFIX)
        memory.mkdir()
        (memory / f"{run}.sqlite").touch()
    return folder


@pytest.fixture
def shown(inputs, tmp_path, monkeypatch, capsys):
    """What a command in a copy of these files says, leaves in each file, and calls in place of the programs."""
    called = {}

    def record(module, name, result):
        def call(*given, **keys):
            called[name] = re.sub(" at 0x[0-9a-f]+", "", str((given, keys)))
            return result(*given, **keys)

        monkeypatch.setattr(module, name, call)

    scored = report_runs.read(inputs / "half", summary=report_runs.summary())
    result = {"intervals": frames.of_run(scored).to_dict("records"), "rows": scored.summary.to_dict("records")}
    answered = SimpleNamespace(text="A", prediction=None)
    policy = SimpleNamespace(ask=lambda *given: called.update(ask=str(given)) or answered)
    opened = SimpleNamespace(config=scored.config, policy=lambda: policy)
    record(flower, "launch", lambda config: Path("half"))
    record(evaluate, "evaluate", lambda *_, **__: result)
    record(deploy, "deploy_local", lambda *_: Path("half"))
    record(report, "build", lambda folder: folder)
    record(public, "load_run", lambda _: opened)
    for name in ("APPA_URL", "APPA_TOKEN"):
        monkeypatch.setenv(name, "http://there")
    monkeypatch.setattr(deploy, "bundle_hash", lambda: "ab" * 32)
    monkeypatch.setattr(group, "bundle_hash", str)

    def run(words, here="here"):
        called.clear()
        shutil.copytree(inputs, folder := tmp_path / here)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["appa", *shlex.split(words)])
        with pytest.raises(SystemExit):
            cli.main()
        printed = capsys.readouterr()
        files = {str(path.relative_to(folder)): content(path) for path in folder.rglob("*") if path.is_file()}
        shutil.rmtree(folder)
        return {"said": printed.out + printed.err} | called | files

    return run


@pytest.mark.parametrize(("command", "option"), ROWS, ids=[" ".join(row) for row in ROWS])
def test_an_option_changes_what_its_row_says(shown, command, option):
    both, without, given, seen = TABLE[command][option]
    before, after = shown(f"{both} {without}"), shown(f"{both} {given}")
    same = [name for name in seen if before.get(name.lstrip("+")) == after.get(name.lstrip("+"))]
    assert not same, f"{option} changes nothing in {same}: {before['said']} {after['said']}"
    assert {name[1:] for name in seen if name.startswith("+")} <= {*after}, after["said"]
