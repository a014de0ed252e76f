"""The owner's policy, a file that decides which numbers leave a group and which programs run there.

A deployed node rereads the file for each message; a simulation has no owners, and allows everything.
"""

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from appa_flwr.core.errors import UserError
from appa_flwr.core.text import parse_toml

OWNER_POLICY_VARIABLE = "APPA_POLICY"
"""Environment variable with the policy's path, for `appa_flwr.owner.guard`, which starts before messages are read."""

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
    how well the language model's answers fit PluralLLM's predictions. predictions: the predictions themselves.
    answers: the group's answers to training questions. truth: how well the language model's answers fit the group's
    answers. The list binds a server that follows the protocol."""
    bundle: str = Field("", pattern=rf"^\s*({_SHA256}\s*)*$")
    """Fingerprints (SHA-256) of the programs that may run here; `appa group bundle` prints the fingerprint of a copy
    that you trust. The start script runs no other program. Empty = any program that the server sends."""

    def may(self, name: str) -> bool:
        """True if numbers of this kind, a word of `may-leave`, may leave."""
        return name in self.may_leave


SIMULATION = OwnerPolicy(may_leave=list(get_args(Leaving)))
"""Policy of a simulation: everything may leave."""


def read_owner_policy(path: Path) -> OwnerPolicy:
    """Read the owner's file; raises UserError if it cannot be read, or if a key is unknown or has a wrong value."""
    values = parse_toml(path)
    if unknown := sorted(values.keys() - described().keys()):
        raise UserError(
            f"{path}: {', '.join(unknown)}: an owner's policy has the keys {', '.join(described())} alone; limits of "
            "earlier versions are gone, since they did not protect: remove the lines"
        )
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
