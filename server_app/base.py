"""The policy's starting point: the tiny model, or a model from a folder or the hub, with its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from appa_flwr import formats
from appa_flwr.config import TINY_MODEL, Config
from appa_flwr.errors import UserError
from appa_flwr.survey.types import Question
from server_app import tiny

TURN_ENDS = ("<end_of_turn>", "<|eot_id|>", "<|im_end|>")
"""What ends a turn in the chat templates of Gemma, Llama and Qwen."""


@dataclass(frozen=True)
class Base:
    """A model folder or hub id, and how its prompts are made.

    Attributes:
        source: what `from_pretrained` loads.
        tokenizer: pads on the left; its padding token is not its end-of-sequence token.
        end_id: the token SFT teaches to end an answer with: a chat model's end of turn, else end of sequence.
        stop_ids: all tokens that end an answer.
    """

    source: str
    tokenizer: Tokenizer
    end_id: int
    stop_ids: tuple[int, ...]

    def prompt_text(self, config: Config, question: Question) -> str:
        """The text the model continues; chat models get their own template around it."""
        text = formats.prompt(config.task, question.text, question.options, style=config.prompt_style)
        if self.tokenizer.chat_template is None:
            return text
        # `enable_thinking` matters to Qwen3 only: a 60-token answer leaves no room for thoughts.
        wrapped = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return str(wrapped)

    def prompt_ids(self, config: Config, question: Question) -> list[int]:
        """Token ids of `prompt_text`; a chat template brings its own special tokens."""
        special = self.tokenizer.chat_template is None
        ids: list[int] = self.tokenizer(self.prompt_text(config, question), add_special_tokens=special)["input_ids"]
        return ids

    def texts(self, response_JT: Tensor, mask_JT: Tensor) -> list[str]:
        """Texts of responses, without special tokens."""
        rows = zip(response_JT.cpu(), mask_JT.cpu(), strict=True)
        return [str(self.tokenizer.decode(ids[mask], skip_special_tokens=True)) for ids, mask in rows]

    @property
    def pad_id(self) -> int:
        """The padding token."""
        return int(self.tokenizer.pad_token_id)


def prepare(
    config: Config, questions: Sequence[Question], *, progress: Callable[[int, int], None] = lambda step, of: None
) -> Base:
    """Find or build the base model.

    Args:
        config: `model`, and for the tiny one its recipe.
        questions: the public training questions; the tiny model's tokenizer and corpus come from them.
        progress: called with (step, steps) while the tiny model is built.

    Raises:
        UserError: no such model, or a tokenizer without the tokens PPO needs.
    """
    source = config.model
    if source == TINY_MODEL:
        cache = Path(config.cache_dir) if config.cache_dir else user_cache()
        recipe = tiny.TinyRecipe(config.task, steps=config.base_steps, seed=config.seed)
        source = str(tiny.load_or_build(recipe, questions, cache, progress=progress))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    except (OSError, ValueError) as error:
        raise UserError(_cannot_load(config.model, error)) from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"model = {config.model}: its tokenizer has no end-of-sequence token, so no answer would end")
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        # Padding with the end-of-sequence token would hide where an answer ends.
        added = [str(token) for _, token in sorted(tokenizer.added_tokens_decoder.items())]
        spare = [t for t in (tokenizer.unk_token, *added) if t and t not in (tokenizer.eos_token, *TURN_ENDS)]
        if not spare:
            raise UserError(f"model = {config.model}: its tokenizer needs a padding token other than its end token")
        tokenizer.pad_token = spare[0]
    vocabulary = tokenizer.get_vocab()
    turn_ends = [vocabulary[token] for token in TURN_ENDS if token in vocabulary and tokenizer.chat_template]
    end_id = turn_ends[0] if turn_ends else tokenizer.eos_token_id
    return Base(source, tokenizer, end_id, tuple(sorted({tokenizer.eos_token_id, *turn_ends})))


def user_cache() -> Path:
    """The user's cache folder for built models, by the XDG convention."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "appa-flwr"


def load_model(config: Config, source: str, *, quantized: bool) -> PreTrainedModel:
    """A causal LM in the config's number format.

    Args:
        config: `attention`, `compute-dtype`.
        source: folder or hub id.
        quantized: whether its linear layers are packed to nf4 with double quantization.

    Raises:
        UserError: it cannot be loaded.
    """
    dtype = torch.bfloat16 if config.compute_dtype == "bfloat16" else torch.float32
    quantization = None
    if quantized:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=["lm_head"],
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation=config.attention,
            quantization_config=quantization,
            device_map={"": "cuda" if torch.cuda.is_available() else "cpu"},
        )
    except (OSError, ValueError) as error:
        raise UserError(_cannot_load(config.model, error)) from error
    return model.eval()


def _cannot_load(model: str, error: Exception) -> str:
    first_line = next(iter(str(error).splitlines()), type(error).__name__)
    return (
        f"model = {model}: cannot be loaded ({first_line}); give a folder with a Transformers model, or a hub id whose "
        "licence you have accepted on a machine that reaches the hub"
    )
