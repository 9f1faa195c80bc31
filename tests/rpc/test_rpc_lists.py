"""Lists whose rows may be tensors or objects: the field decides, which the client may not know before it puts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from live_server import AnyClient, LoopThread, StartServer
from tensordict import NonTensorStack, TensorDict

import tq_service as tq
from tq_service.server.rpc.calls import Services

OBJECT = tq.FieldSpec("x", layout="object")
LISTS: list[Any] = [
    [0.5, 1.0],
    [1, 2],
    [True, False],
    [1, 0.5],
    [np.float32(1), np.float32(2)],
    [torch.ones(2), torch.zeros(2)],
    [torch.ones(2), torch.zeros(3)],
    [torch.tensor(1), torch.tensor(2)],
    [np.ones(2), np.zeros(2)],
    [[1, 2], [3]],
    [[1, 2], [3, 4]],
    [[], []],
    ["a", "b"],
    [None, 1.0],
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the methods by which clients call servers of this process, in order."""
    made: list[str] = []
    find = Services.service

    def noted(services: Services, details: grpc.HandlerCallDetails) -> Any:
        if "internal" not in details.method:
            made.append(details.method.rpartition("/")[2])
        return find(services, details)

    monkeypatch.setattr(Services, "service", noted)
    return made


@pytest.fixture(params=["embedded", "apart"])
def any_client(
    request: pytest.FixtureRequest, start_server: StartServer, client_kind: Any, loop_thread: LoopThread
) -> Iterator[AnyClient]:
    """A client of a service in one process, and of one whose storage service is another."""
    controller = start_server(role="controller" if request.param == "apart" else "all", shared_memory="off")
    if request.param == "apart":
        start_server(role="storage", controller=controller.address, shared_memory="off")
    client = AnyClient(client_kind, controller.address, loop_thread, timeout=20.0)
    yield client
    client.close()


def rows_of(client: AnyClient, partition: str = "p") -> Any:
    count = client.describe_partition(partition).summary.inserted_count
    column = client.get_data(partition, global_indexes=range(count), data_fields=["x"])["x"]
    return list(column.unbind()) if isinstance(column, torch.Tensor) and column.is_nested else list(column)


@pytest.mark.parametrize("values", LISTS, ids=repr)
def test_a_field_of_objects_takes_any_list(client: AnyClient, values: Any) -> None:
    client.create_partition("p", fields=[OBJECT])
    client.put("p", {"x": values}, keys=["a", "b"])
    meta = client.put("p", {"n": torch.ones(2)})  # which does not name the field yet
    client.put(meta, {"x": values})
    assert repr(rows_of(client)) == repr(values * 2)


def test_a_field_that_its_first_put_made_one_of_objects_takes_lists_of_numbers(any_client: AnyClient) -> None:
    any_client.put("p", {"x": [None, 1.0], "y": [["a"], []]})
    any_client.put("p", {"x": [0.5, 1.0], "y": [[], [1, 2]]})
    any_client.put("p", {"x": [2, 3], "y": [[1], [2]]}, keys=["a", "b"])
    assert rows_of(any_client) == [None, 1.0, 0.5, 1.0, 2, 3]
    y = any_client.get_data("p", global_indexes=range(6), data_fields=["y"])["y"]
    assert list(y) == [["a"], [], [], [1, 2], [1], [2]]


def test_lists_are_sent_twice_only_once(any_client: AnyClient, calls: list[str]) -> None:
    any_client.create_partition("p", fields=[OBJECT])
    any_client.put("p", {"x": [0.5]})
    first = list(calls)
    calls.clear()
    for _ in range(5):
        any_client.put("p", {"x": [0.5]})
    assert first.count("PutInline") == 2
    assert calls.count("PutInline") == calls.count("DescribePartition") == 5
    calls.clear()
    any_client.put("p", {"x": NonTensorStack(0.5)})  # says what it is
    any_client.put("q", {"x": [0.5]})
    assert "DescribePartition" not in calls


def test_what_is_refused_not_for_its_lists_is_not_sent_again(any_client: AnyClient, calls: list[str]) -> None:
    any_client.put("p", {"n": torch.ones(2, dtype=torch.int64), "t": ["a", "b"]})
    calls.clear()
    with pytest.raises(tq.errors.FieldMismatchError, match="'n' is int64"):
        any_client.put("p", {"n": torch.ones(2), "t": ["c", "d"]})
    assert calls.count("PutInline") == 1


def test_what_a_partition_refused_does_not_hold_of_the_next_one_of_its_name(any_client: AnyClient) -> None:
    any_client.put("p", {"x": [None]})
    any_client.put("p", {"x": [0.5]})
    any_client.clear_partition("p")
    any_client.put("p", {"x": [0.5]})
    any_client.put("p", {"x": torch.ones(1, dtype=torch.float64)})
    assert rows_of(any_client) == [0.5, 1.0]
    assert any_client.describe_partition("p").fields[0].spec.layout == "dense"


def test_objects_that_a_field_cannot_hold_are_still_refused(client: AnyClient, calls: list[str]) -> None:
    client.create_partition("p", fields=[OBJECT, tq.FieldSpec("t", layout="object", encoding="text")])
    before = client.describe_partition("p").summary.inserted_count
    for data, message in (
        ({"x": torch.ones(2)}, "'x' is object .*, got float32 dense.*contains objects: put its rows as a list"),
        ({"x": np.ones(2)}, "'x' is object .*, got float64 dense"),
        (TensorDict({"x": torch.ones(2)}, [2]), "'x' is object"),
        ({"t": [1, 2]}, "'t' is object .text., got object .msgpack."),
    ):
        with pytest.raises(tq.errors.FieldMismatchError, match=message):
            client.put("p", data)
    assert client.describe_partition("p").summary.inserted_count == before


# Lists of numbers, as inference engines answer tokens


@pytest.mark.parametrize("first", [[[1, 2], [3, 4]], [[1, 2, 3], [4]], [[1], []], [[5], [6]]])
def test_lists_of_tokens_are_tensors_beside_those_of_others(client: AnyClient, first: Any) -> None:
    client.put("p", {"x": first})
    client.put("p", {"x": [[7], [8, 9, 10]]})
    client.put("p", {"x": [torch.tensor([1, 2]), torch.tensor([3])]})
    client.put("p", {"x": [[], []]})
    client.put("p", {"x": torch.tensor([[1, 2]])})
    assert [row.tolist() for row in rows_of(client)] == [*first, [7], [8, 9, 10], [1, 2], [3], [], [], [1, 2]]
    spec = client.describe_partition("p").fields[0].spec
    assert (spec.dtype, spec.layout, spec.row_shape) == ("int64", "jagged", (-1,))


def test_a_declared_jagged_field_takes_lists_and_gives_lengths(client: AnyClient) -> None:
    client.create_partition("p", fields=[tq.FieldSpec("x", layout="jagged")])
    client.put("p", {"x": [[], []]})
    client.put("p", {"x": [[1, 2, 3], [4]]})
    client.put("p", {"x": [[1, 2], [3, 4]]})
    client.seal_partition("p")
    meta = client.get_meta(
        partition_id="p", task_name="t", data_fields=["x"], batch_size=6, batch_index=0, dp_rank=0, dp_size=1,
        sampler="seqlen_balanced", sampler_config={"length_field": "x"},
    )  # fmt: skip
    got = client.get_data(meta)["x"]
    assert sorted(map(len, got.unbind())) == [0, 0, 1, 2, 2, 3]


def test_nested_lists_are_what_the_field_holds(client: AnyClient) -> None:
    client.put("p", {"x": [torch.ones(2, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64)]})
    client.put("p", {"x": [[[1, 2], [3, 4]], [[5, 6]]]})
    client.put("p", {"x": [[], []]})
    assert [row.tolist() for row in rows_of(client)][2:4] == [[[1, 2], [3, 4]], [[5, 6]]]
    assert [tuple(row.shape) for row in rows_of(client)][4:] == [(0, 2)] * 2
    client.put("q", {"x": [[[1, 2], [3, 4]], [[5], [6, 7]]]})
    assert rows_of(client, "q") == [[[1, 2], [3, 4]], [[5], [6, 7]]]
