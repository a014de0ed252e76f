"""The public embedding of every answer option: its question's text, its own text, its place on the scale.

Only the server runs this module (it needs scikit-learn); the groups receive the finished `OptionEmbedding`.

Axis letters: Q questions, K answer options, E embedding, U unique texts, H features of the encoder.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfTransformer

from appa_flwr.survey.types import Question
from pluralllm.data import ORDINAL_FEATURES, OptionEmbedding, embedding_parts
from pluralllm.encoders import Encoder, Matrix, hashed_ngrams
from pluralllm.network import EMBEDDING_DIM

SVD_SEED = 0
SVD_ITERATIONS = 7


def _reduced(vector_UH: Matrix, dim: int) -> npt.NDArray[np.float64]:
    """Reduce vectors to (U, dim) features, each row of root mean square 1 unless its vector is zero.

    Counts are weighted by tf-idf. Vectors of a model are centred: what all texts share would else take the largest
    part of each, in a causal LM nearly all.
    """
    directions = min(dim, *vector_UH.shape)
    if isinstance(vector_UH, np.ndarray):
        vector_UH = vector_UH - vector_UH.mean(axis=0)
        directions = min(directions, len(vector_UH) - 1)
    else:
        nonempty = np.unique(vector_UH.indices)  # nearly every bucket is empty, and the SVD pays for each
        vector_UH = TfidfTransformer().fit_transform(vector_UH[:, nonempty])
    # the SVD finds no more directions than there are; the rest of the features stays 0
    reduced = np.zeros((vector_UH.shape[0], dim))
    if directions:
        svd = TruncatedSVD(n_components=directions, n_iter=SVD_ITERATIONS, random_state=SVD_SEED)
        reduced[:, :directions] = svd.fit_transform(vector_UH)
    norm = np.linalg.norm(reduced, axis=1, keepdims=True)
    unit = np.divide(reduced, norm, out=np.zeros_like(reduced), where=norm > np.finfo(np.float64).eps)
    features: npt.NDArray[np.float64] = unit * np.sqrt(dim)
    return features


def _ordinal_features(ordinal: tuple[float, ...] | None, num_options: int) -> npt.NDArray[np.float64]:
    """Three features an option, (K, 3); all 0 where the answers have no order or a constant one."""
    features = np.zeros((num_options, ORDINAL_FEATURES))
    if ordinal is None or max(ordinal) == min(ordinal):
        return features
    position = np.asarray(ordinal, dtype=np.float64)
    centred = 2.0 * (position - position.min()) / (position.max() - position.min()) - 1.0
    features[:, 0] = 1.0
    features[:, 1] = centred
    features[:, 2] = np.abs(centred)
    return features


def embed_questions(
    questions: Sequence[Question], *, dim: int = EMBEDDING_DIM, encoder: Encoder = hashed_ngrams
) -> OptionEmbedding:
    """Embed every option as [its question's text; its own text; its place on an ordered scale].

    The order of a nominal question's options leaves no trace. The encoder is called once, with all unique texts.

    Returns:
        Table of shape (Q, K, E) with K the largest number of options; features of order 1, 0 on padding.

    Raises:
        UserError: what `encoder` raises.
    """
    question_part, option_part = embedding_parts(dim)
    option_QK = np.zeros((len(questions), max(len(question.options) for question in questions)), dtype=np.bool_)
    for row, question in enumerate(questions):
        option_QK[row, : len(question.options)] = True
    row_N, _ = np.nonzero(option_QK)
    question_Q = [question.text for question in questions]
    option_N = [option for question in questions for option in question.options]
    unique_U = sorted({*question_Q, *option_N})
    vector_UH = encoder(unique_U)
    place_of = {text: place for place, text in enumerate(unique_U)}

    def features(texts: Sequence[str], part_dim: int) -> npt.NDArray[np.float64]:
        used, place = np.unique(np.array([place_of[text] for text in texts]), return_inverse=True)
        reduced: npt.NDArray[np.float64] = _reduced(vector_UH[used], part_dim)[place]
        return reduced

    value_QKE = np.zeros((*option_QK.shape, dim), dtype=np.float32)
    value_QKE[option_QK] = np.concatenate(
        [
            features(question_Q, question_part.stop)[row_N],
            features(option_N, option_part.stop - option_part.start),
            np.concatenate([_ordinal_features(question.ordinal, len(question.options)) for question in questions]),
        ],
        axis=1,
    )
    return OptionEmbedding(tuple(question.question_id for question in questions), value_QKE, option_QK)
