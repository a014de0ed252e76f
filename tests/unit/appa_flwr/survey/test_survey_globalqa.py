"""GlobalOpinionQA's CSV and hub id, on small files written here."""

from __future__ import annotations

import ast
import csv
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from surveys import read_group, reasons_of_groups, refused, shares

from appa_flwr.config import HUB_SURVEY
from appa_flwr.config.sources import assemble
from appa_flwr.launch.checks import participants
from appa_flwr.survey import globalqa, read
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


def test_globalqa_csv(tmp_path):
    path = globalqa_csv(
        tmp_path / "global.csv",
        ("Tea?", as_published({"France": [0.5, 0.3, 0.2], "Cote d'Ivoire": [0.1, 0.1, 0.8]}), str(LIKE)),
        ("Milk?", as_published({"France": [0.25, 0.75], "Britain": [0.9, 0.9], "Peru": [0.5]}), "['Yes', 'No']"),
        ("Rice?", as_published({"Britain": [1, 0], "Great Britain": [0, 1]}), '["Yes", "No"]'),
    )
    survey = read.read_survey(path)
    tea, milk, rice = (question.question_id for question in survey.questions)
    assert survey.questions[0] == Question(tea, "Tea?", tuple(LIKE))
    # Single answers go, each with its reason; the first of two spellings of one country stays.
    assert list(shares(survey).items()) == [
        ("France", {tea: [0.5, 0.3, 0.2], milk: [0.25, 0.75]}),
        ("Cote d'Ivoire", {tea: [0.1, 0.1, 0.8]}),
        ("Great Britain", {rice: [1, 0]}),
    ]
    assert reasons_of_groups(survey) == [
        (3, "Great Britain", Reason.SUM),
        (3, "Peru", Reason.LENGTH),
        (4, "Great Britain", Reason.DUPLICATE),
    ]
    assert read.group_names(path) == ("France", "Cote d'Ivoire", "Great Britain", "Peru")
    assert read.read_questions(path) == survey.questions
    assert set(read_group(path, "France")) == {tea, milk}


def test_globalqa_ids_depend_on_text_and_options_alone(tmp_path):
    like = '["Like", "Don\'t like", "DK/Refused"]'
    tea, same = (
        ("Tea?", as_published({"France": [0, 0, 1]}), str(LIKE)),
        ("Tea?", as_published({"Peru": [0, 0, 1]}), like),
    )
    other = ("Tea?", as_published({"Peru": [0, 1]}), "['Yes', 'No']")
    first = read.read_questions(globalqa_csv(tmp_path / "a.csv", tea, other))
    assert set(first) == set(read.read_questions(globalqa_csv(tmp_path / "a.csv", other, same)))
    assert len(set(first)) == 2


def test_a_bad_question_of_globalqa_costs_that_question(tmp_path):
    good, two = as_published({"France": [0.5, 0.5]}), "['a', 'b']"
    bad = [
        ("", good, two, Reason.EMPTY_TEXT),
        ("One?", good, "['a']", Reason.FEW_OPTIONS),
        ("Huge?" * 10_000, good, two, Reason.TOO_LONG),
        ("Broken?", "{'A': [0.5, 0.5], 'B': [0.5 0.5]}", two, Reason.BAD_SELECTIONS),
    ]
    path = globalqa_csv(tmp_path / "global.csv", *(cells[:3] for cells in bad), ("Good?", good, two))
    survey = read.read_survey(path)
    assert [question.text for question in survey.questions] == ["Good?"]
    assert reasons_of_groups(survey) == [(line, "", cells[3]) for line, cells in enumerate(bad, start=2)]


