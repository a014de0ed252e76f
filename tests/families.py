"""The paper's three models as folders a user would download, but tiny: random weights, and tokenizers trained here.

What a run can trip over is as published: the special tokens and their roles, what the chat template writes around a
message, the ends that the generation settings name, tied embeddings, and more embeddings than tokens.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from fakes import random_lm
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from appa_flwr.protocol import formats
from appa_flwr.survey.types import Question

TEXT_TOKENS = 900
LONGEST_TOKEN = 12  # characters; Gemma's training splits no words, and few texts would become few long tokens
UNUSED_EMBEDDINGS = 9

GEMMA_TEMPLATE = """\
{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
{{- m.content | trim + '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

LLAMA_TEMPLATE = """\
{{- bos_token }}
{%- if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}
{%- macro header(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{% endmacro %}
{{- header('system') + 'Cutting Knowledge Date: December 2023\\nToday Date: ' + date_string + '\\n\\n<|eot_id|>' }}
{%- for m in messages %}{{ header(m.role) + m.content | trim + '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ header('assistant') }}{% endif %}"""

QWEN_TEMPLATE = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""


@dataclass(frozen=True)
class Family:
    """What one of the paper's models publishes beside its weights."""

    special: tuple[str, ...]  # special tokens in the order of their ids, before all text
    plain: tuple[str, ...]  # added tokens that count as text
    roles: dict[str, str]  # of the tokenizer
    template: str  # of chats
    ends: tuple[str, ...]  # what generation_config.json ends an answer with
    settings: dict[str, object]  # the rest of generation_config.json
    opens: str  # what the text a model continues begins with, after which comes the user's message
    closes: str  # what it ends with
    end: str  # what ends the model's turn
    pad: str  # what this project pads with


FAMILIES = {
    "gemma2": Family(
        special=("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        plain=(),
        roles={"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"},
        template=GEMMA_TEMPLATE,
        ends=("<eos>", "<end_of_turn>"),
        settings={"_from_model_config": True, "cache_implementation": "hybrid"},
        opens="<bos><start_of_turn>user\n",
        closes="<end_of_turn>\n<start_of_turn>model\n",
        end="<end_of_turn>",
        pad="<pad>",
    ),
    "llama": Family(
        special=(
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|reserved_special_token_0|>",
            "<|finetune_right_pad_id|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
            "<|python_tag|>",
        ),
        plain=(),
        roles={"eos_token": "<|eot_id|>", "bos_token": "<|begin_of_text|>"},
        template=LLAMA_TEMPLATE,
        ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        settings={"do_sample": True, "temperature": 0.6, "top_p": 0.9},
        opens=(
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
            "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\n"
        ),
        closes="<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        end="<|eot_id|>",
        pad="<|finetune_right_pad_id|>",
    ),
    "qwen3": Family(
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_pad|>", "<|image_pad|>"),
        plain=("<tool_call>", "</tool_call>", "<|fim_pad|>", "<think>", "</think>"),
        roles={"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
        template=QWEN_TEMPLATE,
        ends=("<|im_end|>", "<|endoftext|>"),
        settings={"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
        opens="<|im_start|>user\n",
        closes="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        end="<|im_end|>",
        pad="<|vision_pad|>",
    ),
}


def _tokenizer(name: str, questions: Sequence[Question]) -> PreTrainedTokenizerFast:
    family = FAMILIES[name]
    core = Tokenizer(models.BPE(unk_token=family.roles.get("unk_token"), byte_fallback=name == "gemma2"))
    alphabet: list[str] = []
    if name == "gemma2":
        core.normalizer = normalizers.Replace(" ", "\u2581")
        core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    else:
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    corpus = [formats.prompt("dpa", q.text, q.options, style=s) for q in questions for s in formats.STYLES]
    corpus += [family.opens, family.closes, "0123456789.,\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=TEXT_TOKENS + len(family.special),
        special_tokens=list(family.special),
        initial_alphabet=alphabet,
        max_token_length=LONGEST_TOKEN,
    )
    core.train_from_iterator(corpus, trainer)
    core.add_tokens(list(family.plain))
    bos = family.roles.get("bos_token")
    if bos:
        core.post_processor = processors.TemplateProcessing(f"{bos} $A", None, [(bos, core.token_to_id(bos))])
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=family.template, **family.roles)


def save(name: str, folder: Path, questions: Sequence[Question], *, hidden_size: int = 64, seed: int = 0) -> Path:
    """Write the model of that family; its tokenizer is trained on the questions' texts."""
    family = FAMILIES[name]
    tokenizer = _tokenizer(name, questions)
    tokenizer.save_pretrained(folder)
    ends = tokenizer.convert_tokens_to_ids(list(family.ends))
    random_lm(
        name,
        seed=seed,
        hidden_size=hidden_size,
        vocab_size=len(tokenizer) + UNUSED_EMBEDDINGS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ends if name == "llama" else tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id if name == "gemma2" else None,
        dtype=torch.bfloat16,
    ).save_pretrained(folder)
    settings = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": ends, **family.settings}
    if tokenizer.pad_token_id is not None:
        settings["pad_token_id"] = tokenizer.pad_token_id
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder
