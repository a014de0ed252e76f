"""The PluralLLM phase: train the weights, let groups compute their targets, and write the card with scores.

The scores come from the groups' sums.

Axis letters: L the sums `pluralllm.scores.SUMS`.
"""

from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from appa_flwr.core.arrays import FloatArray
from appa_flwr.protocol.queries import SCORES, Catalogue, Query
from appa_flwr.run.records import Card, PredictorScores
from appa_flwr.run.schema import BY_MEAN, WEIGHTS_FILE
from pluralllm.residual import SHARES_KEY
from pluralllm.scores import MEASURES, PREDICTORS, SUMS
from server_app import log
from server_app.federation.groups import Groups
from server_app.federation.replies import TooFew
from server_app.inputs import RunInputs
from server_app.predictor.checkpoint import load, new_card, save, write_card
from server_app.predictor.pretraining import pretrain

ROUNDING = 1e-6
"""The sum of rewards that are all 1 may be slightly above their number."""


def train(run: RunInputs, start: ArrayRecord, checkpoint: tuple[ArrayRecord, Card] | None) -> None:
    """Train or load the weights, let the groups write their target tables, and write the card beside the weights.

    `start` has the untrained weights, `checkpoint` weights and their card to use instead of training. Raises the errors
    of `pretrain`.
    """
    config, path, answered = run.config, run.folder.path / WEIGHTS_FILE, run.groups.members.answered()
    phase = run.folder.phase("pluralllm")
    if path.exists() and path.with_suffix(".json").exists():
        phase.step(1, 1, f"resumed: the weights are those in {WEIGHTS_FILE}")
        weights, card = load(path, config, run.catalogue, start)
    else:
        if checkpoint is not None:
            weights, card = checkpoint
            phase.step(1, 1, f"the weights are those in {config.pluralllm.checkpoint}")
        else:
            weights, losses, distances = pretrain(
                run.groups, config, start, progress=lambda step, of, loss: phase.step(step, of, f"loss {loss:.4f}")
            )
            card = new_card(config, run.catalogue, answered, losses, distances)
        save(path, weights, card)
    phase = run.folder.phase("targets")
    run.groups.send_targets(weights)
    if by_mean := run.groups.members.by_mean():
        run.folder.progress(BY_MEAN, 1, 1, by_mean, None)
    try:
        agreement = scores(run.groups, run.catalogue)
    except TooFew:
        phase.step(1, 1, "NO SCORES OF PLURALLLM: too few groups let them leave")
    else:
        card = card.model_copy(update=agreement)
        shown = ", ".join(f"{name} {score['js']:.3f}" for name, score in card.scores.items())
        phase.step(1, 1, f"JS against survey answers: {shown or 'none'}{_kernels(weights)}")
    write_card(path, card)


def _kernels(weights: ArrayRecord) -> str:
    """Text of the choice among `pluralllm.residual.SHARES`; empty for the attention network."""
    if SHARES_KEY not in weights:
        return ""
    features, plain = weights[SHARES_KEY].numpy()
    return f"; kernels with learned features count {features:g}, the view without a network {plain:g}"


def scores(groups: Groups, catalogue: Catalogue) -> dict[str, Any]:
    """A `Card`'s "scores", means over all answers to held-out questions, and "groups", those of each group.

    Raises:
        UserError: too few groups answered.
    """
    replies = groups.ask(Query(SCORES, settings={"size": len(SUMS)}))
    size = int(catalogue.held_out_Q.sum())
    usable: dict[str, FloatArray] = {}
    for name, score_L in zip(replies.groups, replies.each("scores"), strict=True):
        if why := fault(score_L, size):
            log.warning("group %s: its scores of PluralLLM are left out: %s", name, why)
        else:
            usable[name] = score_L
    total_L = np.sum([*usable.values()], axis=0) if usable else np.zeros(len(SUMS))
    return {"scores": means(total_L), "groups": {name: means(score_L) for name, score_L in usable.items()}}


def fault(score_L: FloatArray, size: int) -> str | None:
    """Fault in a group's sums over at most `size` held-out questions, in words; None if they can be used."""
    by_measure = score_L.reshape(len(PREDICTORS), -1)
    count, measures = by_measure[:, 0], by_measure[:, 1:]
    if (count != np.round(count)).any() or (count > size).any():
        return "more answers than there are questions, or a part of one"
    # Scores are compared with each other, so they must be of the same answers.
    if (count != count[0]).any():
        return "predictors scored on different answers"
    if (measures > count[:, None] + ROUNDING).any():
        return "sums above the number of answers"
    return None


def means(score_L: FloatArray) -> PredictorScores:
    """Compute means from sums over answers; a predictor without answers is left out."""
    by_predictor = zip(PREDICTORS, score_L.reshape(len(PREDICTORS), -1).tolist(), strict=True)
    return {
        name: dict(zip(MEASURES, (count, *(total / count for total in totals)), strict=True))
        for name, (count, *totals) in by_predictor
        if count
    }
