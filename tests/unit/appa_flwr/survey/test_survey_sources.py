"""GlobalOpinionQA's CSV and hub id, and OpinionQA's folder, on small files written here."""

from __future__ import annotations

import ast
import csv
import string
from collections import defaultdict

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from appa_flwr.config import HUB_SURVEY, Config, assemble
from appa_flwr.errors import UserError
from appa_flwr.launch.checks import participants, read_survey
from appa_flwr.survey import globalqa, read, report
from appa_flwr.survey.cells import MAX_CELL_CHARS, CellError, Reason
from appa_flwr.survey.types import Question

LIKE = ["Like", "Don't like", "DK/Refused"]


def as_published(answers):
    """The text that Python gives a defaultdict, as the published file has it."""
    return str(defaultdict(list, answers))


def globalqa_csv(path, *rows):
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["question", "selections", "options", "source"])
        writer.writerows([*row, "GAS"] for row in rows)
    return path


def reasons(survey):
    return [(cell.row, cell.group, cell.reason) for cell in survey.rejections]


# --- GlobalOpinionQA --------------------------------------------------------------------------------------


def test_globalqa_csv(tmp_path):
    path = globalqa_csv(
        tmp_path / "global.csv",
        ("Tea?", as_published({"France": [0.5, 0.3, 0.2], "Cote d'Ivoire": [0.1, 0.1, 0.8]}), str(LIKE)),
        ("Milk?", as_published({"France": [0.25, 0.75], "Britain": [0.9, 0.9], "Peru": [0.5]}), "['Yes', 'No']"),
        ("Rice?", as_published({"Britain": [1, 0], "Great Britain": [0, 1]}), '["Yes", "No"]'),
    )
    survey = read.read_survey(path)
    assert survey.groups == ("France", "Cote d'Ivoire", "Great Britain")
    tea, milk, rice = (question.question_id for question in survey.questions)
    assert survey.questions[0] == Question(tea, "Tea?", tuple(LIKE))
    assert len({tea, milk, rice}) == 3
    np.testing.assert_array_equal(survey.answers["Cote d'Ivoire"][tea], [0.1, 0.1, 0.8])
    np.testing.assert_array_equal(survey.answers["France"][milk], [0.25, 0.75])
    # Single cells go, each with its reason; the first of two spellings of one country stays.
    np.testing.assert_array_equal(survey.answers["Great Britain"][rice], [1, 0])
    assert reasons(survey) == [
        (3, "Great Britain", Reason.SUM),
        (3, "Peru", Reason.LENGTH),
        (4, "Great Britain", Reason.DUPLICATE),
    ]
    assert read.group_names(path) == ("France", "Cote d'Ivoire", "Great Britain", "Peru")
    assert read.read_questions(path) == survey.questions
    assert set(read.read_group(path, "France")) == {tea, milk}
    with pytest.raises(UserError, match=r"global.csv, row 3: .*'Great Britain'.*off one"):
        read.read_survey(path, strict=True)


def test_globalqa_ids_depend_on_text_and_options_alone(tmp_path):
    tea = ("Tea?", as_published({"France": [0.5, 0.3, 0.2]}), str(LIKE))
    same = ("Tea?", as_published({"Peru": [0, 0, 1]}), '["Like", "Don\'t like", "DK/Refused"]')
    other = ("Tea?", as_published({"Peru": [0, 1]}), "['Yes', 'No']")
    first = read.read_questions(globalqa_csv(tmp_path / "a.csv", tea, other))
    second = read.read_questions(globalqa_csv(tmp_path / "b.csv", other, same))
    assert set(first) == set(second)
    assert len(set(first)) == 2


def test_a_bad_question_of_globalqa_costs_that_question(tmp_path):
    good = as_published({"France": [0.5, 0.5]})
    path = globalqa_csv(
        tmp_path / "global.csv",
        ("", good, "['a', 'b']"),
        ("One?", good, "['a']"),
        ("Many?", good, str([f"o{k}" for k in range(10_000)])),
        ("Code?", good, "__import__('os').listdir('.')"),
        ("Huge?" * 10_000, good, "['a', 'b']"),
        ("Good?", good, "['a', 'b']"),
    )
    survey = read.read_survey(path)
    assert [question.text for question in survey.questions] == ["Good?"]
    assert [(row, reason) for row, _, reason in reasons(survey)] == [
        (2, Reason.EMPTY_TEXT),
        (3, Reason.FEW_OPTIONS),
        (4, Reason.MANY_OPTIONS),
        (5, Reason.BAD_OPTIONS),
        (6, Reason.TOO_LONG),
    ]


