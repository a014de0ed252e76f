"""Which runs may begin with another run's SFT model."""

from __future__ import annotations

from pathlib import Path

import pytest

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.survey.types import Question
from server_app.policy import sft_checkpoint
from server_app.policy.base import Base

QUESTIONS = [Question(f"q{n}", f"Do you like {n}?", ("yes", "no"), False) for n in range(4)]
BASE = Base("cache/tiny-dpa-12ab", None, 1, (1,))  # type: ignore[arg-type]
LORA = {"policy.tuning": "lora"}


@pytest.fixture
def model(tmp_path) -> Path:
    """A folder as SFT leaves it, trained on the first two questions."""
    folder = tmp_path / "sft-model"
    folder.mkdir()
    (folder / "weights").write_bytes(b"1234")
    sft_checkpoint.write_card(folder, Config.load(LORA), BASE, QUESTIONS[:2])
    return folder


def config_of(folder: Path, **changes: object) -> Config:
    return Config.load({**LORA, "sft.checkpoint": str(folder), **changes})


def test_no_model_is_given_unless_the_key_names_one():
    assert sft_checkpoint.read_card(Config.load({}), QUESTIONS) is None


def test_the_model_is_copied_with_its_card(model, tmp_path):
    config = config_of(model, **{"sft.steps": 7, "rule": "min"})  # SFT's own keys do not matter, nor does the rule
    card = sft_checkpoint.read_card(config, QUESTIONS[2:])
    sft_checkpoint.take(config, card, BASE, tmp_path / "run" / "sft-model")
    copies = {path.name: path.read_bytes() for path in (tmp_path / "run" / "sft-model").iterdir()}
    assert copies == {path.name: path.read_bytes() for path in model.iterdir()}
    assert copies["weights"] == b"1234"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("task", "opa"),
        ("model", "some/where"),
        ("policy.prompt-style", "full"),
        ("policy.tuning", "full"),
        ("policy.lora-rank", 4),
    ],
)
def test_another_kind_of_run_is_refused_by_the_key(model, key, value):
    with pytest.raises(UserError, match=f"^sft.checkpoint = .* {key} = .* {value}"):
        sft_checkpoint.read_card(config_of(model, **{key: value}), QUESTIONS[2:])


def test_a_model_that_has_seen_a_held_out_question_is_refused(model):
    renamed = Question("other-id", *list(vars(QUESTIONS[1]).values())[1:])
    with pytest.raises(UserError, match=r"1 of this run's 3 held-out .*'other-id'"):
        sft_checkpoint.read_card(config_of(model), [*QUESTIONS[2:], renamed])


def test_a_model_of_another_base_is_refused(model, tmp_path):
    other = Base("cache/tiny-dpa-34cd", None, 1, (1,))  # type: ignore[arg-type]
    card = sft_checkpoint.read_card(config_of(model), QUESTIONS[2:])
    with pytest.raises(UserError, match=r"tiny-dpa-12ab.*tiny-dpa-34cd"):
        sft_checkpoint.take(config_of(model), card, other, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_folder_without_a_card_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"sft\.json"):
        sft_checkpoint.read_card(config_of(tmp_path), QUESTIONS)
