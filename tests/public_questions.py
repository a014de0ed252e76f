"""A catalogue of public questions that have features and no texts of their own."""

from collections.abc import Sequence

import numpy as np

from appa_flwr.protocol.asks import Catalogue
from appa_flwr.survey.types import Question


def public_questions(
    embedding_QKE: np.ndarray, option_QK: np.ndarray, ids: Sequence[str] = (), *, train_Q: np.ndarray | None = None
) -> Catalogue:
    """Questions with these features, which all train where nothing else is said."""
    ids = ids or [f"question {q}" for q in range(len(option_QK))]
    questions = tuple(
        Question(name, name, tuple("abcdefgh"[: sum(row)])) for name, row in zip(ids, option_QK, strict=True)
    )
    train_Q = np.ones(len(ids), dtype=np.bool_) if train_Q is None else train_Q
    return Catalogue(
        questions, train_Q, embedding_QKE.astype(np.float32), option_QK, np.zeros(len(ids), dtype=np.bool_)
    )
