"""The owner's policy, a file that limits what a group's node does and sends, whatever a run's config says.

A deployed node rereads the file for each message; a simulation has no owners, and allows everything.
"""

import json
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from appa_flwr.core.errors import UserError, unknown_name

OWNER_POLICY_VARIABLE = "APPA_POLICY"
"""Environment variable with the policy's path, for `appa_flwr.owner.guard`, which starts before messages are read."""

SUM_ROUNDING = 0.1
"""A deployed node rounds PluralLLM's errors and scores, summed over the group's answers, to multiples of this."""

Leaving = Literal["votes", "training", "rewards", "predictions", "answers", "truth"]
_SHA256 = r"[0-9a-f]{64}"


class OwnerPolicy(BaseModel):
    """The owner's decisions, one key of the TOML file each; a missing key has the default given here."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        alias_generator=lambda name: name.replace("_", "-"),
        populate_by_name=True,
        use_attribute_docstrings=True,
    )

    may_leave: list[Leaving] = Field(["votes", "training", "rewards"])
    """Kinds of numbers that may leave. votes: the option that most of the group chose, or the group's ranking.
    training: updates and errors of PluralLLM, the small model that learns to predict the group's answers. rewards:
    how well the language model's answers fit PluralLLM's predictions. predictions: the predictions themselves; in a
    secure sum they leave with votes. answers: the group's answers to training questions. truth: how well the language
    model's answers fit the group's answers; a few such scores reveal an answer."""
    least_answers: int = Field(10, ge=1)
    """Fewest answers of the group that a reply about PluralLLM uses. The answered questions of two runs must be the
    same or differ by at least this number."""
    scores_per_question: int = Field(0, ge=0)
    """Most scores of the language model's answers to one question, over all runs. Each score reveals a little of the
    group's prediction or answer. 0 = no limit."""
    training_replies: int = Field(200, ge=0)
    """Most updates of PluralLLM, over all runs, that use the group's answer to one question. The limit for
    replies with PluralLLM's errors is a tenth of this number. 0 = no limit."""
    least_cohort: Literal[0] | Annotated[int, Field(ge=3)] = 0
    """Fewest groups in a secure sum, this group included. The server learns only the total of a secure sum. 0 = all
    groups of the roster but one, and at least 3."""
    cohort_changes: int = Field(2, ge=0)
    """Most changes of the groups in a run's secure sums. Two sums that differ by one group reveal that group's
    numbers."""
    roster: str = Field("", pattern=rf"^({_SHA256})?$")
    """Fingerprint (SHA-256) of the roster, the list of groups that add up their numbers. With a roster, numbers leave
    only in secure sums over its groups, except own scores (own-score). `appa group pin` writes this line. Empty = the
    server sees the group's own numbers."""
    least_temperature: float = Field(0.02, ge=0)
    """Lowest appa.temperature of a run with secure sums. At a lower temperature, a sum is closer to the numbers of
    the worst-off group."""
    own_score: int = Field(100, ge=0)
    """Most times, over all runs, that a question counts in an own score: the group's mean score in an evaluation, over
    at least least-answers questions, to two decimals. Own scores leave outside the secure sums. 0 = none leaves."""
    bundle: str = Field("", pattern=rf"^\s*({_SHA256}\s*)*$")
    """Fingerprints (SHA-256) of the programs that may run here; `appa group bundle` prints the fingerprint of a copy
    that you trust. The start script runs no other program. Empty = any program that the server sends."""

    def may(self, name: str) -> bool:
        """True if numbers of this kind, a word of `may-leave`, may leave."""
        return name in self.may_leave


SIMULATION = OwnerPolicy(
    may_leave=list(get_args(Leaving)),
    least_answers=1,
    training_replies=0,
    least_temperature=0.0,
    own_score=2**31,
)
"""Policy of a simulation: everything may leave, without limits."""


def read_owner_policy(path: Path) -> OwnerPolicy:
    """Read the owner's file; raises UserError if it cannot be read, or if a key is unknown or has a wrong value."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path}: is not a TOML file ({error})") from None
    if unknown := values.keys() - described().keys():
        raise UserError(f"{path}: {unknown_name('key', min(unknown), valid=described())}")
    try:
        return OwnerPolicy.model_validate(values)
    except ValidationError as error:
        wrong = error.errors()[-1]
        raise UserError(f"{path}: {wrong['loc'][0]} = {wrong['input']!r}: {wrong['msg']}") from None


def described() -> dict[str, str]:
    """Key -> its description."""
    return {field.alias or name: field.description or "" for name, field in OwnerPolicy.model_fields.items()}


def owner_policy_file(*, bundle: str = "") -> str:
    """Text of a policy file: every key with its description and default, and with this `bundle` pinned."""
    values = OwnerPolicy(bundle=bundle).model_dump(by_alias=True)
    comment = {key: textwrap.indent(textwrap.fill(says, 100), "# ") for key, says in described().items()}
    return "\n".join(f"{comment[key]}\n{key} = {json.dumps(value)}\n" for key, value in values.items())


def owner_policy_of(node_config: Mapping[str, object]) -> OwnerPolicy:
    """Policy of a node: from its file (`policy`), the defaults without a file, `SIMULATION` in a simulation."""
    if not node_config.get("group"):
        return SIMULATION
    path = str(node_config.get("policy", ""))
    return read_owner_policy(Path(path)) if path else OwnerPolicy()
