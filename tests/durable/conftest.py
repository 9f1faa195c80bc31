"""Patience: on a busy machine, a disk may take long for the next file of a journal."""

from __future__ import annotations

import pytest

from tq_service.durable import upkeep


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_MAKE_SECONDS", 60.0)
