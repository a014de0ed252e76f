"""The policy's base model with its tokenizer: the tiny model, or a model from a folder or the hub.

Axis letters: J rows, T response tokens.
"""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the HTTP library below it
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedModel,
)
from transformers import PreTrainedTokenizerBase as Tokenizer

from appa_flwr.config import SMOLLM2_MODEL, THREADS, TINY_MODEL, Config
from appa_flwr.core.errors import UserError, first_line
from appa_flwr.core.files import cache_folder, stand_in
from appa_flwr.protocol import formats
from appa_flwr.survey.types import Question
from server_app import log
from server_app.policy import gguf, tiny
from server_app.policy.sequences import longest_row

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM", "gemma2": "Gemma2ForCausalLM"}
"""Model type -> class. This package computes logits and shares keys and values itself. SmolLM2 is a Llama."""

TEMPLATE_KEYS = {"enable_thinking": False, "date_string": "26 Jul 2024"}
"""Arguments of chat templates; templates without these keys ignore them. Qwen3 thinks unless `enable_thinking` is off,
and an answer of 60 tokens has no room for thoughts. Llama-3.2 writes a date; today's would change prompts every day.
"""

FETCHED = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors")
NOT_FETCHED = "original/*"  # the same weights in a format that is not used here

MARKER = "0.25,0.75"  # placeholder answer: the template's text after it ends the turn


@dataclass(frozen=True)
class Base:
    """A model folder with its tokenizer and end tokens."""

    source: str  # folder that `from_pretrained` loads
    tokenizer: Tokenizer  # pads on the left, with a token that is not among `stop_ids`
    end_id: int  # token with which SFT ends answers: the end of turn of a chat model, else the end of sequence
    stop_ids: tuple[int, ...]  # all that end an answer: `end_id`, end of sequence, the ends in the generation settings
    hub_id: str = ""  # name of the model on the hub; empty for a model from elsewhere

    def ids(self, text: str) -> list[int]:
        """Token ids of the prompt `text`, in the model's chat template if it has one."""
        if self.tokenizer.chat_template is None:
            return list(self.tokenizer(text)["input_ids"])
        chat = [{"role": "user", "content": text}]
        template = {"add_generation_prompt": True, "return_dict": False, **TEMPLATE_KEYS}
        return list(self.tokenizer.apply_chat_template(chat, **template))

    def prompt_ids(self, config: Config, question: Question) -> list[int]:
        """Token ids of a question's prompt."""
        return self.ids(formats.prompt(config.task, question.text, question.options, style=config.prompt_style))

    def texts(self, response_JT: Tensor, mask_JT: Tensor) -> list[str]:
        """Texts of responses, without special tokens."""
        rows = zip(response_JT.cpu(), mask_JT.cpu(), strict=True)
        return [str(self.tokenizer.decode(ids[mask], skip_special_tokens=True)) for ids, mask in rows]


def prepare(
    config: Config,
    questions: Sequence[Question],
    *,
    progress: Callable[[int, int], None] = lambda step, of: None,
    say: Callable[[str], None] = log.info,
) -> Base:
    """Find, fetch, unpack or build the base model.

    The tiny model is built from `questions`, with progress (step, steps). `say` reports that SmolLM2 is unpacked.

    Raises:
        UserError: the model does not exist, is none of `ARCHITECTURES`, reads fewer tokens than
            `policy.max-sequence-length`, or its tokenizer lacks tokens that PPO needs.
    """
    hub_id = ""
    if config.model == TINY_MODEL:
        counted = config.prompt_style == "counted"
        steps = tiny.COUNTED_STEPS if counted else tiny.STEPS
        recipe = tiny.TinyRecipe(config.task, steps=steps, counted=counted, seed=config.seed)
        folder = tiny.load_or_build(recipe, questions, cache_folder(), progress=progress)
    elif config.model == SMOLLM2_MODEL:
        folder = gguf.load_or_unpack(cache_folder(), say=say)
    else:
        folder, hub_id = _locate(config.model)
    _check_files(config, Path(folder))
    try:
        model_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=False)
        declared = _declared_ends(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"model = {config.model}: cannot be loaded ({first_line(error)})") from error
    _check_model(config, model_config)
    _check_length(config, longest_row(model_config))
    _check_tokenizer(config, tokenizer)
    end_id = _turn_end(tokenizer)
    vocabulary = model_config.get_text_config().vocab_size
    stop_ids = {end_id, tokenizer.eos_token_id, *(token for token in declared if token < vocabulary)}
    base = Base(str(folder), tokenizer, end_id, tuple(sorted(stop_ids)), hub_id)
    written = {*tokenizer.get_vocab().values()} - tokenizer.added_tokens_decoder.keys()
    if (last := max(written | {end_id, *base.ids(MARKER)})) >= vocabulary:
        raise UserError(
            f"model = {config.model}: its tokenizer has token {last} ({tokenizer.convert_ids_to_tokens(last)!r}), the "
            f"model embeddings for 0 to {vocabulary - 1} only; do tokenizer and weights belong together?"
        )
    pad_id = _padding(tokenizer, stop_ids, vocabulary)
    if pad_id is None:
        raise UserError(f"model = {config.model}: its tokenizer needs a padding token other than its end token")
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_id)
    return base


