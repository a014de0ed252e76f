"""What `appa survey` shows of a survey, and the files it writes."""

import numpy as np
from surveys import row, write

from appa_flwr.survey import store


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
