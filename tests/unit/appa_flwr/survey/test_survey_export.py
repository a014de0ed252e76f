from __future__ import annotations

import json
import re

import numpy as np
import pytest
from surveys import bits, read_group, refused

from appa_flwr.survey import export, read
from appa_flwr.survey.types import Question, Survey

QUESTIONS = (
    Question("q1", "Wie groß?\nWählen Sie.", ("klein", "groß, sehr", "Don't know"), (1.0, 2.5, 9.0)),
    Question("q2", 'Is it "so"?', ("Yes", "No")),
)


@pytest.fixture
def survey():
    rng = np.random.default_rng(5)
    return Survey(
        QUESTIONS,
        {
            "POLPARTY/Democrat": {"q1": rng.dirichlet(np.ones(3)), "q2": rng.dirichlet(np.ones(2))},
            "India (Current national sample)": {"q1": rng.dirichlet(np.ones(3))},
            "Great Britain": {"q2": rng.dirichlet(np.ones(2))},
        },
    )


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_what_is_written_reads_back_the_same(tmp_path, survey):
    written = export.export_split(survey, tmp_path / "new" / "split")
    assert written.questions == tmp_path / "new" / "split" / "questions.jsonl"
    assert read.read_questions(written.questions) == survey.questions
    assert tuple(written.groups) == survey.groups
    for name, path in written.groups.items():
        assert list(bits(read_group(path, name)).items()) == list(bits(survey.answers[name]).items())
        assert read.group_names(path) == (name,)


def test_the_public_file_has_no_answers_and_a_private_file_one_group_only(tmp_path, survey):
    written = export.export_split(survey, tmp_path)
    for line in lines(written.questions):
        assert set(line) == {"question_id", "question", "options", "ordinal"}
    for name, path in written.groups.items():
        assert {line["group"] for line in lines(path)} == {name}
        text = path.read_text(encoding="utf-8")
        others = [shares for other in set(survey.groups) - {name} for shares in survey.answers[other].values()]
        assert not any(repr(float(shares[0])) in text for shares in others)
    # Nothing half-written is left beside them.
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {written.questions, *written.groups.values()}


def test_a_failed_write_keeps_the_earlier_file(tmp_path, survey):
    written = export.export_split(survey, tmp_path)
    before = written.groups["Great Britain"].read_bytes()
    broken = Survey(QUESTIONS, {"Great Britain": {"q2": np.array([0.5, 0.5]), "gone": np.array([0.5, 0.5])}})
    with pytest.raises(KeyError):
        export.export_split(broken, tmp_path)
    assert written.groups["Great Britain"].read_bytes() == before
    assert list((tmp_path / "groups").glob(".*")) == []


def test_slugs_are_safe_and_all_different():
    names = [
        "S. Korea", "s korea", "S/Korea", "Côte d'Ivoire", "中国", "日本", "../../etc", "NUL", "x" * 300, "s-korea-2",
    ]  # fmt: skip
    slugs = export.slugs(names)
    assert list(slugs) == names
    assert len(set(slugs.values())) == len(names)
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9-]{0,68}", slug) for slug in slugs.values())
    assert slugs["NUL"] != "nul"
    assert (slugs["Côte d'Ivoire"], slugs["../../etc"]) == ("cote-d-ivoire", "etc")


def test_a_folder_that_cannot_be_written_is_a_users_mistake(tmp_path, survey):
    file = tmp_path / "file"
    file.write_text("in the way")
    assert str(file) in refused("cannot be written", export.export_split, survey, file)
    (tmp_path / "questions.jsonl").mkdir()
    refused(r"questions\.jsonl: cannot be written", export.export_split, survey, tmp_path)


def test_counts_and_refusal_rates_travel_with_their_group(tmp_path):
    answers = {name: {"q2": np.array([0.25, 0.75])} for name in "AB"}
    known = {"respondents": {"A": {"q2": 40.0}}, "refusal_rates": {"A": {"q2": 0.125}}}
    written = export.export_split(Survey((QUESTIONS[1],), answers, **known), tmp_path)
    back = read.read_survey(written.groups["A"], refusals="separate", min_respondents=40)
    assert {"respondents": back.respondents, "refusal_rates": back.refusal_rates} == known
    assert "refusal" not in written.groups["B"].read_text()
    assert "refusal" not in written.questions.read_text()
