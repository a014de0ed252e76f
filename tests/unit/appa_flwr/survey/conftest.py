"""What the tests of survey files share."""

from __future__ import annotations

import pytest
from surveys import write


@pytest.fixture(params=[".csv", ".jsonl", ".parquet"])
def extension(request):
    return request.param


@pytest.fixture
def jsonl(tmp_path):
    return lambda *rows: write(tmp_path / "survey.jsonl", rows)
