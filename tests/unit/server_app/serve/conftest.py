from __future__ import annotations

import pytest
from served import Served


@pytest.fixture
def served(tmp_path):
    return Served(tmp_path)