def _check_model(config: Config, model_config: Any) -> None:
    """Raise a UserError if the model is none of `ARCHITECTURES`, or its weights are stored quantized."""
    # A model saved for another task would load too, with a random head or without causal attention.
    saved_as = model_config.architectures or [model_config.model_type]
    if ARCHITECTURES.get(model_config.model_type) not in saved_as:
        raise UserError(
            f"model = {config.model}: its architecture is {' or '.join(saved_as)} ({model_config.model_type}); "
            f"supported are {', '.join(ARCHITECTURES.values())}"
        )
    if stored := getattr(model_config, "quantization_config", None):
        method = stored.get("quant_method") if isinstance(stored, dict) else stored
        raise UserError(
            f"model = {config.model}: its weights are stored quantized ({method}); name the model that was quantized, "
            "of which the linear layers are stored in 4 bits here"
        )


def _check_files(config: Config, folder: Path) -> None:
    """Raise a `UserError` if a file stands for another one, or if weights are cut off; their headers are read only."""
    for file in sorted(path for pattern in FETCHED for path in folder.glob(pattern)):
        if (what := stand_in(file)) is not None:
            raise UserError(f"model = {config.model}: {file.name} is {what}")
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, "pt"):
                    pass
        except SafetensorError as error:
            raise UserError(
                f"model = {config.model}: {file.name} is cut off or damaged ({error}); fetch it again"
            ) from None


def _locate(model: str) -> tuple[Path, str]:
    """Folder of a model's files, and its hub id, empty for a local folder; a hub's files are fetched into its cache."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder, ""
    try:
        return Path(snapshot_download(model, allow_patterns=list(FETCHED), ignore_patterns=NOT_FETCHED)), model
    except (OSError, ValueError, HTTPError) as error:
        raise UserError(
            f"model = {model}: no such folder here, and it cannot be fetched from the hub ({first_line(error)}); "
            f"where https://huggingface.co/{model} can be seen, accept its licence if it has one, then `hf auth login` "
            f"and try again, or `hf download {model} --local-dir DIR` and model = DIR"
        ) from error


def check(config: Config, *, say: Callable[[str], None] = log.info) -> None:
    """Check the config's `model`, of which only names and shapes of the weights are read; the tiny model is not built.

    Raises as `prepare` and `load_model`.
    """
    if config.model == TINY_MODEL:
        _check_length(config, tiny.LONGEST)
    else:
        _pretrained(prepare(config, (), say=say).source, device_map="meta")  # in seconds, without weights


def _check_length(config: Config, longest: int) -> None:
    if longest < config.policy.max_sequence_length:
        raise UserError(
            f"policy.max-sequence-length = {config.policy.max_sequence_length}: {config.model} reads {longest} tokens "
            f"at most; set it to {longest} or less"
        )


def threads(config: Config) -> int:
    """CPU threads of the policy's passes: 1 for the tiny model, else OMP_NUM_THREADS if set, else all physical cores.

    Raises:
        UserError: OMP_NUM_THREADS is not a whole number above 0.
    """
    if config.model == TINY_MODEL:
        return 1
    if chosen := os.environ.get(THREADS, os.environ.get("OMP_NUM_THREADS")):
        if not (chosen.isdecimal() and int(chosen)):
            raise UserError(f"OMP_NUM_THREADS = {chosen!r} must be a whole number above 0")
        return int(chosen)
    return cores()


def cores() -> int:
    """Physical cores that this process may use."""
    allowed = len(os.sched_getaffinity(0))
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


def _declared_ends(folder: Path) -> list[int]:
    """End-of-sequence ids in the model's generation settings."""
    if not (folder / "generation_config.json").exists():
        return []
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    return list(ends) if isinstance(ends, list) else [ends] * (ends is not None)


