"""The paper's three models as folders a user would download, but tiny: random weights, and tokenizers trained here.

What a run can trip over is as published: the special tokens and their roles, what the chat template writes around a
message, the ends that the generation settings name, tied embeddings, and more embeddings than tokens.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from fakes import random_lm
from small import cases
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from appa_flwr.protocol import formats
from appa_flwr.survey.types import Question

TEXT_TOKENS = 900
LONGEST_TOKEN = 12  # characters; Gemma's training splits no words, and few texts would become few long tokens
UNUSED_EMBEDDINGS = 9

FAMILIES = {name: SimpleNamespace(**family) for name, family in cases("families").items()}


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
        special_tokens=family.special,
        initial_alphabet=alphabet,
        max_token_length=LONGEST_TOKEN,
    )
    core.train_from_iterator(corpus, trainer)
    core.add_tokens(family.plain)
    bos = family.roles.get("bos_token")
    if bos:
        core.post_processor = processors.TemplateProcessing(f"{bos} $A", None, [(bos, core.token_to_id(bos))])
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=family.template, **family.roles)


def save(name: str, folder: Path, questions: Sequence[Question], *, hidden_size: int = 64, seed: int = 0) -> Path:
    """Write the model of that family; its tokenizer is trained on the questions' texts."""
    family = FAMILIES[name]
    tokenizer = _tokenizer(name, questions)
    tokenizer.save_pretrained(folder)
    ends = tokenizer.convert_tokens_to_ids(family.ends)
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
