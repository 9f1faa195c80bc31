"""Layouts as bytes and back: what a caller puts becomes columns, columns become what a caller gets."""

from __future__ import annotations

from tq_service.wire.decoding import decode_column, decode_columns, to_tensordict
from tq_service.wire.encoding import encode_columns

__all__ = ["decode_column", "decode_columns", "encode_columns", "to_tensordict"]
