"""Reasons for which a group refuses a request: Flower error codes with fixed messages.

The messages are the same for every group, so they reveal nothing about a group's data.
"""

from appa_flwr.core.errors import UserError

FAILED, FORGOTTEN = 100, 101
SPENT, REPLIES_SPENT, OTHER_CATALOGUE, NEARLY_SAME, FEW_ANSWERS, WEAK_TRAINING = range(111, 117)
ONLY_SUMS, NO_ROSTER, OTHER_WORLD, LOW_TEMPERATURE, BAD_REQUEST = range(117, 122)
MAY_NOT_LEAVE = {
    name: code for code, name in enumerate(("votes", "training", "rewards", "predictions", "answers"), 130)
}
OTHER_ROSTER, STRANGERS, FEW, MASKED_BEFORE, NOT_LAST, OTHER_COHORT, CHANGES = range(140, 147)
OTHER_REFERENCE, PAST, NOT_ON_ROSTER = range(147, 150)

REFUSALS = {
    FORGOTTEN: "it has restarted, and needs the catalogue and PluralLLM again",
    SPENT: "it has given as many scores of a question as its owner's policy allows (scores-per-question)",
    REPLIES_SPENT: "as many of its replies rest on a question as its owner's policy allows (training-replies,"
    " own-score)",
    OTHER_CATALOGUE: "it has had another catalogue in this run: a run has one",
    NEARLY_SAME: "its answered questions differ from those of an earlier run by fewer than its owner's policy asks for"
    " (least-answers): the difference of two replies would tell single answers",
    FEW_ANSWERS: "it has answered fewer of the training questions than its owner's policy asks for (least-answers)",
    WEAK_TRAINING: "plain replies to so few optimizer steps would tell single answers; preset = deployed trains with"
    " enough, and run.sums = secure needs none",
    ONLY_SUMS: "its owner's policy names a roster: no number of it leaves but in secure sums",
    NO_ROSTER: "its owner's policy names no roster (appa group pin): it takes part in no secure sum",
    OTHER_WORLD: "the request is of another catalogue, other target tables or another config than it was sent",
    LOW_TEMPERATURE: "appa.temperature is under the least that its owner's policy allows (least-temperature): the sum"
    " would be nearly the worst-off group's own",
    BAD_REQUEST: "the request does not follow the protocol",
    **{code: f"its owner's policy lets no {name} leave (may-leave)" for name, code in MAY_NOT_LEAVE.items()},
    OTHER_ROSTER: "secure sum: the roster is not the one that its owner's policy names (roster)",
    STRANGERS: "secure sum: without itself, with a group twice, or with groups that do not stand in the roster",
    FEW: "secure sum: over fewer groups than its owner's policy asks for (least-cohort)",
    MASKED_BEFORE: "secure sum: it has masked this round, or a later one, before",
    NOT_LAST: "secure sum: it was to open another sum than the last that it has masked",
    OTHER_COHORT: "secure sum: it has opened this request for other groups: the two would tell what they differ by",
    CHANGES: "secure sum: its groups have changed in this run as often as its owner's policy allows (cohort-changes)",
    OTHER_REFERENCE: "secure sum: another reference of the weights, or other completed sums, in one iteration",
    PAST: "secure sum: of an iteration, or with a history, before the last that it has given",
    NOT_ON_ROSTER: "secure sum: its own key does not stand in the roster under its name",
}


class Refused(UserError):
    """The owner's policy or the protocol forbids a request; `code` is a key of `REFUSALS`."""

    def __init__(self, code: int) -> None:
        super().__init__(REFUSALS[code])
        self.code = code
