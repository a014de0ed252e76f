"""Every option of every command changes what it prints, writes or calls: one row of tests/cases/options.toml each."""

import re
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import report_runs
import typer
from small import CASES, cases
from wires import content

from appa_flwr import public, report
from appa_flwr.config import Config
from appa_flwr.launch import cli, deploy, evaluate, flower, group
from appa_flwr.owner.ledger import MEMORY_SUFFIX, Ledger, Release
from appa_flwr.report import frames
from appa_flwr.run.schema import write_config

TABLE = cases("options")
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
    assert {command: {row.partition(":")[0] for row in rows} for command, rows in TABLE.items()} == options


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Files that commands read, in a folder of their own."""
    folder = tmp_path_factory.mktemp("inputs") / "files"
    shutil.copytree(CASES / "commands", folder)
    for name, keys in {"half": {}, "served": {"run.phases": "serve"}}.items():
        (folder / name).mkdir()
        write_config(folder / name, Config.load({"run-name": name, **keys}))
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
