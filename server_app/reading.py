"""A model's answers without training or writing: after answered questions ("few-shot"), and by what it would choose.

A distribution that a model writes ("say") need not be the one it draws from when it is asked for one answer ("do").

Axis letters: J questions, K options, L tokens of a row, S spellings of a label, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from appa_flwr.config import Config
from appa_flwr.core.seeds import child_seed
from appa_flwr.protocol import formats, wire
from server_app import evaluation
from server_app.engine.head import logits
from server_app.engine.sequences import pad_prompts
from server_app.federation.answers import Answers
from server_app.models.base import Base

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

NUM_EXAMPLES = 5
BLANKS = ("", " ")
"""Separator between a prompt and a letter: nothing behind a chat template, a blank in running text."""


@dataclass(frozen=True, eq=False)
class FewShot:
    """Prompts that show answered questions first.

    Attributes:
        prompts: question's catalogue position -> token ids.
        num_examples: answered questions before each.
        cut: prompts with fewer of them, for want of room in the model's window.
    """

    prompts: dict[int, list[int]]
    num_examples: int
    cut: int


def few_shot(
    base: Base,
    config: Config,
    catalogue: wire.Catalogue,
    *,
    answers: Sequence[str],
    train_J: IntArray,
    test_J: IntArray,
    window: int,
) -> FewShot:
    """Prompts for the held-out questions, behind the same few answered training questions.

    The window is the model's own: `policy.max-sequence-length` bounds what is trained on, and behind instructions in
    full few examples would have room in it.

    Args:
        base: tokenizer and chat template.
        config: the run's; the examples are drawn by its seed.
        catalogue: the public questions.
        answers: what SFT teaches, by catalogue position: all that the server knows of the groups' answers.
        train_J: training questions, of which the examples are drawn.
        test_J: held-out questions.
        window: tokens that prompt and answer may have together.
    """
    size = min(NUM_EXAMPLES, len(train_J))
    drawn = np.random.default_rng(child_seed(config.seed, "few-shot")).choice(train_J, size, replace=False)
    examples = [
        formats.Answered(catalogue.questions[q].text, catalogue.questions[q].options, answers[q]) for q in drawn
    ]
    prompts, cut = {}, 0
    for q in test_J:
        question, kept = catalogue.questions[q], size
        while True:
            text = formats.prompt(
                config.task,
                question.text,
                question.options,
                style=config.policy.prompt_style,
                examples=examples[:kept],
            )
            ids = base.ids(base.asked(text))
            if not kept or len(ids) + config.rollout.response_length <= window:
                break
            kept -= 1
        prompts[int(q)] = ids
        cut += kept < size
    return FewShot(prompts, size, cut)


@dataclass(frozen=True, eq=False)
class Chosen:
    """A model's choices when asked for one letter.

    Attributes:
        answers: a distribution a question; NaN where its letters are no single tokens.
        mass: probability in [0, 1] of all the letters of a question together, its mean; low for a model that does not
            answer by a letter, whose distribution says little then. NaN where no question could be read.
    """

    answers: Answers
    mass: float


def chosen_answers(
    model: PreTrainedModel, base: Base, config: Config, *, question_J: IntArray, catalogue: wire.Catalogue
) -> Chosen:
    """What the model would choose of each question's options, see `choices`."""
    questions = [catalogue.questions[q] for q in question_J]
    prompts = [formats.choice_prompt(question.text, question.options) for question in questions]
    prediction_JK = np.full((len(question_J), catalogue.option_QK.shape[1]), np.nan)
    masses = []
    for j, choice in enumerate(choices(model, base, prompts, sizes=[len(question.options) for question in questions])):
        if choice is not None:
            prediction_JK[j] = 0.0
            prediction_JK[j, : len(choice.share_K)] = choice.share_K
            masses.append(choice.mass)
    return Chosen(
        evaluation.given_answers(question_J, prediction_JK), float(np.mean(masses)) if masses else float("nan")
    )


class Choice(NamedTuple):
    """The probabilities of a question's letters, scaled to sum to one, and what they summed to before."""

    share_K: FloatArray
    mass: float


@torch.inference_mode()
def choices(
    model: PreTrainedModel, base: Base, prompts: Sequence[str], *, sizes: Sequence[int]
) -> Iterator[Choice | None]:
    """The probabilities of the options' letters behind each prompt that asks for one; None where they are no tokens.

    One forward pass a question. A letter's probability is that of its spellings, see `label_tokens`, together.
    """
    asked = [base.asked(prompt) for prompt in prompts]
    spelled = label_tokens(base, asked[0], formats.letters(max(sizes)))
    for batch in np.array_split(np.arange(len(asked)), -(-len(asked) // evaluation.BATCH_SIZE)):
        ids_JL, mask_JL = pad_prompts([base.ids(asked[j]) for j in batch], pad_id=base.pad_id, device=model.device)
        # Padded on the right, where causal attention does not look.
        hidden_JLH = model.base_model(input_ids=ids_JL, use_cache=False).last_hidden_state
        last_J = mask_JL.sum(1) - 1
        hidden_JH = hidden_JLH[torch.arange(len(batch), device=model.device), last_J]
        logprob_JV = logits(model, hidden_JH).double().log_softmax(-1)
        for j, logprob_V in zip(batch, logprob_JV, strict=True):
            token_SK = [tokens[: sizes[j]] for tokens in spelled if len(tokens) >= sizes[j]]
            if not token_SK:
                yield None
                continue
            logprob_K = logprob_V[torch.tensor(token_SK, device=model.device)].logsumexp(0)
            yield Choice(logprob_K.softmax(0).cpu().numpy(), float(logprob_K.logsumexp(0).exp()))


def label_tokens(base: Base, asked: str, labels: Sequence[str]) -> list[list[int]]:
    """The single tokens that write the labels right behind a prompt, in each spelling of `BLANKS`.

    A spelling goes as far as its labels, from the first on, are single tokens that stand for nothing else; so it may be
    shorter than the labels, or empty. A spelling that a tokenizer does not tell from another one counts once.
    """
    head, found, seen = base.ids(asked), [], {base.tokenizer.unk_token_id}
    for blank in BLANKS:
        tokens: list[int] = []
        for label in labels:
            ids = base.ids(asked + blank + label)
            if ids[:-1] != head or ids[-1] in seen:
                break
            tokens.append(ids[-1])
            seen.add(ids[-1])
        found.append(tokens)
    return found
