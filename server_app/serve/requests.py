"""Bodies of requests to the service, with the limits that pydantic holds them to."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

RunName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Text = Annotated[str, StringConstraints(max_length=2**25)]  # with a limit, pydantic refuses half a surrogate pair
Count = Annotated[int, Field(ge=1, lt=2**53)]


class Item(BaseModel):
    """An answer to be scored; by `id`, which its trainer gives or not, a retry is told from another answer."""

    model_config = ConfigDict(strict=True, extra="forbid")
    id: Name | None = None
    question_id: Name
    completion: Text

    @property
    def digest(self) -> str:
        """Of question and completion."""
        return hashlib.sha256(json.dumps([self.question_id, self.completion]).encode()).hexdigest()[:32]


class ScoreRequest(BaseModel):
    """The body of POST /v1/score.

    Attributes:
        run: a name for the training.
        round: that the answers are of, rising from one to the next; None = the next.
        size: of a numbered round, its answers in all; None if these are all.
        resumed: whether the trainer begins with this round, perhaps from a checkpoint: the round and those after it are
            given up, and so is what another round of this name waits for.
        items: the answers.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    run: RunName
    round: Count | None = None
    size: Count | None = None
    resumed: bool = False
    items: Annotated[list[Item], Field(min_length=1)]

    @field_validator("items")
    @classmethod
    def _different(cls, items: list[Item]) -> list[Item]:
        ids = [item.id for item in items if item.id is not None]
        if len(set(ids)) < len(ids):
            raise ValueError("two have the same id")
        return items

    @property
    def total(self) -> int:
        """Answers of the round."""
        return self.size or len(self.items)


class ModelAnswers(BaseModel):
    """The body of POST /v1/models/{name}: question_id -> the answer, of all held out."""

    answers: dict[str, Text]
