"""The three real files, where `APPA_SURVEYS` names their folder: read whole, counted, split, carried to the groups."""

from __future__ import annotations

import csv
import json
from collections import defaultdict

import numpy as np
import pytest
from real_surveys import SURVEYS, needs_surveys
from surveys import bits, ids, read_group

from appa_flwr.config import split_names
from appa_flwr.config.sources import preset
from appa_flwr.survey import export, read
from appa_flwr.survey.names import ALIASES
from appa_flwr.survey.split import split_questions

COUNTRIES = split_names(str(preset("paper")["groups"]))
pytestmark = needs_surveys


def rows(name):
    with (SURVEYS / name).open(encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def pair_of(row):
    country = ALIASES.get(row["group"], row["group"])
    return f"{row['attribute']}/{row['group']}" if "attribute" in row else country, row["question_id"]


def rates(survey):
    return {(name, key): rate for name, mine in survey.refusal_rates.items() for key, rate in mine.items()}


@pytest.mark.parametrize("name", ["globalqa.jsonl", "opinionqa.jsonl", "gss_demographics.jsonl"])
def test_every_clean_row_is_kept_and_normalised(name):
    # An independent, plain reading of the file: sums of these rows are off one by thousandths at most.
    expected = {}
    for row in rows(name):
        shares = np.array(row["distribution"])
        assert len(row["options"]) == len(shares)
        assert abs(shares.sum() - 1) < 0.02
        expected[pair_of(row)] = shares / shares.sum()
    # No answer is lost: the two spellings of a country come from different surveys, and never answer the same question.
    assert len(expected) == len(rows(name))
    survey = read.read_survey(SURVEYS / name)
    assert survey.rejections == ()
    kept = {(group, key): shares for group, mine in survey.answers.items() for key, shares in mine.items()}
    assert set(kept) == set(expected)
    for key, shares in kept.items():
        np.testing.assert_allclose(shares, expected[key], rtol=1e-12)
    assert int(read.summary(survey)["kept"].sum()) == len(expected)
    assert name != "globalqa.jsonl" or {"Britain", "Great Britain"} < {row["group"] for row in rows(name)}


def test_the_papers_eight_countries():
    answered = {row["question_id"] for row in rows("globalqa.jsonl") if row["group"] in COUNTRIES}
    survey = read.read_survey(SURVEYS / "globalqa.jsonl", groups=COUNTRIES)
    assert survey.groups == COUNTRIES
    questions = read.read_questions(SURVEYS / "globalqa.jsonl", groups=COUNTRIES)
    assert questions == survey.questions
    assert set(ids(questions)) == answered
    split = split_questions(questions)
    assert 0.15 < len(split.test) / len(questions) < 0.25


def test_dropping_refusals_leaves_no_refusal_and_the_same_options_for_all(tmp_path):
    path = SURVEYS / "globalqa.jsonl"
    survey = read.read_survey(path, groups=COUNTRIES, refusals="drop")
    options = {option for question in survey.questions for option in question.options}
    assert not options & {"DK/Refused", "Don't know", "No answer", "Missing; Unknown", "Missing; Not available"}
    sizes = {question.question_id: len(question.options) for question in survey.questions}
    assert read.read_questions(path, groups=COUNTRIES, refusals="drop") == survey.questions
    for name in COUNTRIES[:2]:
        mine = read_group(path, name, refusals="drop")
        assert all(len(shares) == sizes[key] and abs(shares.sum() - 1) < 1e-9 for key, shares in mine.items())
    written = export.export_split(survey, tmp_path)
    assert read.read_questions(written.questions) == survey.questions
    assert bits(read_group(written.groups["Egypt"], "Egypt")) == bits(survey.answers["Egypt"])


def test_the_published_csv_gives_the_same_answers(tmp_path):
    # The file's rows put back into the shape in which the data are published: one row a question.
    public, answers = {}, defaultdict(lambda: defaultdict(list))
    for row in rows("globalqa.jsonl"):
        public[row["question_id"]] = (row["question"], row["options"])
        answers[row["question_id"]][row["group"]] = row["distribution"]
    with (tmp_path / "global.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["question", "selections", "options", "source"])
        for key, (text, options) in public.items():
            writer.writerow([text, str(answers[key]), options, ""])
    ours, published = (
        read.read_survey(SURVEYS / "globalqa.jsonl"),
        read.read_survey(tmp_path / "global.csv"),
    )
    new_ids = dict(zip(ids(ours.questions), ids(published.questions), strict=True))
    assert [(q.text, q.options) for q in published.questions] == [(q.text, q.options) for q in ours.questions]
    for name, mine in ours.answers.items():
        assert bits(published.answers[name]) == {new_ids[key]: shares for key, shares in bits(mine).items()}
    assert set(published.groups) == set(ours.groups)


def test_counts_and_refusals_beside_the_answers():
    kept = [row for row in rows("opinionqa.jsonl") if row["n"] >= 100]
    survey = read.read_survey(SURVEYS / "opinionqa.jsonl", refusals="separate", min_respondents=100)
    assert rates(survey) == pytest.approx(
        {pair_of(row): row["refusals"] / (row["refusals"] + row["n"]) for row in kept}
    )
    assert 0 < len(survey.rejections) == len(rows("opinionqa.jsonl")) - len(kept)
    gss = read.read_survey(SURVEYS / "gss_demographics.jsonl", refusals="separate")
    assert rates(gss) == {pair_of(row): row["refusal_rate"] for row in rows("gss_demographics.jsonl")}
