"""The card beside an SFT model, and which runs may begin with the SFT model of another (`sft.checkpoint`)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from appa_flwr.config import Config, Scalar
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replaced_folder
from appa_flwr.run.cards import SFTCard
from appa_flwr.run.run_files import SFT_CARD, write
from appa_flwr.survey.types import Question
from pluralllm.card import question_hash
from server_app.policy.base import Base

KEY = "sft.checkpoint"
SHARED = ("task", "model", "policy.tuning", "policy.prompt-style")
"""Keys that the run of the model and a run that begins with it have in common, beside the model's own folder."""
SHARED_ADAPTER = ("policy.lora-rank", "policy.sft-targets")


def write_card(folder: Path, config: Config, base: Base, questions: Sequence[Question]) -> None:
    """Put the card beside an SFT model that was trained on `questions`."""
    settings = {key: value for key, value in config.flat().items() if key.startswith("sft.") and key != KEY}
    settings |= _shared(config)
    hashes = tuple(sorted(question_hash(question) for question in questions))
    write(folder / SFT_CARD.name, SFTCard(base=base.identity, questions=hashes, settings=settings))


def read_card(config: Config, held_out: Sequence[Question]) -> SFTCard | None:
    """The card of the SFT model that `sft.checkpoint` names; None where it names none.

    Raises:
        UserError: there is none, or this run cannot begin with it: another base model, task or prompt, or it was
            trained on a question that this run holds out.
    """
    if not config.sft.checkpoint:
        return None
    where, folder = f'{KEY} = "{config.sft.checkpoint}"', Path(config.sft.checkpoint)
    card = SFT_CARD.read(folder)
    if card is None:
        raise UserError(f"{where}: there is no {SFT_CARD.name} in it; give the sft-model of an earlier run")
    for key, mine in _shared(config).items():
        if mine != (its := card.settings.get(key)):
            raise UserError(f"{where}: was trained with {key} = {its}, and this run has {mine}; use the same")
    trained = set(card.questions)
    leaked = [question for question in held_out if question_hash(question) in trained]
    if leaked:
        raise UserError(
            f"{where}: was trained on {len(leaked)} of this run's {len(held_out)} held-out questions, such as "
            f"'{leaked[0].question_id}'; use the survey, seed and data.test-fraction of its run"
        )
    return card


def take(config: Config, card: SFTCard, base: Base, folder: Path) -> None:
    """Copy the SFT model of `read_card` into this run's folder.

    Raises:
        UserError: it was made of another base model.
    """
    if card.base != base.identity:
        raise UserError(
            f'{KEY} = "{config.sft.checkpoint}": was made of the base model {card.base}, and this run has '
            f"{base.identity}; use the same model (the tiny one is built of survey and seed)"
        )
    with replaced_folder(folder) as beside:
        shutil.copytree(config.sft.checkpoint, beside, dirs_exist_ok=True)


def _shared(config: Config) -> dict[str, Scalar]:
    keys = SHARED + (SHARED_ADAPTER if config.policy.tuning != "full" else ())
    flat = {**config.flat(), "policy.prompt-style": config.prompt_style}
    return {key: flat[key] for key in keys}
