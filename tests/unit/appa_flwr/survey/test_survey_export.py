from __future__ import annotations

import json

import numpy as np
import pytest
from surveys import bits, read_group

from appa_flwr.errors import UserError
from appa_flwr.survey import export, read
from appa_flwr.survey.types import Question, Survey

QUESTIONS = (
    Question("q1", "Wie groß?\nWählen Sie.", ("klein", "groß, sehr", "Don't know"), (1.0, 2.5, 9.0)),
    Question("q2", 'Is it "so"?', ("Yes", "No")),
)


def survey() -> Survey:
    rng = np.random.default_rng(5)
    return Survey(
        QUESTIONS,
        {
            "POLPARTY/Democrat": {"q1": rng.dirichlet(np.ones(3)), "q2": rng.dirichlet(np.ones(2))},
            "India (Current national sample)": {"q1": rng.dirichlet(np.ones(3))},
            "Great Britain": {"q2": rng.dirichlet(np.ones(2))},
        },
    )


def test_what_is_written_reads_back_the_same(tmp_path):
    given = survey()
    written = export.export_split(given, tmp_path / "new" / "split")
    assert written.questions == tmp_path / "new" / "split" / "questions.jsonl"
    assert read.read_questions(written.questions, strict=True) == given.questions
    assert tuple(written.groups) == given.groups
    for name, path in written.groups.items():
        mine = read_group(path, name, strict=True)
        assert list(mine) == list(given.answers[name])
        assert bits(mine) == bits(given.answers[name])
        assert read.group_names(path) == (name,)


def test_the_public_file_has_no_answers_and_a_private_file_one_group_only(tmp_path):
    given = survey()
    written = export.export_split(given, tmp_path)
    for line in written.questions.read_text(encoding="utf-8").splitlines():
        assert set(json.loads(line)) == {"question_id", "question", "options", "ordinal"}
    for name, path in written.groups.items():
        groups = {json.loads(line)["group"] for line in path.read_text(encoding="utf-8").splitlines()}
        assert groups == {name}
        text = path.read_text(encoding="utf-8")
        for other in set(given.groups) - {name}:
            for shares in given.answers[other].values():
                assert repr(float(shares[0])) not in text
    # Nothing half-written is left beside them.
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == sorted(
        ["questions.jsonl", *(path.name for path in written.groups.values())]
    )


def test_a_failed_write_keeps_the_earlier_file(tmp_path):
    written = export.export_split(survey(), tmp_path)
    before = written.groups["Great Britain"].read_bytes()
    broken = Survey(QUESTIONS, {"Great Britain": {"q2": np.array([0.5, 0.5]), "gone": np.array([0.5, 0.5])}})
    with pytest.raises(KeyError):
        export.export_split(broken, tmp_path)
    assert written.groups["Great Britain"].read_bytes() == before
    assert list((tmp_path / "groups").glob(".*")) == []


def test_slugs_are_safe_and_all_different():
    names = [
        "S. Korea",
        "s korea",
        "S/Korea",
        "Côte d'Ivoire",
        "中国",
        "日本",
        "../../etc",
        "NUL",
        "x" * 300,
        "s-korea-2",
    ]
    slugs = export.slugs(names)
    assert list(slugs) == names
    assert len({slug.casefold() for slug in slugs.values()}) == len(names)
    for slug in slugs.values():
        assert slug == slug.lower()
        assert 0 < len(slug) < 70
        assert set(slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
        assert not slug.startswith("-")
    assert slugs["Côte d'Ivoire"] == "cote-d-ivoire"
    assert slugs["NUL"] != "nul"
    assert slugs["../../etc"] == "etc"


def test_a_folder_that_cannot_be_written_is_a_users_mistake(tmp_path):
    file = tmp_path / "file"
    file.write_text("in the way")
    with pytest.raises(UserError, match="cannot be written") as caught:
        export.export_split(survey(), file)
    assert str(file) in str(caught.value)
    (tmp_path / "questions.jsonl").mkdir()
    with pytest.raises(UserError, match=r"questions\.jsonl: cannot be written"):
        export.export_split(survey(), tmp_path)


def test_counts_and_refusal_rates_travel_with_their_group(tmp_path):
    shares = np.array([0.25, 0.75])
    given = Survey(
        (QUESTIONS[1],),
        {"A": {"q2": shares}, "B": {"q2": shares}},
        respondents={"A": {"q2": 40.0}},
        refusal_rates={"A": {"q2": 0.125}},
    )
    written = export.export_split(given, tmp_path)
    back = read.read_survey(written.groups["A"], refusals="separate", min_respondents=40)
    assert (back.respondents, back.refusal_rates) == ({"A": {"q2": 40.0}}, {"A": {"q2": 0.125}})
    assert "refusal" not in written.groups["B"].read_text()
    assert "refusal" not in written.questions.read_text()
