"""What a group's node takes part in and gives away: the owner's file, whatever the config of a run says.

A deployed node reads it anew for each message; a simulation has no owners, and allows everything.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from appa_flwr.errors import UserError

POLICY_VARIABLE = "APPA_POLICY"
"""Names the policy file to the guard (`appa_flwr.owner.guard`), which starts before a message is read."""

LEAST_NODES = 3
"""Of a sum: whoever takes one part out of the sum of three still sees that of two."""


class Policy(BaseModel):
    """The owner's decisions, a key of his TOML file each; what the file leaves out is as here."""

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
        "needs the guard that the start script puts before Flower's programs (appa doctor)",
    )
    training: bool = Field(True, description="train PluralLLM: weights and their errors leave")
    votes: bool = Field(True, description="vote for SFT: winning options leave, or with task=opa rankings")
    sums: bool = Field(
        False, description="masked sums of held-out answers over groups: a server that lies reads answers"
    )
    min_nodes: int = Field(LEAST_NODES, ge=LEAST_NODES, description="fewest nodes in such a sum")
    truth: bool = Field(False, description="score against own answers to held-out questions: a few scores tell one")
    probes: bool = Field(False, description="score what the server calls probes for ceilings: they tell predictions")
    mean: bool = Field(False, description="take part in runs with sft.target=mean: training answers themselves leave")
    own_answers: bool = Field(False, description="take part in runs that score against training answers themselves")
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

    @property
    def changes_rewards(self) -> bool:
        """Whether rewards leave otherwise than they were computed."""
        return self.reward_noise > 0 or self.reward_decimals < 15


SIMULATION = Policy(sums=True, truth=True, probes=True, mean=True, own_answers=True)


def read_policy(path: Path) -> Policy:
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
        return Policy.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {key} = {first['input']!r}: {first['msg']}") from None


def described() -> dict[str, str]:
    """Key -> what it decides."""
    return {field.alias or name: field.description or "" for name, field in Policy.model_fields.items()}


def policy_file() -> str:
    """A policy file with every key at its default, and what it decides."""
    values = Policy().model_dump(by_alias=True)
    return "".join(f"# {says}\n{key} = {json.dumps(values[key])}\n" for key, says in described().items())


def policy_of(node_config: Mapping[str, object]) -> Policy:
    """The policy of a node: its file (`policy`), the defaults without one, and everything in a simulation.

    Raises:
        UserError: see `read_policy`.
    """
    if not node_config.get("group"):
        return SIMULATION
    path = str(node_config.get("policy", ""))
    return read_policy(Path(path)) if path else Policy()
