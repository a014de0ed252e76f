"""OpinionQA's folder, on small files written here."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from surveys import ids, read_group, reasons_of_groups, refused

from appa_flwr.core.errors import UserError
from appa_flwr.report import survey_summary as report
from appa_flwr.survey import read
from appa_flwr.survey.cells import Reason
from appa_flwr.survey.types import Question

INFO = {"key": "WORRY_W26", "question": "Worried?", "references": "['A lot', 'A bit', 'No', 'Refused']"}
SCALE = {"option_ordinal": "[1.0, 2.0, 3.0]"}


def opinionqa(folder, responses, *info, number=26, metadata=("RACE", "RELIG")):
    wave = folder / "human_resp" / f"American_Trends_Panel_W{number}"
    wave.mkdir(parents=True)
    pd.DataFrame(info).to_csv(wave / "info.csv")
    pd.DataFrame({"key": metadata}).to_csv(wave / "metadata.csv", index=False)
    responses.to_csv(wave / "responses.csv", index=False)
    return folder


def people(*rows, question="WORRY_W26", number=26):
    return pd.DataFrame(rows, columns=["RACE", "RELIG", f"WEIGHT_W{number}", question])


@pytest.fixture
def folder(tmp_path):
    rows = people(
        ("White", "Other", 1.0, "A lot"),
        ("White", "None", 3.0, "No"),
        ("Other", "Other", 2.0, "A bit"),
        ("Other", "Other", 2.0, "Refused"),
        ("Refused", "Other", 4.0, "A bit"),  # in no group of RACE
        ("White", "Other", 9.0, None),  # was not asked
        ("Asian", "None", 9.0, None),  # nor was any other of this group
    )
    return opinionqa(tmp_path, rows, INFO | SCALE)


def test_opinionqa_counts_weighted_answers_by_attribute_and_group(folder):
    survey = read.read_survey(folder)
    assert survey.questions == (Question("WORRY_W26", "Worried?", ("A lot", "A bit", "No", "Refused")),)
    # With the people who gave a substantive answer, unweighted.
    expected = {
        "RACE/Other": ([0, 0.5, 0, 0.5], 1),
        "RACE/White": ([0.25, 0, 0.75, 0], 2),
        "RELIG/None": ([0, 0, 1, 0], 1),
        "RELIG/Other": ([1 / 9, 6 / 9, 0, 2 / 9], 3),
    }
    assert survey.groups == tuple(expected)
    for name, (share_K, count) in expected.items():
        np.testing.assert_allclose(survey.answers[name]["WORRY_W26"], share_K)
        assert survey.respondents[name] == {"WORRY_W26": count}
    assert survey.rejections == ()
    refused("'Other' fits several", read_group, folder, "Other")


def test_opinionqa_without_refusals_has_its_scale(folder):
    survey = read.read_survey(folder / "human_resp", refusals="separate")
    assert survey.questions == (Question("WORRY_W26", "Worried?", ("A lot", "A bit", "No"), (1.0, 2.0, 3.0)),)
    np.testing.assert_allclose(survey.answers["RELIG/Other"]["WORRY_W26"], [1 / 7, 6 / 7, 0])
    rates = {name: mine["WORRY_W26"] for name, mine in survey.refusal_rates.items()}
    assert rates == pytest.approx({"RACE/Other": 0.5, "RACE/White": 0, "RELIG/None": 0, "RELIG/Other": 2 / 9})
    few = read.read_survey(folder, refusals="drop", min_respondents=2)
    assert few.groups == ("RACE/White", "RELIG/Other")
    assert {rejection.reason for rejection in few.rejections} == {Reason.FEW_RESPONDENTS}


def test_what_the_ordinals_of_opinionqa_say(tmp_path):
    # Options behind the ordinals are refusals, whatever their words; a constant scale is none; of two options that read
    # the same the first has the answers.
    info = INFO | {"references": "['Up', 'Down', 'Prefer silence']", "option_ordinal": "[3.0, 1.0]"}
    rows = people(("A", "B", 1, "Up"), ("A", "B", 1, "Prefer silence"))
    constant = {"key": "FLAT", "question": "?", "references": "['A lot', 'A lot', 'No', 'Refused']"}
    constant |= {"option_ordinal": "[1.0, 1.0, 1.0]"}
    folder = opinionqa(tmp_path, rows.assign(FLAT="A lot"), info, constant)
    first, flat = read.read_questions(folder, refusals="drop")
    assert (first.options, first.ordinal) == (("Up", "Down"), (3.0, 1.0))
    assert (len(flat.options), flat.ordinal) == (3, None)
    assert read_group(folder, "RACE/A", refusals="drop")["FLAT"].tolist() == [1, 0, 0]
    assert read.read_survey(folder, refusals="separate").refusal_rates["RACE/A"]["WORRY_W26"] == 0.5


def test_what_is_wrong_in_opinionqa_is_counted(tmp_path):
    bad_weights = [("A", "B", weight, "A lot") for weight in ("nan", -1, "heavy", "", "inf")]
    rows = people(*bad_weights, ("A", "B", 1, "What?"), ("A", "B", 1, "No"), ("Z", "B", 0, "No"))
    info = [
        INFO | SCALE,
        INFO | SCALE | {"key": "GONE_W26"},
        INFO | {"key": "SHORT_W26", "option_ordinal": "[1.0]"},
        INFO | {"key": "LONG_W26", "option_ordinal": "[1, 2, 3, 4, 5]"},
        INFO | SCALE | {"key": "CODE_W26", "references": "open('x')"},
    ]
    bad_questions = (Reason.NO_COLUMN, Reason.BAD_ORDINAL, Reason.BAD_ORDINAL, Reason.BAD_OPTIONS)
    survey = read.read_survey(opinionqa(tmp_path, rows, *info))
    assert survey.answers["RACE/A"]["WORRY_W26"].tolist() == [0, 0, 1, 0]
    assert reasons_of_groups(survey) == [
        *((row, "", Reason.BAD_WEIGHT) for row in range(2, 7)),
        (2, "", Reason.UNKNOWN_ANSWER),
        (2, "RACE/Z", Reason.ZERO),  # its only weight is zero
        *((row, "", reason) for row, reason in enumerate(bad_questions, start=3)),
    ]
    assert [rejection.question_id for rejection in survey.rejections[5:7]] == ["WORRY_W26", "WORRY_W26"]


def test_waves_come_in_the_order_of_their_numbers_and_a_fault_names_its_waves_file(tmp_path, capsys):
    for number in (92, 4, 26):
        key = f"Q_W{number}"
        first = ("A", "B", "nan" if number == 26 else 1, "No")
        rows = people(first, ("A", "B", 1, "No"), question=key, number=number)
        gone = [INFO | SCALE | {"key": "GONE"}] * (number == 4)
        folder = opinionqa(tmp_path, rows, INFO | SCALE | {"key": key}, *gone, number=number)
    survey = read.read_survey(folder)
    assert ids(survey.questions) == ["Q_W4", "Q_W26", "Q_W92"]
    waves = folder / "human_resp"
    assert [(rejection.source, rejection.row) for rejection in survey.rejections] == [
        (str(waves / "American_Trends_Panel_W4" / "info.csv"), 3),
        (str(waves / "American_Trends_Panel_W26" / "responses.csv"), 2),
    ]
    console = Console(width=200)
    for table in report.tables(survey):
        console.print(table, markup=False)
    assert "American_Trends_Panel_W26/responses.csv, 2, (unreadable), (unreadable)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("people_csv", "message"),
    [
        (b"RACE,RELIG,WORRY_W26\nA,B,No\n", r"responses.csv: missing column WEIGHT_W26"),
        (b"RACE, RACE,WEIGHT_W26\nA,B,1\n", r"responses.csv: column RACE occurs twice"),
        (b"SEX,WEIGHT_W26\nA,1\n", r"metadata.csv: names no column"),
        (b"RACE,WEIGHT_W26\n" + b"r%d,1\n" * 201 % (*range(201),), r"column RACE has 201 groups; at most 200"),
        (b"RACE,WEIGHT_W26\n\xff,1\n", r"responses.csv: cannot be read as CSV"),
        (None, r"info.csv: cannot be read as CSV \(No such file"),
    ],
)
def test_a_broken_opinionqa_folder_is_one_line(folder, people_csv, message):
    wave = folder / "human_resp" / "American_Trends_Panel_W26"
    if people_csv is None:
        (wave / "info.csv").unlink()
    else:
        (wave / "responses.csv").write_bytes(people_csv)
    refused(message, read.read_survey, folder)
    refused("not in OpinionQA's layout", read.read_survey, wave)


CELL = st.one_of(
    st.text(max_size=12),
    st.text(alphabet="[]()'\",1.5 -naN", max_size=24),
    st.sampled_from(["['A', 'B']", "[1, 2]", "[NaN, 1]", "[None, 1.0]", "A", "B", "1e400", "-1", "nan"]),
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(info=st.lists(st.tuples(CELL, CELL, CELL, CELL), max_size=3), rows=st.lists(st.tuples(CELL, CELL, CELL)))
def test_fuzzed_opinionqa_gives_distributions_or_a_users_error(tmp_path_factory, info, rows):
    answered = pd.DataFrame(rows, columns=["RACE", "WEIGHT_W26", "Q"])
    asked = [dict(zip(INFO | SCALE, cells, strict=True)) for cells in [*info, ("Q", "?", "['A', 'B']", "[1, 2]")]]
    folder = opinionqa(tmp_path_factory.mktemp("oqa"), answered, *asked, metadata=("RACE",))
    try:
        survey = read.read_survey(folder)
    except UserError:
        return
    for shares in itertools.chain(*(mine.values() for mine in survey.answers.values())):
        assert (shares >= 0).all()
        assert shares.sum() == pytest.approx(1)
