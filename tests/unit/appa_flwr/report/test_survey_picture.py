"""What `appa survey` shows: the figures behind the picture, the picture's limits, the tables and the files."""

from __future__ import annotations

import struct

import matplotlib as mpl
import numpy as np
import pytest
from surveys import row, write
from typer.testing import CliRunner

from appa_flwr.launch import cli
from appa_flwr.report import style
from appa_flwr.report import survey_picture as picture
from appa_flwr.survey import store
from appa_flwr.survey.types import Question, Survey


def survey(num_groups, num_questions=12, *, name="Group {} of $ everyone $ in a land with a very long name"):
    rng = np.random.default_rng(3)
    questions = tuple(
        Question(f"q{q}", f"Does it cost ${q}, or {q}$?" * (1 + q % 3), ("a", "b")) for q in range(num_questions)
    )
    answers = {
        name.format(g): {q.question_id: rng.dirichlet([1, 1]) for q in questions[: 1 + g % num_questions]}
        for g in range(num_groups)
    }
    return Survey(questions, answers)


def test_divergence_from_the_mean_against_hand_worked_numbers():
    questions = tuple(Question(key, f"{key}?", ("a", "b")) for key in ("opposed", "agreed", "alone", "leaning"))
    one, two, half = np.array([1.0, 0.0]), np.array([0.0, 1.0]), np.array([0.5, 0.5])
    answers = {
        "A": {"opposed": one, "agreed": half, "alone": one, "leaning": one},
        "B": {"opposed": two, "agreed": half, "leaning": half},
    }
    found = picture.divergence_from_mean(Survey(questions, answers))
    # Opposed: mean (1/2, 1/2); a point mass lies H(3/4) - H(1/2) / 2 = 0.8112781 - 0.5 bits from it.
    # Leaning: mean (3/4, 1/4); A: H(7/8) - H(3/4) / 2 = 0.5435644 - 0.4056391, B: H(5/8) - (1 + H(3/4)) / 2.
    assert found.tolist() == pytest.approx([0.3112781, 0.0, (0.1379253 + 0.9544340 - 0.9056391) / 2], abs=1e-6)


def test_the_picture_stays_readable_in_size_however_many_groups(tmp_path):
    data = picture.draw(survey(200), tmp_path / "new" / "survey.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert 700 < width < 4000
    assert 300 < height < 2600
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["survey.png"]


def test_a_dollar_sign_is_no_formula_and_shows_without_a_backslash():
    given = survey(2)
    with mpl.rc_context(style.STYLE):
        figure = picture._picture.__wrapped__(given, picture.divergence_from_mean(given))
        labels = [label for axes in figure.axes for label in axes.get_yticklabels()]
    names = [label.get_text() for label in labels]
    assert "Group 1 of $…ery long name" in names
    assert not any("\\" in name for name in names)
    assert not any(label.get_parse_math() for label in labels)


@pytest.mark.filterwarnings("error")
def test_a_script_that_the_font_lacks_is_no_warning(tmp_path):
    picture.draw(survey(1, name="日本 {}"), tmp_path / "survey.png")


def test_the_command_shows_a_survey_and_writes_nothing_unless_asked_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    options = ["Yes", "No", "Refused"]
    rows = [
        row("q1", "[red]Small[/red]", [0.5, 0.25, 0.25], options=options),
        row("q1", "Large", [0.5, 0.5, 0.0], options=options, n=50),
        row("q2", "Large", [0.5, 0.5, 0.0], options=options, n=70),
        row("q2", "[red]Small[/red]", [0.9, 0.9, 0.9], options=options),
    ]
    write(tmp_path / "mine.jsonl", rows)
    args = ["survey", "mine.jsonl", "data.refusals=drop"]
    result = CliRunner().invoke(cli.app, args)
    assert result.exit_code == 0, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["mine.jsonl"]
    lines = result.output.splitlines()
    (small,) = [line for line in lines if line.startswith("│ [red]Small")]
    (large,) = [line for line in lines if line.startswith("│ Large")]
    assert lines.index(large) < lines.index(small)
    assert "60" in large  # the median of 50 and 70
    assert lines[-1] == "2 questions, 2 groups"
    assert any("row 4 ([red]Small[/red], q2)" in line for line in lines)  # what was left out
    result = CliRunner().invoke(cli.app, [*args, "--out", "split", "--write", "all.jsonl"])
    split = tmp_path / "split"
    files = ["groups/large.jsonl", "groups/red-small-red.jsonl", "questions.jsonl", "survey.png"]
    assert sorted(path.relative_to(split).as_posix() for path in split.rglob("*.*")) == files
    assert result.output.splitlines()[-1] == "picture of all groups: split/survey.png"
    small = store.read(split / "groups" / "red-small-red.jsonl")
    assert small.answers["[red]Small[/red]"]["q1"].tolist() == pytest.approx([2 / 3, 1 / 3])
    assert store.read(tmp_path / "all.jsonl").groups == ("[red]Small[/red]", "Large")
    args = ["survey", "mine.jsonl", "--out", "o", "groups=Large", "data.min-respondents=80"]
    assert "no usable answer" in str(CliRunner().invoke(cli.app, args).exception)
    assert not (tmp_path / "o").exists()