def test_a_bad_value_costs_its_country_and_runs_nothing(tmp_path):
    trap = tmp_path / "trap"
    bad = [
        ("[[0.5, 0.5]]", Reason.LENGTH),
        (f"__import__('pathlib').Path({str(trap)!r}).touch()", Reason.BAD_DISTRIBUTION),
        ("[0.5, nan]", Reason.NOT_FINITE),
        ("{'x': [1]}", Reason.BAD_DISTRIBUTION),
        ("[-inf, null]", Reason.NOT_FINITE),
    ]
    cells = ", ".join(f"'Land {k}': {value}" for k, (value, _) in enumerate(bad))
    text = "defaultdict(<class 'list'>, {'B': [0.5, 0.5], " + cells + ",})"
    survey = read.read_survey(globalqa_csv(tmp_path / "global.csv", ("Q?", text, "['a', 'b']")))
    assert survey.groups == ("B",)
    assert reasons_of_groups(survey) == [(2, f"Land {k}", reason) for k, (_, reason) in enumerate(bad)]
    assert not trap.exists()


HUGE = MAX_CELL_CHARS - 100
NO_SELECTIONS = (
    "", "{", "}", "[]", "None", "{'A'}", "{'A' [0.5, 0.5]}", "{1: [0.5, 0.5]}", "{'A': [0.5, 0.5]} + {}",
    "{'A': [0.5, 0.5)]}", "{'A': 0.5]}", "defaultdict(<class 'list'>, {'A': [0.5, 0.5]}",
    "defaultdict(<function f at 0x7f>, {'A': [0.5, 0.5]})", "__import__('os').system('true')", r"{'\x': [0.5, 0.5]}",
    "{'A': " + "[" * HUGE + "}",
    "{'A': " + "'" * (HUGE + 1) + "}",  # one quote is left over
    "{" + "'" * (HUGE + 1) + "}", "{" + '"\\' * (HUGE // 2) + "}", "{'A': " + "[(" * (HUGE // 2) + "}",
    "{" + " " * HUGE + ":}", "defaultdict(" * (HUGE // 20), "{" + "'a': ['" * (HUGE // 8) + "}",
    "{'A': " + "-" * HUGE + "1}", "{'A': f" + "()" * (HUGE // 2) + "}", "{'A': 'b' 'c'}",
    "{'A': " + "[" * 300 + "]" * 300 + "}",
)  # fmt: skip


@pytest.mark.timeout(20)  # all of these are one pass each; anything quadratic in the length would take hours
@pytest.mark.parametrize("text", NO_SELECTIONS, ids=range(len(NO_SELECTIONS)))
def test_what_is_no_dict_is_rejected_in_one_pass(text):
    for cell, reason in ((text, Reason.BAD_SELECTIONS), ("{" + " " * MAX_CELL_CHARS + text + "}", Reason.TOO_LONG)):
        with pytest.raises(CellError) as caught:
            globalqa.selections(cell)
        assert caught.value.reason is reason


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
        return  # a value that is no literal is rejected later, country by country
    assert {name: items for name, items in found if items is not None} == {
        name: list(items) for name, items in value.items() if isinstance(items, (list, tuple))
    }


def test_the_hub_data_set_and_a_way_out_where_it_is_out_of_reach(monkeypatch, tmp_path):
    import datasets

    tea = ("Tea?", as_published({"France": [0.5, 0.3, 0.2]}), str(LIKE))
    milk = ("Milk?", as_published({"Peru": [0.5, 0.5]}), "['Yes', 'No']")
    path = globalqa_csv(tmp_path / "global.csv", tea, milk)
    hub = {("Anthropic/llm_global_opinions", "train"): datasets.Dataset.from_csv(str(path), cache_dir=str(tmp_path))}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *, split: hub[name, split])
    survey, local = read.read_survey(HUB_SURVEY), read.read_survey(path)
    assert (survey.questions, shares(survey)) == (local.questions, shares(local))
    # The id is no path: it stays as it is, and a run finds its groups.
    config = assemble([f"survey={HUB_SURVEY}"], folder=tmp_path)
    assert config.survey == HUB_SURVEY
    assert participants(config) == ("France", "Peru")

    def fail(name, *, split):
        raise ConnectionError("Couldn't reach it\nlong story")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    refused(r"Couldn't reach it\); download its CSV and give survey = its path$", read.read_survey, HUB_SURVEY)
