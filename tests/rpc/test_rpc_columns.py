"""Columns as they come, through a real server: dense until a row differs, forgotten with their last cell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from live_server import AnyClient, LiveServer, StartServer
from padded_rows import LENGTHS, assert_pads_like, columns_of, made
from rpc_rows import assert_same_rows, every_way, rows_of, ways  # noqa: F401  (a fixture)

import tq_service as tq
from tq_service.data import StreamingDataLoader, StreamingDataset


def spec_of(client: AnyClient, partition: str, name: str = "x") -> tuple[str, str | None, tuple[int, ...] | None]:
    (field,) = (field.spec for field in client.describe_partition(partition).fields if field.spec.name == name)
    return field.dtype, field.layout, field.row_shape


def names_of(client: AnyClient, partition: str) -> list[str]:
    return [field.spec.name for field in client.describe_partition(partition).fields]


# Dense until a row differs


@every_way
def test_a_field_is_dense_until_a_row_differs(client: AnyClient) -> None:
    parts = [made(0, (2, 5)), made(10, (3, 7)), [made(20, (4,)), made(21, (9,))], [made(30, (5,)), made(31, (5,))]]
    early = client.put("auto", {"x": parts[0], "n": torch.arange(2)}, keys=["a", "b"])
    claimed = client.get_meta(partition_id="auto", task_name="early", data_fields=["x"], batch_size=2)
    assert spec_of(client, "auto") == ("int64", "dense", (5,))
    assert client.get_data(early)["x"].shape == (2, 5)
    metas = [early, *(client.put("auto", {"x": part}) for part in parts[1:])]
    assert spec_of(client, "auto") == ("int64", "jagged", (-1,))
    rows = [row for part in parts for row in rows_of(part)]
    order = [8, 0, 3, 6, 1, 5, 2, 7, 4]
    got = client.get_data("auto", global_indexes=order, data_fields=["x"])["x"]
    assert got.layout is torch.jagged
    assert_same_rows(got, [rows[index] for index in order])
    # Batches that were described before it was jagged are read as they were described, and others as the field is now.
    assert client.get_data(claimed)["x"].shape == (2, 5)
    assert_same_rows(client.get_data(claimed)["x"], rows[:2])
    joined = tq.BatchMeta.concat([meta.select_fields(["x"]) for meta in metas])
    assert joined.fields[0].row_shape == (-1,)
    assert_same_rows(client.get_data(joined)["x"], rows)
    by_key = client.get_data("auto", keys=["b"], data_fields=["x"])["x"]
    assert by_key.layout is torch.jagged
    assert_same_rows(by_key, rows[1:2])
    late = client.get_meta(partition_id="auto", task_name="late", data_fields=["x"], batch_size=9)
    assert_same_rows(client.get_data(late)["x"], rows)
    client.put(early, {"x": made(40, (2, 3))})  # and the rows of `claimed` are others now
    assert_same_rows(client.get_data(claimed)["x"], made(40, (2, 3)))


@pytest.mark.parametrize("default_layout", ["auto", "jagged"])
def test_only_what_differs_is_ragged(client: AnyClient, default_layout: str) -> None:
    """Rows (4, L) put one by one, as position ids of vision-language models are, come back as one nested tensor."""
    client.create_partition("train", default_layout=default_layout)
    rows = [made(length, (4, length)) for length in (7, 7, 5, 9)]
    for row in rows:
        client.put("train", {"x": [row]})
    assert spec_of(client, "train") == ("int64", "jagged", (4, -1))
    got = client.get_data("train", global_indexes=range(4))["x"]
    assert got._ragged_idx == 2
    assert_pads_like(got, rows)
    alike = client.get_data("train", global_indexes=[1, 0])["x"]
    assert alike._ragged_idx == 2
    assert_pads_like(alike, rows[:2])


def nested(*rows: torch.Tensor, layout: torch.layout = torch.jagged) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=layout)


def strided(*rows: torch.Tensor) -> torch.Tensor:
    return nested(*rows, layout=torch.strided)


ONE, OTHER = made(0, (4, 5)), made(1, (4, 7))
ORDERS: dict[str, Callable[[], list[Any]]] = {
    "nested": lambda: [nested(ONE), nested(OTHER)],
    "nested, of several rows": lambda: [nested(ONE, ONE), nested(OTHER, OTHER)],
    "strided": lambda: [strided(ONE), strided(OTHER)],
    "nested, then a list": lambda: [nested(ONE), [OTHER, made(2, (4, 6))]],
    "a list, then nested": lambda: [[ONE], nested(OTHER)],
    "dense, then nested": lambda: [ONE[None], nested(OTHER)],
    "nested, then ragged in the second": lambda: [nested(ONE), nested(ONE, OTHER)],
    "of three dimensions": lambda: [nested(made(0, (3, 4, 5))), nested(made(1, (3, 4, 7)))],
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("declared", ["auto", "jagged", "field"])
@pytest.mark.parametrize("order", ORDERS)
def test_nested_tensors_of_equal_rows_do_not_say_what_is_ragged(
    start_server: StartServer, tmp_path: Path, order: str, declared: str
) -> None:
    """torch makes (4, L) of one length ragged in the first dimension, which no two rows differ in."""
    server = start_server(data_dir=str(tmp_path), durability="process")
    client = server.client()
    if declared == "field":
        client.create_partition("train", fields=[tq.FieldSpec("x", layout="jagged")])
    else:
        client.create_partition("train", default_layout=declared)
    parts = ORDERS[order]()
    rows = [row for part in parts for row in (part if isinstance(part, list) else part.unbind())]
    first = client.put("train", {"x": parts[0]})
    assert_same_rows(client.get_data(first)["x"], rows[: first.size])
    for part in parts[1:]:
        client.put("train", {"x": part})
    server.stop()
    server = start_server(data_dir=str(tmp_path), durability="process")
    client = server.client()
    ragged_dim = rows[0].ndim
    assert spec_of(client, "train") == ("int64", "jagged", (*rows[0].shape[:-1], -1))
    for indexes in (range(len(rows)), [0], [len(rows) - 1]):
        got = client.get_data("train", global_indexes=indexes)["x"]
        assert got._ragged_idx == ragged_dim
        assert_same_rows(got, [rows[index] for index in indexes])
    client.clear_samples("train", global_indexes=[0])
    client.put("train", {"x": nested(rows[0])})
    client.seal_partition("train")
    dataset = StreamingDataset(
        server.address, batch_size=8, data_fields=["x"], partition_id="train", task_name="t", max_wait=5.0
    )
    for batch, _ in StreamingDataLoader(dataset):
        assert batch["x"]._ragged_idx == ragged_dim


def test_a_field_that_is_declared_keeps_its_meaning(client: AnyClient) -> None:
    fields = [
        tq.FieldSpec("d", layout="dense"),
        tq.FieldSpec("j", layout="jagged"),
        tq.FieldSpec("a", layout="auto", dtype="int64"),
    ]
    client.create_partition("train", default_layout="dense", fields=fields)
    meta = client.put("train", {name: torch.zeros(2, 3, dtype=torch.int64) for name in "djax"})
    batch = client.get_data(meta)
    assert {name: batch[name].is_nested for name in "djax"} == {"d": False, "j": True, "a": False, "x": False}
    for name in "dx":
        with pytest.raises(
            tq.errors.FieldMismatchError, match=r"is int64 dense \[3\], got int64 dense \[4\].*as auto or jagged"
        ) as got:
            client.put("train", {name: torch.zeros(2, 4, dtype=torch.int64)})
        assert got.value.metadata["expected"] == "int64 dense [3]"
    client.put("train", {name: torch.zeros(2, 4, dtype=torch.int64) for name in "ja"})
    assert spec_of(client, "train", "a") == ("int64", "jagged", (-1,))


def test_rows_of_another_number_of_dimensions_are_refused(client: AnyClient) -> None:
    client.put("train", {"x": torch.zeros(2), "y": torch.zeros(2, 1)})
    for data, got in (
        ({"x": torch.zeros(2, 1)}, r"float32 dense \[1\]"),
        ({"y": torch.zeros(2)}, r"float32 dense \[\]"),
    ):
        with pytest.raises(
            tq.errors.FieldMismatchError, match=rf"got {got}; put rows with the same number of dimensions in every put"
        ):
            client.put("train", data)
    with pytest.raises(tq.errors.FieldMismatchError, match="convert the rows to the field's dtype"):
        client.put("train", {"x": torch.zeros(2, dtype=torch.int64)})
    with pytest.raises(tq.errors.FieldMismatchError, match="the field contains tensors: put tensors"):
        client.put("train", {"x": ["a", "b"]})
    assert client.describe_partition("train").summary.inserted_count == 2


def test_layouts_that_hold_for_no_tensor_are_refused(server: LiveServer, client: AnyClient) -> None:
    with pytest.raises(tq.errors.InvalidArgumentError, match="default_layout is 'object'") as refused:
        client.create_partition("train", default_layout="object")
    assert refused.value.field == "default_layout"
    with pytest.raises(tq.errors.InvalidArgumentError, match="expected one of auto, dense, jagged, object"):
        client.create_partition("train", default_layout="ragged")


@pytest.mark.parametrize("name", LENGTHS)
def test_what_is_got_is_padded_as_what_was_put(client: AnyClient, name: str) -> None:
    """Nested tensors, ragged in their first dimension and in their second, of one put and of several."""
    data = columns_of(LENGTHS[name])
    several = [columns_of([length], first=row) for row, length in enumerate(LENGTHS[name])]
    metas = [client.put("one", data), *(client.put("many", each) for each in several)]
    for meta in (metas[0], tq.BatchMeta.concat(metas[1:])):
        batch = client.get_data(meta)
        for field, put in data.items():
            assert batch[field]._ragged_idx == put._ragged_idx
            assert torch.equal(batch[field].to_padded_tensor(-7), put.to_padded_tensor(-7))


# The layout that a get asks for


def test_a_get_asks_for_a_layout(client: AnyClient) -> None:
    data = {
        "alike": made(0, (3, 4)),
        "nested": torch.nested.nested_tensor([made(row, (4,)) for row in range(3)], layout=torch.jagged),
        "rows": [made(0, (2, 4)), made(1, (2, 4)), made(2, (2, 6))],
        "several": [made(0, (2, 4)), made(1, (2, 6)), made(2, (3, 6))],
        "score": torch.zeros(3),
        "text": ["a", "b", "c"],
    }
    meta = client.put("train", data)
    first = meta.select_samples([1, 0])

    def kinds(meta: tq.BatchMeta, layout: str | None) -> dict[str, Any]:
        batch = client.get_data(meta, layout=layout)
        for name, values in data.items():
            if name not in ("score", "text"):
                assert_same_rows(batch[name], [rows_of(values)[index] for index in meta.global_indexes])
        assert batch["score"].shape == (meta.size,)
        return {
            name: list if not isinstance(batch[name], torch.Tensor) else getattr(batch[name], "_ragged_idx", 0)
            for name in ("alike", "nested", "rows", "several")
        }

    assert kinds(meta, None) == {"alike": 0, "nested": 1, "rows": 2, "several": list}
    assert kinds(meta, "auto") == {"alike": 0, "nested": 0, "rows": 2, "several": list}
    assert kinds(meta, "jagged") == {"alike": 1, "nested": 1, "rows": 2, "several": list}
    assert kinds(first, None) == {"alike": 0, "nested": 1, "rows": 2, "several": list}
    assert kinds(first, "auto") == {"alike": 0, "nested": 0, "rows": 0, "several": 2}
    assert kinds(first, "jagged") == {"alike": 1, "nested": 1, "rows": 2, "several": 2}
    assert kinds(meta.select_samples([0]), "dense") == {"alike": 0, "nested": 0, "rows": 0, "several": 0}
    with pytest.raises(
        tq.errors.FieldMismatchError,
        match=r"rows of field 'rows' differ in shape: row 0 is \(2, 4\), row 2 is \(2, 6\)",
    ) as refused:
        client.get_data(meta, layout="dense")
    assert refused.value.field == "layout"
    assert refused.value.metadata["field_name"] == "rows"
    assert (refused.value.metadata["got"], refused.value.metadata["expected"]) == ("(2, 6)", "(2, 4)")
    with pytest.raises(
        tq.errors.InvalidArgumentError, match="layout is 'object', expected None or 'auto' or 'dense' or 'jagged'"
    ):
        client.get_data(meta, layout="object")


def test_empty_batches_are_of_the_layout_asked_for(client: AnyClient) -> None:
    data = {"d": made(0, (2, 4)), "j": [made(0, (2, 4)), made(1, (2, 6))], "s": torch.zeros(2)}
    empty = client.put("train", data).select_samples([])
    for layout in (None, "auto", "jagged"):
        assert client.get_data(empty, layout=layout)["j"]._ragged_idx == 2
    assert client.get_data(empty, layout="dense")["j"].shape == (0, 2, 0)
    assert client.get_data(empty, layout="jagged")["d"].is_nested
    assert client.get_data(empty)["d"].shape == (0, 4)


# Lengths


def test_lengths_are_right_of_rows_that_came_before_others_differed(client: AnyClient) -> None:
    for length, count in ((5, 2), (3, 1), (8, 1)):
        client.put("train", {"ids": made(0, (count, 2, length))})
    options = {"length_field": "ids", "pack_max_length": 10, "optimizer_steps": 1}
    meta = client.get_meta(
        partition_id="train", task_name="t", data_fields=["ids"], batch_size=4, sampler="packed", sampler_config=options
    )
    lengths = {meta.global_indexes[at]: length for step in meta.steps for pack in step.packs
               for at, length in zip(pack.positions, pack.lengths, strict=True)}  # fmt: skip
    assert lengths == {0: 5, 1: 5, 2: 3, 3: 8}


def test_rows_that_are_all_alike_have_a_length(client: AnyClient) -> None:
    client.put("train", {"ids": made(0, (4, 5))})
    meta = client.get_meta(
        partition_id="train", task_name="t", data_fields=["ids"], batch_size=4, sampler="packed",
        sampler_config={"length_field": "ids", "pack_max_length": 10, "optimizer_steps": 1},
    )  # fmt: skip
    assert [pack.lengths for step in meta.steps for pack in step.packs] == [(5, 5), (5, 5)]


# Forgotten with the last cell


def test_a_field_is_forgotten_with_its_last_cell(client: AnyClient) -> None:
    declared = tq.FieldSpec("ids", layout="jagged")
    client.create_partition("train", fields=[declared])
    first = client.put("train", {"ids": made(0, (2, 5)), "x": torch.zeros(2)})
    held = client.insert("train", 1)
    client.clear_samples(first.select_samples([0]))
    assert names_of(client, "train") == ["ids", "x"]
    client.clear_samples(first)
    assert names_of(client, "train") == ["ids"]
    assert spec_of(client, "train", "ids") == ("", "jagged", None)
    with pytest.raises(tq.errors.CellNotFoundError, match=r"sample 2 .* has no 'x'"):
        client.get_data(held, data_fields=["x"])
    meta = client.put("train", {"ids": made(0, (2, 2, 3)).float(), "x": ["a", "b"]})
    assert spec_of(client, "train", "x")[1] == "object"
    batch = client.get_data(meta)
    assert batch["ids"].layout is torch.jagged
    assert batch["ids"].dtype is torch.float32
    assert list(batch["x"]) == ["a", "b"]


def test_a_field_whose_cells_all_are_overwritten_may_be_another(client: AnyClient) -> None:
    meta = client.put("train", {"x": torch.zeros(3), "y": made(0, (3, 4))})
    client.put(meta, {"y": made(0, (3, 5))})
    assert spec_of(client, "train", "y") == ("int64", "dense", (5,))
    client.put(meta.select_samples([1]), {"y": made(0, (1, 6))})
    assert spec_of(client, "train", "y") == ("int64", "jagged", (-1,))
    with pytest.raises(tq.errors.FieldMismatchError):
        client.put(meta.select_samples([0, 2]), {"x": torch.zeros(2, dtype=torch.int64)})
    more = client.put(meta, {"x": torch.arange(3), "y": ["a", "b", "c"]})
    assert client.get_data(more)["x"].tolist() == [0, 1, 2]
    assert list(client.get_data(more)["y"]) == ["a", "b", "c"]
    client.put(meta, state="failed")
    assert names_of(client, "train") == []


def test_the_empty_batch_of_a_rank_is_typed_when_the_others_have_cleared_theirs(client: AnyClient) -> None:
    """The other rank may be done with its samples, and have cleared them, before this one asks at all."""
    client.put("train", {"x": torch.zeros(1, 4, dtype=torch.int16), "text": ["a"]})
    client.seal_partition("train")

    def ask(dp_rank: int) -> tq.BatchMeta:
        return client.get_meta(
            partition_id="train", task_name="t", data_fields=["x", "text"], batch_size=1, dp_rank=dp_rank, dp_size=2,
            batch_index=0, max_wait=20,
        )  # fmt: skip

    client.clear_samples(ask(0))
    empty = ask(1)
    assert empty.size == 0
    batch = client.get_data(empty)
    assert (batch["x"].dtype, batch["x"].shape) == (torch.int16, (0, 4))
    assert list(batch["text"]) == []
