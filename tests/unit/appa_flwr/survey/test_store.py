"""Our own format, which nodes read and no other; and the survey that a run keeps."""

import json
import stat
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import cases
from surveys import ids, refused, row, shares, write

from appa_flwr.config import Config
from appa_flwr.core.text import clean
from appa_flwr.survey import generate, sources, store
from appa_flwr.survey.frames import Frame, RawAnswer
from appa_flwr.survey.names import same, usual_name
from appa_flwr.survey.nonanswers import Missing
from appa_flwr.survey.normalize import normalize
from appa_flwr.survey.types import About, Question, Survey

QUESTIONS = (Question("q1", "One?", ("Yes", "No")), Question("q2", "Two?", ("a", "b", "c"), (1.0, 2.0, 3.0)))
LINES = cases("wrong_lines")
SURVEY = Survey(
    QUESTIONS,
    {"South": {"q2": np.array([0.1, 0.2, 0.7])}, "North": {"q1": np.array([1 / 3, 2 / 3])}},
    respondents={"South": {"q2": 40.0}, "North": {}},
    extra=(Question("q3", "Three?", ("x", "y")),),
    about=About("x.sav", "ab" * 32, "region", "w", "98,99", "drop", ("México", "a note")),
)


def test_what_is_written_is_read_to_the_bit_and_private(tmp_path):
    store.write(SURVEY, path := tmp_path / "x.jsonl")
    back = store.read(path)
    assert (replace(back, answers={}), shares(back)) == (replace(SURVEY, answers={}), shares(SURVEY))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = sources.read_survey(path)  # our own file is a source too, and keeps what it says of its own
    assert (again.questions, {*again.groups}) == (QUESTIONS, {"South", "North"})
    assert (again.about.weight, again.about.missing, again.about.group_by) == ("w", "98,99", "region")
    assert again.about.notes[:2] == ("México", "a note")
    refused("written as .jsonl", store.write, SURVEY, tmp_path / "x.csv")


# What a reader of tables could take for something else: a code, an empty cell, no answer, HTML, two names, a list.
ODD = (
    *("1.0", "01", "-1", "7", "9", "99", "1e5", "nan", "null", "NA", "DK", "Don't know", "Refused", "Not asked"),
    *("Does not apply", "Trifft nicht zu", "Trifft voll zu", "<b>x</b>", "R&amp;D", "<5 years", "Total", "x;y"),
    *("sex/male", "[1, 2]", "A.", "true"),
)
FREE = st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=5).filter(lambda text: same(usual_name(text)))
NAMES = st.sampled_from(ODD) | FREE


@st.composite
def converted(draw):
    """The survey of a file of respondents whose owner has said in a codebook that all options are answers."""
    raws, groups = [], draw(st.lists(NAMES.filter(clean), min_size=1, max_size=3, unique_by=same))
    for key in draw(st.lists(NAMES, min_size=1, max_size=3, unique_by=clean)):
        options = draw(st.lists(NAMES, min_size=2, max_size=4, unique_by=same))
        scale = draw(st.sampled_from([(), [0.1 * k for k in range(len(options))]]))
        raw = RawAnswer(1, key, draw(NAMES), tuple(options), ordinal=scale, kinds=("answer",) * len(options))
        for group in (asked := [group for group in groups if draw(st.booleans())]):
            people = [draw(st.integers(1, 50)) for _ in options]
            share_K = np.array(people) * draw(st.floats(0.1, 3.0))
            raws.append(raw._replace(group=group, shares=(share_K / share_K.sum()).tolist(), people=people))
        raws += [] if asked else [raw]
    about = About(refusals="keep")
    return normalize(Frame("x.sav", pd.DataFrame()), raws, Missing(), None, about, min_respondents=0)


@settings(max_examples=100)
@given(converted())
def test_a_run_reads_what_is_written_as_nodes_do(survey):
    with TemporaryDirectory() as folder:
        store.write(survey, path := Path(folder) / "x.jsonl")
        node, run = store.read(path), sources.read_run(Config.load({"survey": str(path)}))
        for read in (node, run, sources.read_survey(path)):
            assert (read.questions, shares(read), read.extra) == (survey.questions, shares(survey), survey.extra)
            assert read.respondents == survey.respondents


def test_a_file_a_group(tmp_path):
    split = store.write_split(SURVEY, tmp_path / "new")
    assert {name: path.name for name, path in split.groups.items()} == {"South": "south.jsonl", "North": "north.jsonl"}
    mine = store.read(split.groups["South"])
    assert (mine.groups, ids(mine.questions)) == (("South",), ["q2"])
    assert "North" not in split.groups["South"].read_text()
    public = store.read(split.questions)
    assert (public.questions, public.groups) == (QUESTIONS, ())
    assert '"distribution"' not in split.questions.read_text()
    assert (public.about, mine.about.weight, mine.about.notes) == (About(), "w", ())  # notes count other groups' people
    assert stat.S_IMODE(split.groups["North"].stat().st_mode) == 0o600


@pytest.mark.parametrize("case", LINES, ids=lambda case: str(case.get("line") or case["change"])[:60])
def test_a_wrong_line_is_an_error_of_our_format_and_left_out_of_a_table_with_its_number(tmp_path, case):
    line = case.get("line") or row(**{"question_id": "q1", "group": "A"} | case["change"])
    path = write(tmp_path / "x.jsonl", [row("q0", "A"), line])
    if "ours" in case:
        assert "x.jsonl, line 2: " in refused(case["ours"], store.read, path)
    if "table" in case:
        survey = sources.read_survey(path)
        assert [note for note in survey.about.notes if "left out" in note] == [f"left out, {case['table']}"]
        assert shares(survey) == {"A": {"q0": [0.5, 0.3, 0.2]}}


@pytest.mark.parametrize("line", ["[" * 100_000, f'["{store.HEADER}"]', f'"{store.HEADER}"', "[[["])
def test_a_first_line_that_is_no_object_is_an_error_with_its_number(tmp_path, line):
    (path := tmp_path / "survey.jsonl").write_text(f"{line}\n")
    refused(rf"^{path}, line 1: ", store.read, path)
    assert store.read_about(path) == About()


def test_what_is_not_our_format(tmp_path):
    refused("appa survey .*x.sav --write", store.read, tmp_path / "x.sav")
    # A line ends at a line feed alone.
    source = write(tmp_path / "x.jsonl", [json.dumps(row(question="One\u2028two\u0085?"), ensure_ascii=False)])
    assert store.read(source).questions[0].text == "One\u2028two\u0085?"
    assert sources.read_survey(source).questions[0].text == "One two ?"


def test_names_of_files():
    names = ["Côte d'Ivoire", "cote d ivoire", "日本", "x" * 99]
    assert [*store.slugs(names).values()] == ["cote-d-ivoire", "cote-d-ivoire-2", "group", "x" * 60]


def test_the_generated_survey_of_a_run():
    keys = {"data.num-questions": 30, "data.num-groups": 4, "groups": "Belmora;Avaria"}
    drawn, some = generate.generate(num_questions=30, num_groups=4, seed=0), sources.read_run(Config.load(keys))
    assert (some.questions, some.groups, some.extra) == (drawn.questions, ("Belmora", "Avaria"), drawn.extra)
    assert len(some.extra) == 60
    refused("did you mean 'Avaria'", sources.read_run, Config.load({"groups": "Avarya"}))
