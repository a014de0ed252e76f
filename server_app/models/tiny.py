"""The embedded default policy: a tiny Qwen3 with its own tokenizer, built from scratch on first use and cached.

It is trained on a format-only corpus: public training questions answered by random valid answers. So the base knows how
an answer is written, and nothing of what anybody thinks.

Axis letters: B sequences in a batch, T tokens, K answer options.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from appa_flwr.core.files import replaced_folder
from appa_flwr.protocol import formats
from appa_flwr.survey.types import Question

FloatArray = npt.NDArray[np.float64]

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
ANSWER_STEP = 0.1  # on so coarse a grid a tiny model learns within minutes to write answers that sum to one
CONCENTRATION = (0.4, 4.0)  # range of the Dirichlet's parameter: from peaked to even distributions
TOKENS_PER_STEP = 5120
IGNORED_LABEL = -100


@dataclass(frozen=True)
class TinyRecipe:
    """All that decides the tiny model's weights; its hash, with the questions, is the cache key.

    Attributes:
        task: "dpa" or "opa".
        steps: optimizer steps on the format-only corpus.
        batch_size: most sequences a step; fewer where they are long, see `within_budget`.
        learning_rate: peak of a one-cycle schedule for AdamW.
        vocab_size: upper bound of the BPE vocabulary.
        hidden_size: width of the model.
        num_layers: decoder layers.
        num_heads: attention heads (half as many key-value heads).
        seed: seeds weights and corpus.
    """

    task: str
    steps: int
    batch_size: int = 64
    learning_rate: float = 3e-3
    vocab_size: int = 2048
    hidden_size: int = 96
    num_layers: int = 3
    num_heads: int = 4
    seed: int = 0

    def key(self, questions: Sequence[Question]) -> str:
        """Cache key: changes with any field and with any question's text or options."""
        public = [[q.text, list(q.options)] for q in questions]
        text = json.dumps([asdict(self), public, "2"], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def build_tokenizer(recipe: TinyRecipe, questions: Sequence[Question]) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the public questions' prompts; every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    prompts = [formats.prompt(recipe.task, q.text, q.options, style="compact") for q in questions]
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=[PAD, EOS, UNKNOWN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(prompts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, padding_side="left"
    )


def random_shares(num_options: int, rng: np.random.Generator) -> FloatArray:
    """A random, sometimes peaked, distribution (K,)."""
    concentration = np.exp(rng.uniform(*np.log(CONCENTRATION)))
    return rng.dirichlet(np.full(num_options, concentration))


def _random_row(recipe: TinyRecipe, question: Question, rng: np.random.Generator) -> tuple[str, str]:
    text = formats.answer(recipe.task, random_shares(len(question.options), rng), step=ANSWER_STEP)
    return formats.prompt(recipe.task, question.text, question.options, style="compact"), text


def within_budget(rows: list[tuple[list[int], list[int]]]) -> list[tuple[list[int], list[int]]]:
    """Leave out the longest (prompt, answer) rows until the padded batch is no larger than `TOKENS_PER_STEP`.

    How answers are written can be learned from the shorter questions, and real surveys have some very long ones.
    """
    kept = sorted(rows, key=lambda row: len(row[0]) + len(row[1]))
    while len(kept) > 1 and len(kept) * (len(kept[-1][0]) + len(kept[-1][1])) > TOKENS_PER_STEP:
        kept.pop()
    return kept


def load_or_build(
    recipe: TinyRecipe,
    questions: Sequence[Question],
    cache: Path,
    *,
    progress: Callable[[int, int], None] = lambda step, of: None,
) -> Path:
    """The folder of the tiny model and its tokenizer, built if the cache lacks it.

    `cache` holds one folder a recipe; `progress` is called with (step, steps).

    Raises:
        UserError: the cache folder cannot be written.
    """
    folder = cache / f"tiny-{recipe.task}-{recipe.key(questions)}"
    if (folder / "config.json").is_file():
        return folder
    with replaced_folder(folder, keep=True) as beside:
        for part in build(recipe, questions, progress=progress):
            part.save_pretrained(beside)
    return folder


def architecture(recipe: TinyRecipe, **of_tokenizer: int) -> Qwen3Config:
    """The tiny model's layers; what its tokenizer decides is given, or may be anything."""
    return Qwen3Config(
        hidden_size=recipe.hidden_size,
        intermediate_size=3 * recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_heads // 2,
        head_dim=recipe.hidden_size // recipe.num_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        **of_tokenizer,
    )


def build(
    recipe: TinyRecipe,
    questions: Sequence[Question],
    *,
    progress: Callable[[int, int], None] = lambda step, of: None,
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Train the tiny model from scratch on the format-only corpus: on the CPU in float32, then in eval mode."""
    tokenizer = build_tokenizer(recipe, questions)
    torch_state = torch.get_rng_state()
    torch.manual_seed(recipe.seed)
    tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = Qwen3ForCausalLM(architecture(recipe, vocab_size=len(tokenizer), **tokens))
    torch.set_rng_state(torch_state)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=recipe.learning_rate, total_steps=recipe.steps, pct_start=0.1
    )
    rng = np.random.default_rng(recipe.seed)
    model.train()
    for step in range(recipe.steps):
        picked = rng.integers(len(questions), size=recipe.batch_size)
        prompts, answers = zip(*[_random_row(recipe, questions[index], rng) for index in picked], strict=True)
        answer_ids = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(list(answers))["input_ids"]]
        rows = within_budget(list(zip(tokenizer(list(prompts))["input_ids"], answer_ids, strict=True)))
        width = max(len(p) + len(a) for p, a in rows)
        ids_BT = torch.full((len(rows), width), tokenizer.pad_token_id)
        labels_BT = torch.full((len(rows), width), IGNORED_LABEL)
        for b, (p, a) in enumerate(rows):  # right padding: a causal model needs no mask for it
            ids_BT[b, : len(p) + len(a)] = torch.tensor(p + a)
            labels_BT[b, len(p) : len(p) + len(a)] = torch.tensor(a)
        hidden_BTH = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
        answered_BT = labels_BT[:, 1:] != IGNORED_LABEL
        logits = model.lm_head(hidden_BTH[:, :-1][answered_BT])
        loss = torch.nn.functional.cross_entropy(logits, labels_BT[:, 1:][answered_BT])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress(step + 1, recipe.steps)
    return model.eval(), tokenizer
