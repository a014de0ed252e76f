"""Reasons for which a group refuses a request: Flower error codes with fixed messages.

The messages are the same for every group, so they reveal nothing about a group's data.
"""

from appa_flwr.core.errors import UserError

FAILED, FORGOTTEN, OTHER_CATALOGUE, OTHER_CONTEXT, NO_ANSWERS = range(100, 105)
MAY_NOT_LEAVE = {
    name: code for code, name in enumerate(("votes", "training", "rewards", "predictions", "answers"), 130)
}

REFUSALS = {
    FORGOTTEN: "it has restarted, and needs the catalogue and PluralLLM again",
    OTHER_CATALOGUE: "it has had another catalogue in this run: a run has one",
    OTHER_CONTEXT: "the request is of another catalogue, other target tables or another config than it was sent",
    NO_ANSWERS: "it has answered none of the run's training questions: id, text and options must be the run's",
    **{code: f"its owner's policy lets no {name} leave (may-leave)" for name, code in MAY_NOT_LEAVE.items()},
}


class Refused(UserError):
    """The owner's policy or the protocol forbids a request; `code` is a key of `REFUSALS`."""

    def __init__(self, code: int) -> None:
        super().__init__(REFUSALS[code])
        self.code = code
