"""What a benchmarked trainer is given: model folder, prompts and the lengths of the answers, as one JSON file.

TRL's side runs in an environment of its own, so this module needs nothing but PyTorch.

Axis letters: J rollouts, V vocabulary.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch import Tensor

PAD_ID, EOS_ID, UNKNOWN_ID = 0, 1, 2
NUM_SPECIAL = 3

# The paper's PPO table, but for the optimizer steps: TRL takes one an epoch, whatever its mini-batches.
LORA_RANK, LORA_ALPHA = 16, 32
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
PPO_EPOCHS = 2
TEMPERATURE = 0.6
LEARNING_RATE = 1e-5

SHORTEST_ANSWER, ANSWER_CYCLE = 10, 16
"""Answers that end on their own have 10 to 25 tokens; see `planned_length`."""

_FAR = 1e4  # a logit this far out is certain at any temperature, and finite in every number format


@dataclass(frozen=True)
class Prompts:
    """How prompts are drawn: tokens that all of them begin with, and fewest and most tokens after these."""

    prefix: int
    shortest: int
    longest: int


DPA_PROMPTS = Prompts(prefix=220, shortest=15, longest=70)
SHORT_PROMPTS = Prompts(prefix=0, shortest=16, longest=32)


@dataclass(frozen=True)
class Workload:
    """One case of a benchmark.

    Attributes:
        model: a Transformers folder.
        batches: token ids of the prompts, by update; the first update is the warm-up and is not counted.
        response_length: most tokens of an answer.
        ends: whether answers end on their own, see `planned_length`; otherwise all reach `response_length`.
        config: keys of our run config that differ from `own_side.KEYS`.
        seed: of sampling and adapters.
    """

    model: str
    batches: list[list[list[int]]]
    response_length: int
    ends: bool
    config: dict[str, bool | int | float | str] = field(default_factory=dict)
    seed: int = 0

    def write(self, path: Path) -> None:
        """Save as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Workload:
        """Load what `write` saved."""
        return cls(**json.loads(path.read_text()))

    def planned_lengths(self, update: int) -> list[int]:
        """Tokens that each answer of an update must have."""
        return [
            min(planned_length(len(prompt)), self.response_length) if self.ends else self.response_length
            for prompt in self.batches[update]
        ]


def draw_batches(
    prompts: Prompts, *, vocabulary: int, rollouts: int, updates: int, seed: int, answers: int = 1
) -> list[list[list[int]]]:
    """Random prompts, each `answers` times, for the warm-up and `updates` more; token ids lie below `vocabulary`."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(NUM_SPECIAL, vocabulary) for _ in range(count)]

    prefix = tokens(prompts.prefix)
    batches = []
    for _ in range(1 + updates):
        asked = [prefix + tokens(rng.randint(prompts.shortest, prompts.longest)) for _ in range(rollouts // answers)]
        batches.append([prompt for prompt in asked for _ in range(answers)])
    return batches


def planned_length(prompt_length: int) -> int:
    """Tokens of an answer that ends on its own: the fewest, from 10 on, that bring the row to a multiple of 16.

    A rule on positions needs no bookkeeping of rows, so it holds however a trainer sorts or splits its batch.
    """
    return SHORTEST_ANSWER + -(prompt_length + SHORTEST_ANSWER) % ANSWER_CYCLE


def steer(logit_JV: Tensor, position_J: Tensor, *, number: int, ends: bool) -> None:
    """Change the logits in place so that the next sampled token keeps to the plan.

    Args:
        logit_JV: of the next token.
        position_J: tokens each row will have with it, padding not counted.
        number: its place in its answer, from 1.
        ends: as in `Workload`.
    """
    logit_JV[:, [PAD_ID, EOS_ID]] = -_FAR
    if ends and number >= SHORTEST_ANSWER:
        logit_JV[position_J % ANSWER_CYCLE == 0, EOS_ID] = _FAR


def even_share(token_JT: Tensor, mask_JT: Tensor) -> Tensor:
    """The reward, shape (J,): the share of even token ids in the answer. It costs nothing and can be learned."""
    even_JT = ((token_JT % 2 == 0) & mask_JT).float()
    return even_JT.sum(1) / mask_JT.sum(1)
