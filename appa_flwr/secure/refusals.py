"""Why a group takes no part in a secure sum: fixed words, so that nothing of its own can leave with them."""

from __future__ import annotations

from appa_flwr.core.errors import UserError

OTHER_ROSTER, NOT_ON_ROSTER, STRANGERS, FEW = "other-roster", "not-on-roster", "strangers", "few"
MASKED_BEFORE, OTHER_VIEW, NOT_ANSWERED = "masked-before", "other-view", "not-answered"
OTHER_WORLD, FEW_OWN = "other-world", "few-own"

REASONS = {
    OTHER_ROSTER: "the roster is not the one that its owner's policy names (roster)",
    NOT_ON_ROSTER: "its own key does not stand in the roster under its name",
    STRANGERS: "it was to sum without itself, or with groups that do not stand in the roster or did not take part",
    FEW: "it was to sum with fewer groups than its owner's policy asks for (least-cohort), or than two thirds of the"
    " roster or of those that share its masks",
    MASKED_BEFORE: "it has masked this round before: a round is masked once",
    OTHER_VIEW: "it has been told before that others have answered in this round",
    NOT_ANSWERED: "it has not masked the round that it is asked to unmask, or another sum in it",
    OTHER_WORLD: "the sum is of another catalogue, other target tables or another config than it was sent",
    FEW_OWN: "fewer than three groups might have numbers of their own in the sum (pluralllm.unseen-groups)",
}
"""A refusal's words, by its name."""


class Refused(UserError):
    """A group does not do what the server asked for; `name` is one of `REASONS`."""

    def __init__(self, name: str) -> None:
        super().__init__(f"secure sum: {REASONS[name]}")
        self.name = name
