from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from real_surveys import GLOBALQA, needs_surveys
from report_runs import predictor_card, write_run
from rich.console import Console

from appa_flwr.config import Config
from appa_flwr.errors import UserError
from appa_flwr.files import lock
from appa_flwr.launch import cli, launcher, processes
from appa_flwr.run.files import read_config, write_config
from appa_flwr.run.resume import resumable
from appa_flwr.survey.generate import generate

REPO = Path(__file__).resolve().parents[4]

SURVEY_ROWS = [
    {
        "question_id": "q1",
        "question": "A?",
        "options": ["x", "y"],
        "group": group,
        "distribution": [0.25, 0.75],
    }
    for group in ("North", "South")
]


@pytest.fixture
def survey(tmp_path):
    path = tmp_path / "survey.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in SURVEY_ROWS))
    return path


def appa(monkeypatch, *arguments: str) -> int:
    """Run the command in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["appa", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("task=dqa", "task"),
        ("metric=borda", "metric"),
        ("rule=max", "rule"),
        ("lerning-rate=1", "ppo.learning-rate"),
        ("survey=nowhere/file.jsonl", "nowhere/file.jsonl"),
        ("groups=Avaria,Atlantis", "Atlantis"),
        ("preset=nobody", "nobody"),
        ("seed", "key=value"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_before_anything_starts(monkeypatch, capsys, tmp_path, override, part):
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert appa(monkeypatch, "run", "-c", override) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("appa: ")
    assert shown.err.count("\n") == 1
    assert part in shown.err
    assert list(tmp_path.iterdir()) == []


def test_unknown_group_of_a_survey_file_is_named_with_those_there_are(survey):
    config = Config.load({"survey": str(survey), "groups": "North,West"})
    with pytest.raises(UserError, match=r'"West".*North, South'):
        launcher.participants(config)


def test_participants_of_a_survey_file(survey):
    assert launcher.participants(Config.load({"survey": str(survey)})) == ("North", "South")
    chosen = Config.load({"survey": str(survey), "groups": "South", "federation.min-groups": 1})
    assert launcher.participants(chosen) == ("South",)


def test_a_bad_cell_is_shown_before_the_run_and_strict_refuses_it(survey, capsys):
    rows = survey.read_text().splitlines()
    bad = json.loads(rows[0]) | {"question_id": "spoilt", "distribution": [0.9, 0.9]}
    survey.write_text("\n".join([*rows, json.dumps(bad)]) + "\n")
    config = Config.load({"survey": str(survey)})
    rejections = launcher.left_out(config, ("North", "South"))
    assert [(cell.row, cell.question_id) for cell in rejections] == [(len(rows) + 1, "spoilt")]
    launcher._show_left_out(rejections * 7)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == launcher.SHOWN_REJECTIONS + 1
    assert f"row {len(rows) + 1}, {bad['group']}, spoilt" in lines[0]
    assert "7 cells" in lines[-1]
    with pytest.raises(UserError, match=f"row {len(rows) + 1}"):
        launcher.left_out(Config.load({"survey": str(survey), "data.strict": True}), ("North", "South"))


def test_too_few_groups_in_a_survey_file(survey):
    with pytest.raises(UserError, match="min-groups = 3"):
        launcher.participants(Config.load({"survey": str(survey), "federation.min-groups": 3}))


@pytest.mark.parametrize(("unseen", "says"), [("Nord", 'names "Nord", which is not in'), ("North;South", "all groups")])
def test_unseen_groups_are_some_of_the_participants(survey, unseen, says):
    config = Config.load({"survey": str(survey), "pluralllm.unseen-groups": unseen})
    with pytest.raises(UserError, match=says):
        launcher.participants(config)


def test_participants_of_the_generated_survey():
    config = Config.load({"data.num-groups": 3, "data.num-questions": 20})
    assert launcher.participants(config) == generate(num_questions=20, num_groups=3, seed=0).groups


@needs_surveys
def test_the_papers_countries_are_in_the_real_survey():
    config = Config.load({"survey": str(GLOBALQA), "groups": "Nigeria,Egypt,Germany"})
    assert launcher.participants(config) == ("Nigeria", "Egypt", "Germany")


def test_find_app_folder_looks_upwards_and_skips_other_projects(tmp_path):
    app = tmp_path / "clone"
    inner = app / "other"
    inner.mkdir(parents=True)
    (app / "pyproject.toml").write_text('[project]\nname = "appa-flwr"\n[tool.flwr.app]\npublisher = "p"\n')
    (inner / "pyproject.toml").write_text('[project]\nname = "another"\n[tool.flwr.app]\npublisher = "p"\n')
    assert launcher.find_app_folder(inner) == app


def test_find_app_folder_falls_back_to_the_checkout_of_the_installed_package(tmp_path):
    assert launcher.find_app_folder(tmp_path) == REPO


def test_find_app_folder_says_what_to_do_when_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher.appa_flwr, "__file__", str(tmp_path / "site" / "appa_flwr" / "__init__.py"))
    with pytest.raises(UserError, match="clone"):
        launcher.find_app_folder(tmp_path)


def test_flower_environment_is_private_and_keeps_the_users_choices(monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("NO_PROXY", "intranet")
    monkeypatch.setenv("FLWR_HOME", "/somewhere/else")
    made = launcher.flower_environment(tmp_path, 4321)
    assert made["FLWR_HOME"] == str(tmp_path)
    assert made["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"] == "4321"
    assert made["OMP_NUM_THREADS"] == "3"
    assert made["NO_PROXY"].split(",") == ["intranet", "127.0.0.1", "localhost"]
    assert made["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert os.environ["FLWR_HOME"] == "/somewhere/else"


def test_flower_environment_takes_one_thread_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launcher.flower_environment(tmp_path, 1)["OMP_NUM_THREADS"] == "1"


def test_ray_gets_a_private_folder_only_where_its_socket_paths_fit(tmp_path):
    assert launcher.flower_environment(Path("/tmp/appa-12345678"), 1)["RAY_TMPDIR"] == "/tmp/appa-12345678"
    assert "RAY_TMPDIR" not in launcher.flower_environment(Path("/x" * 40), 1)


def test_tail_gives_complete_lines_once(tmp_path):
    path = tmp_path / "log"
    tail = launcher.Tail(path)
    assert tail.text() == ""
    path.write_text("a\nb")
    assert tail.text() == "a\n"
    assert tail.text() == ""
    with path.open("a") as file:
        file.write("c\nd\n")
    assert tail.text() == "bc\nd\n"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (None, "[ppo 3/100] FI 0.97"),
        (0.2, "[ppo 3/100] FI 0.97 (0 s left)"),
        (59.6, "[ppo 3/100] FI 0.97 (1 min 00 s left)"),
        (185.0, "[ppo 3/100] FI 0.97 (3 min 05 s left)"),
        (-4.0, "[ppo 3/100] FI 0.97 (0 s left)"),
    ],
)
def test_progress_line(tmp_path, seconds, expected):
    record = {"phase": "ppo", "step": 3, "of": 100, "message": "FI 0.97", "seconds_left": seconds}
    path = tmp_path / "progress.jsonl"
    path.write_text(json.dumps(record) + "\n")
    assert [r.line for r in launcher.read_progress(launcher.Tail(path))] == [expected]


def test_a_run_folder_in_use_is_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "metrics.jsonl").touch()
    config = Config.load({"run.output-dir": str(tmp_path), "run-name": "mine"})
    with pytest.raises(UserError, match="run-name"):
        launcher.launch(config, app_folder=REPO)


@pytest.fixture
def stopped(tmp_path):
    """The folder of a run that was stopped."""
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    config = Config.load({"run.output-dir": "elsewhere", "run-name": "before-it-was-moved", "seed": 3})
    write_config(folder, config)
    line = json.dumps({"phase": "ppo", "step": 1, "of": 2, "message": "", "seconds_left": None})
    (folder / "progress.jsonl").write_text(line + "\n")
    return folder


def test_a_stopped_run_is_resumed_with_its_keys_where_it_lies(stopped, monkeypatch):
    monkeypatch.chdir(stopped)
    began = read_config(stopped)
    here = {"run.output-dir": str(stopped.parent), "run-name": "mine", "run.resume": True}
    for name in (stopped, Path()):
        assert resumable(name) == Config.load({**began.flat(), **here})


def finish(progress):
    progress.write_text(progress.read_text().replace('"ppo"', '"report"'))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "config.json").unlink(), "not a run folder, it has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json: input should be an object"),
        (lambda folder: (folder / "config.json").write_text("{}"), "another version of appa-flwr wrote this run"),
        (lambda folder: finish(folder / "progress.jsonl"), "the run is finished"),
    ],
)
def test_what_cannot_be_resumed_is_one_line(stopped, spoil, says, monkeypatch, capsys):
    monkeypatch.setattr(cli, "launch", None)
    spoil(stopped)
    assert appa(monkeypatch, "run", "--resume", str(stopped)) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("more", [["-c", "seed=4"], ["my.toml"]])
def test_a_resumed_run_takes_no_other_keys(stopped, more, monkeypatch, capsys):
    monkeypatch.setattr(cli, "launch", None)
    assert appa(monkeypatch, "run", "--resume", str(stopped), *more) == 2
    assert "it takes no FILE and no -c" in capsys.readouterr().err


def test_the_predictor_alone_shows_its_scores_and_where_its_weights_are(tmp_path, monkeypatch, capsys):
    asked = []

    def launch(config, **_):
        asked.append(config)
        scores = {"js": 0.9123, "js_distance": 0.7654, "wasserstein": 0.8, "cells": 17.0}
        card = predictor_card(
            rounds=[{"round": 1, "loss": 0.5, "validation": 0.25}],
            chosen=1,
            population=None,
            by_context={"unseen/held-out": {"4": {**scores, "js": 0.7171}}},
            scores={"unseen/held-out": {"uniform": scores, "pluralllm": {**scores, "js": 0.9876}}},
            groups={},
            calibration={"unseen/held-out": {"spread": 0.012, "rank_correlation": 0.34}},
        )
        write_run(config.run_folder, config={}, pluralllm=card)
        return config.run_folder

    monkeypatch.setattr(cli, "launch", launch)
    overrides = ["-c", f"run.output-dir={tmp_path}", "-c", "run-name=p", "-c", "run.phases=all"]
    assert appa(monkeypatch, "pluralllm", *overrides) == 0
    assert [config.run.phases for config in asked] == ["pluralllm"]
    said = capsys.readouterr().out
    rows = [line.replace("│", " ").split() for line in said.splitlines() if "0.765" in line]
    assert rows == [
        ["unseen", "/", "held-out", "PluralLLM", "0.988", "0.765", "0.800", "17"],
        ["Uniform", "answer", "0.912", "0.765", "0.800", "17"],
    ]
    assert "0.717" in said
    assert "Weights of round 1 of 1 were kept" in said
    assert "The mean of the other groups is not shown" in said
    assert "spread over context draws 0.012, its rank correlation with the error 0.34" in said
    assert f"pluralllm.checkpoint={tmp_path}/p/pluralllm.safetensors" in said


def test_a_run_that_is_still_written_is_not_resumed(stopped, monkeypatch):
    monkeypatch.setattr(launcher, "LOCK_SECONDS", 0.0)
    monkeypatch.setattr(launcher, "_flower_home", None)
    config = resumable(stopped)
    with lock(stopped / "run.log"), pytest.raises(UserError, match=f"^{stopped}: another run is writing here"):
        launcher.launch(config, app_folder=REPO)


def test_a_run_can_be_resumed_from_the_moment_its_folder_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "_flower_home", None)  # the launcher ends here
    config = Config.load({"run.output-dir": str(tmp_path), "run-name": "mine"})
    with pytest.raises(TypeError):
        launcher.launch(config, app_folder=REPO)
    assert resumable(tmp_path / "mine") == Config.load({**config.flat(), "run.resume": True})


def test_a_mistake_that_only_flower_s_log_tells_is_one_line(tmp_path):
    log = "Traceback (most recent call last):\n  ...\nappa_flwr.errors.UserError: x.pt: cannot be written (full)\nbye\n"
    (tmp_path / launcher.FLOWER_LOG).write_text(log)
    assert launcher._why(tmp_path, "finished:failed") == "x.pt: cannot be written (full)"


def test_an_output_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    config = Config.load({"run.output-dir": str(tmp_path / "file"), "run-name": "mine"})
    with pytest.raises(UserError, match=r"run\.output-dir"):
        launcher.launch(config, app_folder=REPO)


def test_end_processes_ends_detached_stubborn_grandchildren_and_nothing_else(tmp_path):
    # The leader has a session; its grandchild shows no environment, ignores SIGTERM and has lost its parent.
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    grandchild_code = f"{ignore}; print('up', flush=True); time.sleep(60)"
    child_code = f"""