def _check_tokenizer(config: Config, tokenizer: Tokenizer) -> None:
    if tokenizer.eos_token_id is None:
        raise UserError(f"model = {config.model}: its tokenizer has no end-of-sequence token, so no answer would end")
    # Without tokenizer files Transformers silently makes an empty tokenizer.
    sample = formats.answer(config.task, np.array([0.25, 0.75]))
    if sample not in tokenizer.decode(tokenizer(sample)["input_ids"]):
        raise UserError(f"model = {config.model}: its tokenizer cannot write {sample}; are all its files there?")


def _turn_end(tokenizer: Tokenizer) -> int:
    """Token that ends an answer: the end of turn in a chat model's template, else the end of sequence."""
    if tokenizer.chat_template is not None:
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARKER}]
        text = str(tokenizer.apply_chat_template(chat, tokenize=False, **TEMPLATE_KEYS))
        special = set(tokenizer.added_tokens_decoder)
        for token in tokenizer(text.rpartition(MARKER)[2], add_special_tokens=False)["input_ids"]:
            if token in special:
                return int(token)
    return int(tokenizer.eos_token_id)


def _padding(tokenizer: Tokenizer, stop_ids: Collection[int], vocabulary: int) -> int | None:
    """The tokenizer's padding token, or a spare one if that can end an answer, as Qwen3's, or has no embedding.

    This package finds padding by masks; other users of the saved model may find it by its id. None if no token fits.
    """
    added = sorted((i, str(token)) for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    made_for_it = [i for i, text in added if "pad" in text.lower()]
    for token in (tokenizer.pad_token_id, *made_for_it, tokenizer.unk_token_id, *(i for i, _ in added)):
        if token is not None and token not in stop_ids and token < vocabulary:
            return int(token)
    return None


def load_model(config: Config, source: str, *, quantized: bool) -> PreTrainedModel:
    """Load the causal LM of a folder in `policy.compute-dtype`.

    If `quantized`, its linear layers are stored in nf4 with double quantization and compute in that dtype.

    Raises:
        UserError: the model cannot be loaded, or weights are missing, which Transformers would fill with random
            numbers.
    """
    dtype: torch.dtype = getattr(torch, config.policy.compute_dtype)
    # On a CPU the backward pass of torch's own attention takes three times as long in 16 bits.
    slow = dtype.itemsize < torch.float32.itemsize and not torch.cuda.is_available()
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=["lm_head"],
    )
    model = _pretrained(
        source,
        dtype=dtype,
        attn_implementation="eager" if slow else None,
        quantization_config=quantization if quantized else None,
        device_map={"": "cuda" if torch.cuda.is_available() else "cpu"},
    )
    for layer in model.modules() if quantized else ():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            # Otherwise the first pass without gradient repacks and rounds the weights for a bfloat16 kernel, and
            # rollouts and reference use other weights than the training passes.
            layer.support_avx512bf16_for_cpu = False
    return model.eval()


def _pretrained(folder: str, **how: Any) -> PreTrainedModel:
    """Causal LM of a folder, all of whose weights are there; `how` goes to `from_pretrained`."""
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            folder, **how, trust_remote_code=False, ignore_mismatched_sizes=True, output_loading_info=True
        )
    except Exception as error:  # damaged files raise errors of many classes
        raise UserError(f"model folder {folder}: cannot be loaded ({first_line(error)})") from error
    unfit = sorted([*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])])
    if unfit:
        raise UserError(f"model folder {folder}: {len(unfit)} weights are missing or do not fit, {unfit[0]} first")
    return model
