"""The card beside PluralLLM's weights: it says where they may be used, and a run that it does not fit is refused.

Axis letters: Q questions, K options, E embedding.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from report_runs import predictor_card

from appa_flwr.core.errors import UserError
from appa_flwr.run.cards import Card, EmbeddingSummary, SurveySummary
from appa_flwr.survey.types import Question
from pluralllm import card as cards

QUESTIONS = tuple(Question(f"q{n}", f"What about {n}?", ("yes", "no"), None) for n in range(6))
HELD_OUT = QUESTIONS[4:]
FEATURES = EmbeddingSummary(encoder="ngrams", probe=(0.5, -1.25, 0.0))
CARD = Card.model_validate_json(json.dumps(predictor_card())).model_copy(
    update={
        "architecture": "residual",
        "embedding": FEATURES,
        "survey": SurveySummary(
            table=cards.table_hash(QUESTIONS),
            training=tuple(cards.question_hash(question) for question in QUESTIONS[:4]),
            num_questions=6,
            num_held_out=2,
            split_seed=7,
            test_fraction=0.3,
            groups={"Avaria": 4, "Belmora": 3},
            unseen_groups={"Castria": 2},
        ),
    }
)


def features(**changes):
    return FEATURES.model_copy(update=changes)


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "best.safetensors"
    path.write_bytes(b"weights")
    cards.write(path, CARD)
    return path


def fits(weights, **changes):
    run = {
        "architecture": "residual",
        "embedding": FEATURES,
        "questions": QUESTIONS,
        "held_out": HELD_OUT,
        "unseen_groups": ("Castria", "Dorvane"),
    }
    cards.check_fit(cards.read(weights), weights, **{**run, **changes})


def test_a_card_is_read_as_it_was_written_and_fits_its_own_run(weights):
    found = cards.read(weights)
    assert found.model_copy(update={"weights": ""}) == CARD
    assert [path.name for path in weights.parent.iterdir() if path.suffix == ".json"] == ["best.json"]
    fits(weights)
    fits(weights, questions=QUESTIONS[::-1])  # a table's order changes no feature
    fits(weights, embedding=features(probe=(0.5001, -1.2501, 0.0)))  # another machine
    fits(weights, embedding=features(encoder="/elsewhere/the/same/model"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"embedding": features(encoder="minilm", probe=(0.5, 1.25, 0.0))},
            "features of its questions are other.* pluralllm.encoder = minilm; it was trained with ngrams",
        ),
        ({"architecture": "attention"}, "architecture = residual, and this run has att"),
        ({"questions": QUESTIONS[:5]}, "another table of 6 questions, and this run has 5"),
        ({"held_out": QUESTIONS[3:5]}, r"1 of this run's 2 held-out questions, such as 'q3'; use its seed = 7 a"),
        ({"held_out": (replace(QUESTIONS[0], question_id="another"),)}, "such as 'another'"),  # the same by another id
        ({"unseen_groups": ("Belmora",)}, "group 'Belmora' has trained it, so pluralllm.unseen-groups cannot name it"),
    ],
)
def test_a_run_that_a_checkpoint_does_not_fit_is_refused_in_one_line(weights, changes, says):
    with pytest.raises(UserError, match=says) as refused:
        fits(weights, **changes)
    assert str(refused.value).startswith(f'pluralllm.checkpoint = "{weights}"')
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda w: w.unlink(), "there is no file .*best.safetensors; give"),
        (lambda w: w.with_suffix(".json").unlink(), "there is no file .*best.json; give"),
        (lambda w: w.with_suffix(".json").write_text('{"format": 2}'), "format 2, and this version reads format 7"),
        (lambda w: w.write_bytes(b"other"), "best.json belongs to other weights"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(weights, damage, says):
    damage(weights)
    with pytest.raises(UserError, match=says) as refused:
        cards.read(weights)
    assert "\n" not in str(refused.value)


def test_the_probe_is_the_same_whatever_the_order_of_the_questions():
    rng = np.random.default_rng(0)
    value_QKE = rng.normal(size=(6, 2, 3)).astype(np.float32)
    probed = cards.probe(value_QKE, QUESTIONS)
    assert probed == cards.probe(value_QKE[::-1], QUESTIONS[::-1])
    assert any(np.allclose(probed, row, atol=1e-4) for row in value_QKE[:, 0])
