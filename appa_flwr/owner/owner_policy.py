"""The owner's policy, a file: what a group's node takes part in and gives away, whatever a run's config says.

A deployed node reads it anew for each message; a simulation has no owners, and allows everything.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from appa_flwr.core.errors import UserError

OWNER_POLICY_VARIABLE = "APPA_POLICY"
"""Names the owner's policy to the guard (`appa_flwr.owner.guard`), which starts before a message is read."""


class OwnerPolicy(BaseModel):
    """The owner's decisions, a key of their TOML file each; what the file leaves out is as here."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        alias_generator=lambda name: name.replace("_", "-"),
        populate_by_name=True,
    )

    bundle: str = Field(
        "",
        pattern=r"^\s*([0-9a-f]{64}\s*)*$",
        description="SHA-256 of the app bundle that may run here (appa group bundle), or several; empty = any; it "
        "needs the guard that the start script puts before Flower's programs",
    )
    metrics: str | None = Field(
        "",
        pattern=r"^\s*([\w.]+:\w+(\s+|$))*$",
        description="reward metrics beyond appa-flwr's own that may score here, MODULE:FUNCTION, or several; their "
        "code has to be installed here",
    )
    roster: str = Field(
        "",
        pattern=r"^([0-9a-f]{64})?$",
        description="SHA-256 of the roster of secure sums (appa group roster): no score, vote, weight or error leaves"
        " but under masks, in sums with the groups that stand there; empty = in replies of its own",
    )
    least_cohort: int = Field(3, ge=3, description="groups, this one included, that a secure sum is over at least")
    own_score: bool = Field(
        True, description="beside secure sums, give the group's own alignment score of each evaluation, one number"
    )
    own_scores: int = Field(
        100,
        ge=0,
        description="such scores, of all runs together, that rest on a question; each over least-answers questions or "
        "more, to two decimals; 0 = any number",
    )
    training: bool = Field(True, description="train PluralLLM: weights and their errors leave")
    votes: bool = Field(True, description="vote for SFT: winning options leave, or with task=opa rankings")
    truth: bool = Field(False, description="score against own answers to held-out questions: a few scores tell one")
    probes: bool = Field(
        False,
        description="score what the server calls probes for ceilings, and vote with predictions "
        "(sft.target=predicted-mean): both tell predictions",
    )
    mean: bool = Field(False, description="vote with distributions (sft.target=mean, look-ups): training answers leave")
    least_answers: int = Field(
        10,
        ge=1,
        description="own answers behind every reply about PluralLLM, and by which the answered questions of two runs "
        "differ where they do",
    )
    sgd: bool = Field(False, description="train PluralLLM by plain SGD: a step is a sum of single answers")
    least_steps: int = Field(16, ge=1, description="optimizer steps of a training round")
    secret_draws: bool = Field(
        True,
        description="draw what a training round learns from by a secret of this node, so that nobody can repeat the "
        "round with guessed answers; false = as a simulation does",
    )
    sum_rounding: float = Field(
        0.1,
        ge=0,
        le=1,
        description="errors and scores of PluralLLM, added up over own answers, are rounded to multiples of this; "
        "0 = not at all, as a simulation does",
    )
    training_replies: int = Field(
        200, ge=0, description="rounds, of all runs together, that train on a question; 0 = any"
    )
    validation_replies: int = Field(
        20, ge=0, description="errors, of all runs together, that rest on the answer to a question; 0 = any number"
    )
    target_replies: int = Field(
        10, ge=0, description="sums of scores, of all runs together, that rest on the answer to a question; 0 = any"
    )
    scores_per_question: int = Field(
        0, ge=0, description="scores against the prediction of one question, of all runs together; 0 = any number"
    )
    truth_scores_per_question: int = Field(
        0, ge=0, description="scores against the own answer to one question, of all runs together; 0 = any number"
    )
    reward_decimals: int = Field(15, ge=1, le=15, description="rewards are rounded to so many decimals")
    reward_noise: float = Field(
        0.0, ge=0, le=1, description="standard deviation of what is added to rewards, the same for the same answer"
    )

    def allows(self, metric: str) -> bool:
        """True if answers may be scored by a metric: one of ours, or one that the owner names; in a simulation any."""
        return ":" not in metric or self.metrics is None or metric in self.metrics.split()

    @property
    def changes_rewards(self) -> bool:
        """True if rewards leave otherwise than they were computed."""
        return self.reward_noise > 0 or self.reward_decimals < 15


AS_IN_SIMULATION: dict[str, object] = {
    "least_answers": 1,
    "sgd": True,
    "least_steps": 1,
    "secret_draws": False,
    "sum_rounding": 0.0,
    "training_replies": 0,
    "validation_replies": 0,
    "target_replies": 0,
    "own_scores": 0,
}
"""Values that make a node's PluralLLM that of a simulation, to every digit."""

SIMULATION = OwnerPolicy(metrics=None, truth=True, probes=True, mean=True, **AS_IN_SIMULATION)  # type: ignore[arg-type]


def read_owner_policy(path: Path) -> OwnerPolicy:
    """The owner's file.

    Raises:
        UserError: it cannot be read, or a key in it is unknown or has a wrong value.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is not a TOML file ({error})") from None
    if unknown := values.keys() - described().keys():
        raise UserError(f"{path}: unknown key {min(unknown)}; known are {', '.join(described())}")
    try:
        return OwnerPolicy.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {key} = {first['input']!r}: {first['msg']}") from None


def described() -> dict[str, str]:
    """Key -> what it decides."""
    return {field.alias or name: field.description or "" for name, field in OwnerPolicy.model_fields.items()}


def owner_policy_file(*, bundle: str = "", roster: str = "") -> str:
    """An owner's policy with every key at its default, or `bundle` and `roster` pinned, and what it decides."""
    values = OwnerPolicy(bundle=bundle, roster=roster).model_dump(by_alias=True)
    return "".join(f"# {says}\n{key} = {json.dumps(values[key])}\n" for key, says in described().items())


def owner_policy_of(node_config: Mapping[str, object]) -> OwnerPolicy:
    """The owner's policy of a node: its file (`policy`), the defaults without one, and everything in a simulation.

    Raises:
        UserError: see `read_owner_policy`.
    """
    if not node_config.get("group"):
        return SIMULATION
    path = str(node_config.get("policy", ""))
    return read_owner_policy(Path(path)) if path else OwnerPolicy()
