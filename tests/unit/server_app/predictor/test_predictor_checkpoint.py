"""PluralLLM's checkpoint: the card says where its weights may be used, and a run that it does not fit is refused.

Axis letters: Q questions, K options, E embedding.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from fakes import catalogue_of
from flwr.app import Array, ArrayRecord
from report_runs import predictor_card
from surveys import refused

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.run.records import Card
from server_app.predictor.checkpoint import load, new_card, save, write_card

TRAIN = (True,) * 4 + (False,) * 2
CATALOGUE = replace(
    catalogue_of([2] * 6, train=TRAIN), embedding_QKE=np.arange(36, dtype=np.float32).reshape(6, 2, 3) - 17.5
)
KEYS = {"seed": 7, "data.test-fraction": 0.3}
CONFIG = Config.load(KEYS)


def record(**arrays):
    return ArrayRecord({name: Array(np.asarray(array, np.float32)) for name, array in arrays.items()})


ANSWERED = {"Avaria": 4, "Belmora": 3}
SCORES = Card.model_validate_json(json.dumps(predictor_card())).scores
CARD = new_card(CONFIG, CATALOGUE, ANSWERED, [0.5], [{"A": 1.2504, "B": 2.0}]).model_copy(update={"scores": SCORES})


def by(order, **changes):
    """The catalogue's questions in this order."""
    rows = {name: getattr(CATALOGUE, name)[order] for name in ("train_Q", "embedding_QKE", "option_QK", "unanswered_Q")}
    return replace(CATALOGUE, questions=tuple(CATALOGUE.questions[q] for q in order), **{**rows, **changes})


WEIGHTS = record(z=np.arange(6.0).reshape(2, 3), a=np.arange(4.0).T)


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "best.safetensors"
    save(path, WEIGHTS, CARD)
    return path


def card_of(weights, catalogue=CATALOGUE, **keys):
    """The card of weights that a run with these questions and keys loads."""
    return load(weights, Config.load({**KEYS, **keys}), catalogue, WEIGHTS)[1]


def test_a_card_is_read_as_it_was_written_and_fits_its_own_run(weights):
    assert card_of(weights).model_copy(update={"weights": ""}) == CARD
    assert CARD.survey.groups == ANSWERED
    assert (CARD.losses, CARD.distances) == ((0.5,), ({"A": 1.25, "B": 2.0},))
    assert (CARD.survey.num_questions, len(CARD.survey.training)) == (6, 4)
    assert [path.name for path in weights.parent.iterdir() if path.suffix == ".json"] == ["best.json"]
    card_of(weights, by([5, 4, 3, 2, 1, 0]))  # a table's order changes no feature
    card_of(weights, by([*range(6)], embedding_QKE=CATALOGUE.embedding_QKE + 1e-4))  # another machine
    card_of(weights, **{"pluralllm.encoder": "/elsewhere/the/same/model"})
    card_of(weights, by([*range(6)], train_Q=np.arange(6) < 3, unanswered_Q=np.arange(6) == 3))  # one unanswered here


def test_weights_of_another_network_and_damaged_ones_are_refused(weights):
    for other in ({"z": WEIGHTS["z"]}, {**WEIGHTS, "a": Array(np.zeros(3, np.float32))}):
        with pytest.raises(UserError, match=r"best\.safetensors: its weights do not fit .* = residual"):
            load(weights, CONFIG, CATALOGUE, ArrayRecord(other))
    whole = weights.read_bytes()
    for spoilt in (whole[:-3], b""):
        weights.write_bytes(spoilt)
        write_card(weights, CARD)
        with pytest.raises(UserError, match=r"best\.safetensors: cannot be read"):
            load(weights, CONFIG, CATALOGUE, WEIGHTS)


OTHER_ID = tuple(replace(question, question_id=f"new {question.question_id}") for question in CATALOGUE.questions)


@pytest.mark.parametrize(
    ("catalogue", "keys", "says"),
    [
        (by([*range(6)], embedding_QKE=-CATALOGUE.embedding_QKE), {"pluralllm.encoder": "minilm"}, "minilm; .*ngrams"),
        (by([*range(5)]), {}, "another table of 6 questions, and this run has 5"),
        (by([*range(6)], train_Q=np.arange(6) < 3), {}, "1 of this run's 3 held-out questions, such as 'Q3'; .*= 7"),
        (replace(CATALOGUE, questions=OTHER_ID, train_Q=np.arange(6) > 0), {}, "such as 'new Q0'"),
        # of a run with a larger test fraction, and of groups that answered one question less
        (by([*range(6)], train_Q=np.arange(6) < 5), {}, "not trained on 1 of this run's 5 training .*'Q4'; .*= 0.3"),
    ],
)
def test_a_run_that_a_checkpoint_does_not_fit_is_refused_in_one_line(weights, catalogue, keys, says):
    refused(f"^{weights}: .*{says}", card_of, weights, catalogue, **keys)


def test_a_card_without_its_weights_is_refused_and_weights_without_their_card(weights):
    weights.write_bytes(b"other")
    with pytest.raises(UserError, match=r"best\.json belongs to other weights"):
        card_of(weights)
    weights.with_suffix(".json").unlink()
    with pytest.raises(UserError, match=r"there is no file .*best\.json; give"):
        card_of(weights)
