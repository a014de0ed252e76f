from __future__ import annotations

import logging

import pytest

from server_app.federation import members


@pytest.fixture
def no_pauses(monkeypatch):
    """Nobody waits for more nodes to join."""
    monkeypatch.setattr(members.time, "sleep", lambda seconds: None)


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "appa.server")
    return lambda: [record.getMessage() for record in caplog.records]
