"""The embedded default policy: a tiny Qwen3 with its own tokenizer, built from scratch on first use and cached.

It is trained on a format-only corpus: public training questions with random valid answers. So the base knows the format
of answers, but no opinions. A score is one token, so that the model learns soon to write scores that sum to one.

Real surveys have many options and long texts. For such surveys prompts state the number of options (`counted`), and
most rows of the corpus have only the last line of a prompt ("12 scores:"). So the model learns within minutes to write
one score per option.

Axis letters: J rows of a step, T answer tokens, K answer options.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from appa_flwr.core.files import replaced_folder
from appa_flwr.protocol import formats
from appa_flwr.survey.types import Question
from server_app.policy.logprobs import response_logprobs
from server_app.policy.sequences import Sequences, pad

LONGEST = 2048  # context length, in tokens
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
ANSWER_STEP = 0.1  # a grid coarse enough for a tiny model to learn within minutes that answers sum to one
CONCENTRATION = (0.4, 4.0)  # range of the Dirichlet's parameter: from peaked to even distributions
STEPS, COUNTED_STEPS = 400, 600  # enough for answers to up to four options, and to the many options of real surveys
OPTIONS = 12  # options up to this number are always learned: a held-out question can have more than training questions
CUE_SHARE = 0.85  # share of rows without a question in a counted corpus
ANSWERS = 8  # of a step to one compact prompt, which is computed once; the rows of a counted corpus must differ
MIN_PAIRS = 10  # least frequency of a token of a real survey: a rarer token is not learned, and harms held-out prompts
TOKENS_PER_PASS = 5120  # padding counted; bounds memory


@dataclass(frozen=True)
class TinyRecipe:
    """Settings that determine the tiny model's weights. Their hash, with the questions, is the cache key."""

    task: str
    steps: int
    counted: bool = False  # whether prompts state the number of options, as for a real survey
    batch_size: int = 64
    learning_rate: float = 3e-3  # peak, for AdamW
    matrix_rate: float = 0.03  # peak, for Muon
    vocab_size: int = 2048  # upper bound of the BPE vocabulary
    hidden_size: int = 96
    num_layers: int = 3
    num_heads: int = 4  # half as many key-value heads
    seed: int = 0

    def prompt(self, text: str, options: Sequence[str]) -> str:
        """Prompt of a question for this model."""
        return formats.prompt(self.task, text, options, style="counted" if self.counted else "compact")

    def key(self, questions: Sequence[Question]) -> str:
        """Cache key: changes with any field and with any question's text or options."""
        public = [[q.text, list(q.options)] for q in questions]
        text = json.dumps([asdict(self), public, "4"], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def build_tokenizer(recipe: TinyRecipe, questions: Sequence[Question]) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on the public questions' prompts. Digits and the scores of DPA answers are tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    prompts = [recipe.prompt(q.text, q.options) for q in questions]
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        min_frequency=MIN_PAIRS if recipe.counted else 0,
        special_tokens=[PAD, EOS, UNKNOWN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(prompts, trainer)
    if recipe.task == "dpa":
        tokenizer.add_tokens([AddedToken(f"{percent / 100:.2f}", normalized=False) for percent in range(101)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, padding_side="left"
    )


def corpus(
    recipe: TinyRecipe, questions: Sequence[Question], rng: np.random.Generator
) -> Iterator[list[tuple[str, str]]]:
    """Yield the (prompt, answer) pairs of one step, without end.

    With `counted`, all numbers of options up to the largest are equally likely, with options from any questions.
    """
    options = [option for question in questions for option in question.options]
    most = max(OPTIONS, *(len(question.options) for question in questions))

    def counted_row(text: str) -> tuple[str, int]:
        size = int(rng.integers(2, most + 1))
        prompt = recipe.prompt(text, [options[i] for i in rng.integers(len(options), size=size)])
        return prompt.rpartition("\n")[2] if rng.random() < CUE_SHARE else prompt, size

    def random_answer(num_options: int) -> str:
        concentration = np.exp(rng.uniform(*np.log(CONCENTRATION)))
        shares_K = rng.dirichlet(np.full(num_options, concentration))
        return formats.answer(recipe.task, shares_K, step=ANSWER_STEP)

    while True:
        repeats = 1 if recipe.counted else min(ANSWERS, recipe.batch_size)
        asked = [questions[index] for index in rng.integers(len(questions), size=recipe.batch_size // repeats)]
        if recipe.counted:
            rows = [counted_row(question.text) for question in asked]
        else:
            rows = [(recipe.prompt(question.text, question.options), len(question.options)) for question in asked]
        yield [(prompt, random_answer(size)) for prompt, size in rows for _ in range(repeats)]


def load_or_build(
    recipe: TinyRecipe, questions: Sequence[Question], cache: Path, *, progress: Callable[[int, int], None]
) -> Path:
    """Return the folder of the tiny model and its tokenizer; build it if the cache lacks it.

    Raises as `replaced_folder`.
    """
    folder = cache / f"tiny-{recipe.task}-{recipe.key(questions)}"
    if (folder / "config.json").is_file():
        return folder
    with replaced_folder(folder, keep=True) as beside:
        for part in build(recipe, questions, progress=progress):
            part.save_pretrained(beside)
    return folder


def build(
    recipe: TinyRecipe, questions: Sequence[Question], *, progress: Callable[[int, int], None] = lambda step, of: None
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Train the tiny model from scratch on the format-only corpus, on the CPU in float32 and in eval mode."""
    tokenizer = build_tokenizer(recipe, questions)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=3 * recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_heads // 2,
        head_dim=recipe.hidden_size // recipe.num_heads,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = Qwen3ForCausalLM(config).eval()
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    # AdamW alone takes more than twice as many steps to learn that scores sum to one.
    parameters, embeddings = list(model.parameters()), model.get_input_embeddings().weight
    matrices = [each for each in parameters if each.ndim == 2 and each is not embeddings]
    others = [each for each in parameters if each.ndim == 1 or each is embeddings]
    optimizers = [
        torch.optim.Muon(matrices, lr=recipe.matrix_rate, weight_decay=0.01),
        torch.optim.AdamW(others, lr=recipe.learning_rate, weight_decay=0.01, betas=(0.9, 0.98)),
    ]

    def share(step: int) -> float:
        return min((step + 1) / (0.1 * recipe.steps), 1 - step / recipe.steps)

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, share) for optimizer in optimizers]
    batches = corpus(recipe, questions, np.random.default_rng(recipe.seed))
    for step in range(recipe.steps):
        prompts, answers = (tokenizer(list(texts))["input_ids"] for texts in zip(*next(batches), strict=True))
        padded = partial(pad, device=model.device)
        ends = [[*ids, tokenizer.eos_token_id] for ids in answers]
        rows = Sequences(torch.zeros(0, dtype=torch.long), *padded(prompts, left=True), *padded(ends))
        model.zero_grad(set_to_none=True)
        for index in rows.micro_batches(torch.arange(len(ends)), tokens=TOKENS_PER_PASS):
            logprob_JT = response_logprobs(model, rows.rows(index), temperature=1.0)
            (-logprob_JT.sum() / rows.mask_JT.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        progress(step + 1, recipe.steps)
    return model, tokenizer
