import pytest
from runs import Served

from server_app.serve import rounds


@pytest.fixture
def anyio_backend():
    """What async tests run in."""
    return "asyncio"


@pytest.fixture
def served(tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "GATHER_SECONDS", 0.02)
    return Served(tmp_path)
