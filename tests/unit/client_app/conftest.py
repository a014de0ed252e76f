"""What the tests of the groups' side share."""

from __future__ import annotations

import pytest

from client_app import predictor


@pytest.fixture
def few_scores(monkeypatch):
    """No scores by context size: they take most of the time of making target tables."""
    monkeypatch.setattr(predictor, "CONTEXT_SIZES", ())