def test_a_bad_value_costs_its_country_and_runs_nothing(tmp_path):
    trap = tmp_path / "trap"
    code = f"__import__('pathlib').Path({str(trap)!r}).touch()"
    text = (
        "defaultdict(<class 'list'>, {'A': [[0.5, 0.5]], 'B': [0.5, 0.5], 'C': " + code + ", "
        "'D': [0.5, nan], 'E': [0.5, -0.5], 'F': {'x': [1]}, 'G': [1.5, -0.5], 'H': [], 'I': [0.0, 0.0],})"
    )
    survey = read.read_survey(globalqa_csv(tmp_path / "global.csv", ("Q?", text, "['a', 'b']")))
    assert survey.groups == ("B",)
    assert [(group, reason) for _, group, reason in reasons(survey)] == [
        ("A", Reason.LENGTH),
        ("C", Reason.BAD_DISTRIBUTION),
        ("D", Reason.NOT_FINITE),
        ("E", Reason.NEGATIVE),
        ("F", Reason.BAD_DISTRIBUTION),
        ("G", Reason.NEGATIVE),
        ("H", Reason.LENGTH),
        ("I", Reason.ZERO),
    ]
    assert not trap.exists()


HUGE = MAX_CELL_CHARS - 100
NO_SELECTIONS = [
    "",
    "{",
    "}",
    "[]",
    "None",
    "{'A'}",
    "{'A' [0.5, 0.5]}",
    "{1: [0.5, 0.5]}",
    "{'A': [0.5, 0.5]} + {}",
    "{'A': [0.5, 0.5)]}",
    "{'A': 0.5]}",
    "defaultdict(<class 'list'>, {'A': [0.5, 0.5]}",
    "defaultdict(<function f at 0x7f>, {'A': [0.5, 0.5]})",
    "__import__('os').system('true')",
    r"{'\x': [0.5, 0.5]}",
    "{'A': " + "[" * HUGE + "}",
    "{'A': " + "'" * (HUGE + 1) + "}",  # one quote is left over
    "{" + "'" * (HUGE + 1) + "}",
    "{" + '"\\' * (HUGE // 2) + "}",
    "{'A': " + "[(" * (HUGE // 2) + "}",
    "{" + " " * HUGE + ":}",
    "defaultdict(" * (HUGE // 20),
    "{" + "'a': ['" * (HUGE // 8) + "}",
]


@pytest.mark.timeout(20)  # all of these are one pass each; anything quadratic in the length would take hours
@pytest.mark.parametrize("text", NO_SELECTIONS, ids=range(len(NO_SELECTIONS)))
def test_what_is_no_dict_is_rejected_in_one_pass(text):
    with pytest.raises(CellError) as caught:
        globalqa.selections(text)
    assert caught.value.reason is Reason.BAD_SELECTIONS


@pytest.mark.timeout(20)
def test_a_question_with_thousands_of_countries_is_decoded_once(tmp_path, monkeypatch):
    options = str(["a", "b"]) + " " * 90_000
    answers = "{" + ", ".join(f"'{k}': [1,0]" for k in range(5_000)) + "}"
    calls = []
    decode = globalqa.parse_options
    monkeypatch.setattr(globalqa, "parse_options", lambda cell: calls.append(cell) or decode(cell))
    survey = read.read_survey(globalqa_csv(tmp_path / "global.csv", ("Q?", answers, options)))
    assert len(survey.groups) == 5_000
    assert len(calls) == 1


def test_selections_beyond_the_limit_are_not_looked_at():
    with pytest.raises(CellError) as caught:
        globalqa.selections("{'A': [0.5, 0.5]" + " " * MAX_CELL_CHARS + "}")
    assert caught.value.reason is Reason.TOO_LONG


@given(st.dictionaries(st.text(), st.lists(st.floats(), max_size=6), max_size=8))
def test_any_dict_that_python_writes_is_cut_as_python_reads_it(answers):
    found = globalqa.selections(as_published(answers))
    assert found == [(name, [None if x != x else x for x in shares]) for name, shares in answers.items()]


@given(st.text(alphabet="{}[]()'\",:\\ aA01.nN\n", max_size=60))
def test_fuzzed_selections_never_fail_otherwise_and_agree_with_python(text):
    try:
        found = globalqa.selections("{" + text + "}")
    except CellError:
        return
    try:
        value = ast.literal_eval("{" + text.strip() + "}")
    except (ValueError, SyntaxError, TypeError, MemoryError):
        return  # more lenient than Python: what is no list is rejected later, country by country
    if isinstance(value, dict):
        assert dict.fromkeys(name for name, _ in found) == dict.fromkeys(value)


def test_the_hub_data_set(monkeypatch, tmp_path):
    import datasets

    rows = {
        "question": ["Tea?", "Milk?"],
        "selections": [as_published({"France": [0.5, 0.3, 0.2]}), as_published({"Peru": [0.5, 0.5]})],
        "options": [str(LIKE), "['Yes', 'No']"],
        "source": ["GAS", "WVS"],
    }
    asked = []

    def load(name, *, split):
        asked.append((name, split))
        return datasets.Dataset.from_dict(rows)

    monkeypatch.setattr(datasets, "load_dataset", load)
    survey = read.read_survey(HUB_SURVEY)
    assert survey.groups == ("France", "Peru")
    assert asked == [("Anthropic/llm_global_opinions", "train")]
    cells = zip(rows["question"], rows["selections"], rows["options"], strict=True)
    local = read.read_survey(globalqa_csv(tmp_path / "global.csv", *cells))
    assert survey.questions == local.questions
    # The id is no path: it stays as it is, and a run finds its groups.
    config = assemble(None, [f"survey={HUB_SURVEY}"], folder=tmp_path)
    assert config.survey == HUB_SURVEY
    assert participants(config) == ("France", "Peru")


def test_an_unreachable_hub_is_one_line_with_a_way_out(monkeypatch):
    import datasets

    def load(name, *, split):
        raise ConnectionError("Couldn't reach it\nlong story")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match=r"Couldn't reach it\); download its CSV and give survey = its path$") as caught:
        read.read_survey(HUB_SURVEY)
    assert "\n" not in str(caught.value)


# --- OpinionQA ----------------------------------------------------------------------------------------------

INFO = {"key": "WORRY_W26", "question": "Worried?", "references": "['A lot', 'A bit', 'No', 'Refused']"}
SCALE = {"option_ordinal": "[1.0, 2.0, 3.0]"}


def opinionqa(folder, responses, *info, number=26, metadata=("RACE", "RELIG")):
    wave = folder / "human_resp" / f"American_Trends_Panel_W{number}"
    wave.mkdir(parents=True)
    pd.DataFrame(info).to_csv(wave / "info.csv")
    pd.DataFrame({"key": metadata}).to_csv(wave / "metadata.csv", index=False)
    pd.DataFrame(responses).to_csv(wave / "responses.csv", index=False)
    return folder


def people(*rows, question="WORRY_W26", number=26):
    names = ("RACE", "RELIG", f"WEIGHT_W{number}", question)
    return [dict(zip(names, row, strict=True)) for row in rows]


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
    assert survey.groups == ("RACE/Other", "RACE/White", "RELIG/None", "RELIG/Other")
    assert survey.questions == (Question("WORRY_W26", "Worried?", ("A lot", "A bit", "No", "Refused")),)
    shares = {name: mine["WORRY_W26"].tolist() for name, mine in survey.answers.items()}
    assert shares["RACE/White"] == [0.25, 0, 0.75, 0]
    assert shares["RACE/Other"] == [0, 0.5, 0, 0.5]
    np.testing.assert_allclose(shares["RELIG/Other"], [1 / 9, 6 / 9, 0, 2 / 9])
    # People who gave a substantive answer, unweighted.
    counts = {name: mine["WORRY_W26"] for name, mine in survey.respondents.items()}
    assert counts == {"RACE/Other": 1, "RACE/White": 2, "RELIG/None": 1, "RELIG/Other": 3}
    assert survey.rejections == ()
    with pytest.raises(UserError, match="'Other' fits several"):
        read.read_group(folder, "Other")


def test_opinionqa_without_refusals_has_its_scale(folder):
    survey = read.read_survey(folder / "human_resp", refusals="separate")
    assert survey.questions == (Question("WORRY_W26", "Worried?", ("A lot", "A bit", "No"), (1.0, 2.0, 3.0)),)
    np.testing.assert_allclose(survey.answers["RELIG/Other"]["WORRY_W26"], [1 / 7, 6 / 7, 0])
    rates = {name: mine["WORRY_W26"] for name, mine in survey.refusal_rates.items()}
    assert rates == pytest.approx({"RACE/Other": 0.5, "RACE/White": 0, "RELIG/None": 0, "RELIG/Other": 2 / 9})
    few = read.read_survey(folder, refusals="drop", min_respondents=2)
    assert few.groups == ("RACE/White", "RELIG/Other")
    assert {reason for _, _, reason in reasons(few)} == {Reason.FEW_RESPONDENTS}


def test_refusals_of_opinionqa_are_what_lies_behind_the_ordinals(tmp_path):
    info = INFO | {"references": "['Up', 'Down', 'Prefer silence']", "option_ordinal": "[3.0, 1.0]"}
    folder = opinionqa(tmp_path, people(("A", "B", 1, "Up"), ("A", "B", 1, "Prefer silence")), info)
    (question,) = read.read_questions(folder, refusals="drop")
    assert (question.options, question.ordinal) == (("Up", "Down"), (3.0, 1.0))
    assert read.read_survey(folder, refusals="separate").refusal_rates["RACE/A"]["WORRY_W26"] == 0.5


def test_a_constant_scale_is_none(tmp_path):
    folder = opinionqa(tmp_path, people(("A", "B", 1, "A lot")), INFO | {"option_ordinal": "[1.0, 1.0, 1.0]"})
    (question,) = read.read_questions(folder, refusals="drop")
    assert question.ordinal is None


def test_what_is_wrong_in_opinionqa_is_counted(tmp_path):
    rows = people(
        ("A", "B", "nan", "A lot"),
        ("A", "B", -1, "A lot"),
        ("A", "B", "heavy", "A lot"),
        ("A", "B", "", "A lot"),
        ("A", "B", "inf", "A lot"),
        ("A", "B", 1, "What?"),
        ("A", "B", 1, "No"),
        ("Z", "B", 0, "No"),
    )
    info = [
        INFO | SCALE,
        INFO | SCALE | {"key": "GONE_W26"},
        INFO | {"key": "SHORT_W26", "option_ordinal": "[1.0]"},
        INFO | {"key": "LONG_W26", "option_ordinal": "[1, 2, 3, 4, 5]"},
        INFO | SCALE | {"key": "CODE_W26", "references": "open('x')"},
        INFO | SCALE | {"key": "MANY_W26", "references": str(list(range(10_000)))},
        INFO | SCALE | {"key": "DEEP_W26", "references": "[" * 50_000},
    ]
    survey = read.read_survey(opinionqa(tmp_path, rows, *info))
    assert survey.answers["RACE/A"]["WORRY_W26"].tolist() == [0, 0, 1, 0]
    assert reasons(survey) == [
        *((row, "", Reason.BAD_WEIGHT) for row in range(2, 7)),
        (2, "", Reason.UNKNOWN_ANSWER),
        (2, "RACE/Z", Reason.ZERO),  # its only weight is zero
        (3, "", Reason.NO_COLUMN),
        (4, "", Reason.BAD_ORDINAL),
        (5, "", Reason.BAD_ORDINAL),
        (6, "", Reason.BAD_OPTIONS),
        (7, "", Reason.MANY_OPTIONS),
        (8, "", Reason.BAD_OPTIONS),
    ]
    assert [cell.question_id for cell in survey.rejections[5:7]] == ["WORRY_W26", "WORRY_W26"]


def test_a_fault_names_the_file_of_its_wave(tmp_path, capsys):
    for number in (4, 26):
        row = ("A", "B", "nan" if number == 26 else 1, "No")
        question = f"Q_W{number}"
        rows = people(row, ("A", "B", 1, "No"), question=question, number=number)
        gone = [INFO | SCALE | {"key": "GONE"}] * (number == 4)
        folder = opinionqa(tmp_path, rows, INFO | SCALE | {"key": question}, *gone, number=number)
    survey = read.read_survey(folder)
    waves = folder / "human_resp"
    assert [(cell.source, cell.row) for cell in survey.rejections] == [
        (str(waves / "American_Trends_Panel_W4" / "info.csv"), 3),
        (str(waves / "American_Trends_Panel_W26" / "responses.csv"), 2),
    ]
    with pytest.raises(UserError, match=r"American_Trends_Panel_W4/info\.csv, row 3: question 'GONE'"):
        read.read_survey(folder, strict=True)
    console = Console(width=200)
    for table in report.tables(survey):
        console.print(table, markup=False)
    assert "American_Trends_Panel_W26/responses.csv, 2, (unreadable), (unreadable)" in capsys.readouterr().out


def test_waves_come_in_the_order_of_their_numbers(tmp_path):
    for number in (92, 4, 26):
        rows = people(("A", "B", 1, "No"), question=f"Q_W{number}", number=number)
        opinionqa(tmp_path, rows, INFO | SCALE | {"key": f"Q_W{number}"}, number=number)
    assert [question.question_id for question in read.read_questions(tmp_path)] == ["Q_W4", "Q_W26", "Q_W92"]


def test_a_broken_opinionqa_folder_is_one_line(tmp_path, folder):
    wave = folder / "human_resp" / "American_Trends_Panel_W26"
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="not in OpinionQA's layout"):
        read.read_survey(empty)
    (wave / "responses.csv").write_text("RACE,RELIG,WORRY_W26\nA,B,No\n")
    with pytest.raises(UserError, match=r"responses.csv: missing column WEIGHT_W26"):
        read.read_survey(folder)
    (wave / "responses.csv").write_text("RACE, RACE,WEIGHT_W26\nA,B,1\n")
    with pytest.raises(UserError, match=r"responses.csv: column RACE occurs twice"):
        read.read_survey(folder)
    (wave / "responses.csv").write_text("SEX,WEIGHT_W26\nA,1\n")
    with pytest.raises(UserError, match=r"metadata.csv: names no column"):
        read.read_survey(folder)
    (wave / "responses.csv").write_text("RACE,WEIGHT_W26\n" + "".join(f"r{k},1\n" for k in range(201)))
    with pytest.raises(UserError, match=r"metadata.csv: column RACE has 201 groups; at most 200"):
        read.read_survey(folder)
    (wave / "responses.csv").write_bytes(b"RACE,WEIGHT_W26\n\xff,1\n")
    with pytest.raises(UserError, match=r"responses.csv: cannot be read as CSV"):
        read.read_survey(folder)
    (wave / "info.csv").unlink()
    with pytest.raises(UserError, match=r"info.csv: cannot be read as CSV \(No such file"):
        read.read_survey(folder)


CELL = st.one_of(
    st.text(max_size=12),
    st.text(alphabet="[]()'\",1.5 -naN", max_size=24),
    st.sampled_from(["['A', 'B']", "[1, 2]", "[NaN, 1]", "[None, 1.0]", "A", "B", "1e400", "-1", "nan"]),
    st.text(alphabet=string.printable, max_size=12),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(info=st.lists(st.tuples(CELL, CELL, CELL, CELL), max_size=3), rows=st.lists(st.tuples(CELL, CELL, CELL)))
def test_fuzzed_opinionqa_gives_distributions_or_a_users_error(tmp_path_factory, info, rows):
    columns = ("key", "question", "references", "option_ordinal")
    folder = opinionqa(
        tmp_path_factory.mktemp("oqa"),
        [dict(zip(("RACE", "WEIGHT_W26", "Q"), row, strict=True)) for row in rows] or [{"RACE": "", "WEIGHT_W26": ""}],
        *[dict(zip(columns, cells, strict=True)) for cells in info],
        dict(zip(columns, ("Q", "?", "['A', 'B']", "[1, 2]"), strict=True)),
        metadata=("RACE",),
    )
    try:
        survey = read.read_survey(folder)
    except UserError:
        return
    for mine in survey.answers.values():
        for shares in mine.values():
            assert (shares >= 0).all()
            assert shares.sum() == pytest.approx(1)


def test_a_run_takes_the_minimums_of_the_config(tmp_path):
    path = globalqa_csv(
        tmp_path / "global.csv",
        ("Tea?", as_published({"A": [0.5, 0.5], "B": [0.5, 0.5], "C": [0.5, 0.5]}), "['a', 'b']"),
        ("Milk?", as_published({"A": [0.5, 0.5], "C": [0.5, 0.5], "B": [0.5, 0.9]}), "['a', 'b']"),
    )
    flat = {"survey": str(path), "data.min-questions": 2}
    assert participants(Config.load(flat)) == ("A", "C")
    named = Config.load(flat | {"groups": "A,B"})
    with pytest.raises(UserError, match="group 'B' has 1 usable questions, fewer than min-questions = 2"):
        read_survey(named, participants(named))
