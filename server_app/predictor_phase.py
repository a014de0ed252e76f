"""PluralLLM as a phase: its weights, the groups' targets, and the card with their scores."""

from __future__ import annotations

from collections.abc import Mapping

from flwr.app import ArrayRecord

from appa_flwr.core.errors import UserError
from appa_flwr.run.cards import Card
from appa_flwr.run.run_files import WEIGHTS_FILE
from pluralllm import card as cards
from server_app.federation.ask import TooFew
from server_app.inputs import RunInputs
from server_app.predictor import pooled_scores
from server_app.predictor.checkpoint import load_weights, new_card, save_weights
from server_app.predictor.pretraining import Pretraining, pretrain


def train(
    run: RunInputs, start: ArrayRecord, checkpoint: tuple[Pretraining, Card] | None, answered: Mapping[str, int]
) -> None:
    """Weights into the run's folder, target tables to the groups, and the card with their scores beside the weights.

    Args:
        run: where and by whom.
        start: the untrained weights.
        checkpoint: weights to take instead of training any; see `read_checkpoint`.
        answered: training questions that each group has answered.

    Raises:
        UserError: a round in which no group trained, or fewer answered than `run.min-groups`.
    """
    pretraining = _pretraining(run, start, None if checkpoint is None else checkpoint[0])
    card = new_card(run.config, run.catalogue, answered, pretraining) if checkpoint is None else checkpoint[1]
    with run.folder.phase("targets") as phase:
        run.groups.send_targets(pretraining.weights)
        try:
            scores = pooled_scores.scores(run.groups, run.catalogue, run.config.unseen_group_names)
        except TooFew:
            phase.step(1, 1, "NO SCORES OF PLURALLLM: too few groups let them leave")
        else:
            card = card.model_copy(update=scores)
            for part, predictors in card.scores.items():
                shown = ", ".join(f"{name} {score['js']:.3f}" for name, score in predictors.items())
                phase.step(1, 1, f"JS against survey answers, {part}: {shown}")
        cards.write(run.folder.path / WEIGHTS_FILE, card)


def _pretraining(run: RunInputs, start: ArrayRecord, checkpoint: Pretraining | None) -> Pretraining:
    """That of an earlier session or of the checkpoint, or else of the groups now."""
    path, config = run.folder.path / WEIGHTS_FILE, run.config
    with run.folder.phase("pluralllm") as phase:
        if (kept := load_weights(path, start)) is not None:
            phase.step(1, 1, f"resumed: the weights are those in {WEIGHTS_FILE}")
            return kept
        if checkpoint is not None:
            phase.step(1, 1, f"the weights are those in {config.pluralllm.checkpoint}")
        elif not set(run.groups.present) - set(config.unseen_group_names):
            raise UserError("only unseen groups have joined; PluralLLM needs a group to train on")
        else:
            checkpoint = pretrain(
                run.groups, config, start, progress=lambda step, of, loss: phase.step(step, of, f"loss {loss:.4f}")
            )
        save_weights(path, checkpoint)
        return checkpoint
