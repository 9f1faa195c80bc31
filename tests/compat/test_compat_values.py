from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from compat.plain_values import plain

JAGGED = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
ALIKE = [
    (lambda: torch.tensor([1.0, float("nan")]), lambda: torch.tensor([1.0, float("nan")])),
    (lambda: {"a": 1, "b": [None]}, lambda: {"b": [None], "a": 1}),
    (lambda: {1: "x", 2: "y"}, lambda: {2: "y", 1: "x"}),
    (lambda: NonTensorStack("x", {"y": 1}), lambda: NonTensorStack("x", {"y": 1})),
    (lambda: torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).T.contiguous),
]
DIFFERENT = [
    (torch.tensor([0.0]), torch.tensor([-0.0])),
    (torch.tensor([1]), torch.tensor([1], dtype=torch.int32)),
    (torch.tensor([1]), torch.tensor([[1]])),
    (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float16)),
    (JAGGED, torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged) * 2),
    (np.arange(3), torch.arange(3)),
    (np.int64(1), 1),
    (np.float32(0.5), 0.5),
    (True, 1),
    (1, 1.0),
    ((1, 2), [1, 2]),
    ("x", b"x"),
    ({"a": 1}, OrderedDict(a=1)),
    ({1: "x"}, {"1": "x"}),
    (2**70, 2**71),
    (NonTensorData("x", batch_size=[2]), NonTensorStack("x", "x")),
    (np.array(["x"], dtype=object), ["x"]),
]


@pytest.mark.parametrize(("left", "right"), ALIKE)
def test_values_that_are_alike_have_the_same_plain_data(left: Any, right: Any) -> None:
    assert plain(left()) == plain(right())


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_values_that_differ_in_a_bit_or_in_kind_have_not(left: Any, right: Any) -> None:
    assert msgpack.packb(plain(left)) != msgpack.packb(plain(right))


def test_a_batch_keeps_layout_and_rows_of_each_field() -> None:
    batch = TensorDict({"x": torch.arange(2), "rows": JAGGED, "text": NonTensorStack("a", "b")}, batch_size=[2])
    fields = plain(batch)["fields"]
    assert fields["x"]["shape"] == [2]
    assert fields["rows"]["kind"] == "nested jagged"
    assert [row["shape"] for row in fields["rows"]["rows"]] == [[2], [3]]
    assert fields["text"] == {"kind": "NonTensorStack", "rows": ["a", "b"]}


def test_an_object_is_its_type_and_what_it_holds() -> None:
    class Thing:
        def __init__(self, size: int) -> None:
            self.size = size

    assert plain(Thing(1)) == plain(Thing(1)) != plain(Thing(2))