import subprocess, sys
code = {grandchild_code!r}
child = subprocess.Popen([sys.executable, "-c", code], env={{}}, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
"""
    run_child = f"subprocess.run([sys.executable, '-c', {child_code!r}])"
    leader = f"import subprocess, sys, time; {run_child}; time.sleep(60)"
    ours = {**os.environ, "FLWR_HOME": str(tmp_path)}
    other = {**os.environ, "FLWR_HOME": str(tmp_path / "other")}
    with (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=other) as bystander,
        subprocess.Popen(
            [sys.executable, "-c", leader],
            env=ours,
            start_new_session=True,
            stdout=subprocess.PIPE,
            text=True,
        ) as started,
    ):
        assert started.stdout is not None
        grandchild = int(started.stdout.readline())
        while psutil.Process(grandchild).ppid() in {p.pid for p in psutil.Process(started.pid).children()}:
            time.sleep(0.05)
        found = {process.pid for process in processes.processes_of(tmp_path)}
        assert found == {started.pid, grandchild}
        processes.end_processes(tmp_path)
        assert processes.processes_of(tmp_path) == []
        bystander_lives = bystander.poll() is None
        bystander.terminate()
    assert bystander_lives
    assert _has_ended(grandchild)


def _has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_config_command_lists_every_key_and_its_toml_loads(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert appa(monkeypatch, "config", "-c", "preset=paper") == 0
    table = capsys.readouterr().out
    assert "gae-lambda" in table
    assert "google/gemma-2-2b-it" in table
    assert appa(monkeypatch, "config", "-c", "seed=9", "--toml") == 0
    (tmp_path / "full.toml").write_text(capsys.readouterr().out)
    assert appa(monkeypatch, "config", "full.toml", "--toml") == 0
    assert "seed = 9\n" in capsys.readouterr().out


def test_report_of_a_folder_that_is_not_there(monkeypatch, capsys, tmp_path):
    assert appa(monkeypatch, "report", str(tmp_path / "none")) == 2
    assert "does not exist" in capsys.readouterr().err


def test_bars_show_one_bar_a_phase_and_the_time_left_beside_the_one_that_runs():
    screen = io.StringIO()
    bars = launcher.Bars(Console(file=screen, force_terminal=True, width=120))
    with bars:
        bars.show(launcher.ProgressRecord("sft", 300, 300, "loss [1.25]", 90.0))
        bars.show(launcher.ProgressRecord("ppo", 7, 100, "FI 0.97", 61.0))
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).rstrip().splitlines()[-2:]
    assert last[0].split() == ["sft", "━" * 40, "300/300", "loss", "[1.25]"]
    assert last[1].startswith("ppo ")
    assert last[1].endswith("7/100 1 min 01 s left FI 0.97")
