"""Rows that come back: compared bit for bit, and sent in every way that there is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tq_service.dataplane import driver
from tq_service.dataplane.receiving import AnswerSizes
from tq_service.server import storage_servicer
from tq_service.storage.index import reading


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Return what must be the same of two tensors."""
    flat = tensor.detach().contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def rows_of(column: Any) -> list[torch.Tensor]:
    return list(column.unbind()) if isinstance(column, torch.Tensor) else list(column)


def assert_same_rows(got: Any, expected: Any) -> None:
    assert [bits(row) for row in rows_of(got)] == [bits(row) for row in rows_of(expected)]


@pytest.fixture(params=["one message", "stream", "shared memory", "shared memory, gets streamed"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small puts and gets are one message, large ones streams or shared memory; here each is sent every way."""
    if request.param != "one message":
        monkeypatch.setattr(driver, "INLINE_BYTES", -1)
    if request.param.startswith("shared memory"):
        monkeypatch.setattr(driver, "SHARED_FROM_BYTES", 1)
    if request.param == "shared memory":  # so that gets are tried in one message
        monkeypatch.setattr(AnswerSizes, "expected_bytes", lambda *_: -1)
    if request.param.startswith("shared memory"):
        monkeypatch.setattr(storage_servicer, "INLINE_BYTES", 0)
        monkeypatch.setattr(reading, "_LEAST_COLUMN_BYTES", 1)
        monkeypatch.setattr(reading, "_LEAST_MEAN_SLICE_BYTES", 0)


every_way = pytest.mark.usefixtures("ways")
