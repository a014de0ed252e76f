"""The catalogue of a run: the features that its config asks for."""

import numpy as np
import pytest
from small import keys_of
from surveys import row, write

from appa_flwr.config import Config
from appa_flwr.survey import store
from server_app.questions import build_catalogue, run_survey

GROUPS = ("North", "South")
YES_NO = ("Yes", "No")


@pytest.fixture
def survey_file(tmp_path):
    """Forty questions that both groups answered, and three that only a group answered which takes no part."""
    rows = [
        row(f"q{q}", group, [0.4, 0.6], options=YES_NO, question=f"Is topic number {q} of any interest to you?")
        for q in range(40)
        for group in GROUPS
    ]
    others = [row(f"x{q}", "East", [0.9, 0.1], options=YES_NO, question=f"What about matter {q}?") for q in range(3)]
    return write(tmp_path / "survey.jsonl", rows + others)


def catalogue_by(survey_file, **changes):
    keys = {"survey": str(survey_file), "groups": ",".join(GROUPS)}
    return build_catalogue(Config.load({**keys, **keys_of(changes)}))


def ids(catalogue, of_Q):
    return [catalogue.questions[q].question_id for q in np.flatnonzero(of_Q)]


def test_questions_of_other_groups_are_learned_from_and_never_held_out(survey_file):
    plain = catalogue_by(survey_file, data__extra_questions="")
    assert not plain.unanswered_Q.any()
    assert not catalogue_by(survey_file, groups="").unanswered_Q.any()  # every group takes part
    catalogue = catalogue_by(survey_file)
    assert ids(catalogue, catalogue.unanswered_Q) == ["x0", "x1", "x2"]
    assert not (catalogue.train_Q & catalogue.unanswered_Q).any()
    assert ids(catalogue, catalogue.held_out_Q) == ids(plain, plain.held_out_Q) == ids(plain, ~plain.train_Q)
    assert ids(catalogue, catalogue.train_Q) == ids(plain, plain.train_Q)


def test_a_file_brings_more_questions_but_no_copy_of_a_held_out_one_and_none_twice(survey_file, tmp_path):
    plain = catalogue_by(survey_file, data__extra_questions="")
    held_out, training = ids(plain, plain.held_out_Q)[0], ids(plain, plain.train_Q)[0]
    text = {question.question_id: question.text for question in plain.questions}
    rows = [
        ("same", text[held_out].upper() + " ", YES_NO),
        ("other options", text[held_out], ("Yes", "No", "Both")),
        ("as a training one", text[training], YES_NO),
        (training, "another text under a known id", YES_NO),
        ("new", "Should the bridge be rebuilt?", YES_NO),
        ("new", "Should the bridge be rebuilt?", YES_NO),
    ]
    names = ("question_id", "question", "options")
    path = write(tmp_path / "more.jsonl", [dict(zip(names, values, strict=True)) for values in rows])
    catalogue = catalogue_by(survey_file, data__extra_questions=str(path))
    assert ids(catalogue, catalogue.unanswered_Q) == ["x0", "x1", "x2", "other options", "as a training one", "new"]


def test_the_generated_survey_has_two_unasked_texts_to_each_asked_one():
    catalogue = build_catalogue(Config.load({"data.num-questions": 30, "data.num-groups": 3}))
    assert (len(catalogue.questions), catalogue.unanswered_Q.sum()) == (90, 60)
    texts = [question.text for question in catalogue.questions]
    assert len(set(texts)) == 90
    every = build_catalogue(Config.load({"data.num-questions": 90, "data.num-groups": 3, "data.extra-questions": ""}))
    assert sorted(question.text for question in every.questions) == sorted(texts)


def test_a_run_and_the_folder_of_its_baseline_rule_read_the_survey_that_the_run_kept(survey_file, tmp_path):
    kept = run_survey(Config.load({"survey": str(survey_file), "groups": "North"}))
    (tmp_path / "runs" / "r").mkdir(parents=True)
    store.write(kept, tmp_path / "runs" / "r" / "survey.jsonl")
    survey_file.unlink()
    for name in ("r", "r/average"):
        place = tmp_path / "runs" / name
        config = Config.load({"survey": str(survey_file), "run.output-dir": str(place.parent), "run-name": place.name})
        assert run_survey(config).groups == ("North",)


def test_a_run_s_keys_decide_on_refusals_and_small_samples(tmp_path):
    options = ("Yes", "No", "Refused")
    rows = [
        row("a", "North", [0.2, 0.3, 0.5], options=options, n=90),
        row("b", "North", [0.6, 0.4], options=YES_NO, n=20),
    ]
    file = write(tmp_path / "survey.jsonl", rows)
    for keys, shares in (
        ({}, {"a": [0.2, 0.3, 0.5], "b": [0.6, 0.4]}),
        ({"data.refusals": "drop"}, {"a": [0.4, 0.6], "b": [0.6, 0.4]}),
        ({"data.min-respondents": 40}, {"a": [0.2, 0.3, 0.5]}),
    ):
        config = Config.load({"survey": str(file), "run.output-dir": str(tmp_path), **keys})
        answers = {key: own.tolist() for key, own in run_survey(config).answers["North"].items()}
        assert answers == {key: pytest.approx(own) for key, own in shares.items()}
