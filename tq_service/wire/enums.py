"""Words of the public API as enum numbers of the protos, and back."""

from __future__ import annotations

from typing import Final

from tq_service.schema import BatchUnit, KeyMode, Operator
from tq_service.v1 import controller_service_pb2 as pb

KEY_MODES: Final[dict[str, pb.KeyMode.ValueType]] = {
    "upsert": pb.KEY_MODE_UPSERT,
    "new": pb.KEY_MODE_NEW,
    "existing": pb.KEY_MODE_EXISTING,
}
BATCH_UNITS: Final[dict[str, pb.BatchUnit.ValueType]] = {
    "sample": pb.BATCH_UNIT_SAMPLE,
    "group": pb.BATCH_UNIT_GROUP,
}
OPERATORS: Final[dict[str, pb.Operator.ValueType]] = {
    "==": pb.OPERATOR_EQ,
    "!=": pb.OPERATOR_NE,
    "<": pb.OPERATOR_LT,
    "<=": pb.OPERATOR_LE,
    ">": pb.OPERATOR_GT,
    ">=": pb.OPERATOR_GE,
    "in": pb.OPERATOR_IN,
}
# What is not given counts as the first of each; a condition has no default.
KEY_MODE_WORDS: Final[dict[int, KeyMode]] = {
    pb.KEY_MODE_UNSPECIFIED: "upsert",
    pb.KEY_MODE_UPSERT: "upsert",
    pb.KEY_MODE_NEW: "new",
    pb.KEY_MODE_EXISTING: "existing",
}
BATCH_UNIT_WORDS: Final[dict[int, BatchUnit]] = {
    pb.BATCH_UNIT_UNSPECIFIED: "sample",
    pb.BATCH_UNIT_SAMPLE: "sample",
    pb.BATCH_UNIT_GROUP: "group",
}
OPERATOR_WORDS: Final[dict[int, Operator]] = {
    pb.OPERATOR_EQ: "==",
    pb.OPERATOR_NE: "!=",
    pb.OPERATOR_LT: "<",
    pb.OPERATOR_LE: "<=",
    pb.OPERATOR_GT: ">",
    pb.OPERATOR_GE: ">=",
    pb.OPERATOR_IN: "in",
}
