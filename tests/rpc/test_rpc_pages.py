"""Long lists come page by page; clients make one batch of them."""

from __future__ import annotations

from collections.abc import Iterator
from secrets import token_bytes
from typing import Any

import grpc
import numpy as np
import pytest
from live_server import AnyClient, LiveServer
from rpc_samples import violations_of

import tq_service as tq
from tq_service.machine.samples import SamplesCleared
from tq_service.machine.state_machine import Change
from tq_service.serving.catalog import Catalog
from tq_service.state.partition import PartitionSettings
from tq_service.v1 import commit_pb2
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.wire.metadata import read_indexes

COUNT = 33_000
MOST_ON_A_PAGE = 16_384
DEFAULT_MESSAGE_BYTES = 4 << 20  # of gRPC, which clients in other languages have
KEYS = [f"k{number}" for number in range(COUNT)]


def put_many(client: AnyClient) -> tq.BatchMeta:
    """Put samples whose field has the number of each."""
    parts: list[tq.BatchMeta] = [
        client.put(
            "train",
            {"number": some},
            keys=[KEYS[number] for number in some],
            groups=[f"g{number // 4}" for number in some],
            custom_meta=[{"version": int(number % 7)} for number in some],
        )
        for some in np.array_split(np.arange(COUNT), 3)
    ]
    return tq.BatchMeta.concat(parts)


def all_pages(server: LiveServer, **request: object) -> Iterator[pb.LookupSamplesResponse]:
    """Ask for page after page over a channel with the limits of gRPC."""
    asked = pb.LookupSamplesRequest(partition_id="train", **request)  # type: ignore[arg-type]
    while True:
        page = server.controller.LookupSamples(asked, timeout=20)
        yield page
        if not page.next_page_token:
            return
        asked.page_token = page.next_page_token


@pytest.fixture
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have three names on a page at most."""
    monkeypatch.setattr("tq_service.serving.lookup._MOST_NAMES_OF_A_PAGE", 3)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 7])
@pytest.mark.usefixtures("short_pages")
def test_the_client_makes_one_list_of_all_pages(client: AnyClient, count: int) -> None:
    names = [f"train@{number}" for number in range(count)]
    for name in [*names[::-1], "eval", "u"]:
        client.create_partition(name)
    assert [each.partition_id for each in client.list_partitions("train@")] == names
    assert [each.partition_id for each in client.list_partitions()] == ["eval", *names, "u"]
    samplers = [each.name for each in client.list_samplers()]
    assert len(samplers) > 3
    assert samplers == sorted(set(samplers))


def pages_of_names(server: LiveServer, **request: Any) -> list[list[str]]:
    """Return the names on each page of partitions."""
    asked, pages = pb.ListPartitionsRequest(**request), []
    while not pages or asked.page_token:
        answer = server.controller.ListPartitions(asked, timeout=20)
        pages.append([each.partition_id for each in answer.partitions])
        asked.page_token = answer.next_page_token
    return pages


def test_pages_of_partitions_are_as_long_as_asked(server: LiveServer) -> None:
    for name in "abcde":
        server.client().create_partition(name)
    assert pages_of_names(server, page_size=2) == [["a", "b"], ["c", "d"], ["e"]]
    assert pages_of_names(server, page_size=5) == pages_of_names(server) == [list("abcde")]
    assert pages_of_names(server, page_size=2**31 - 1, prefix="c") == [["c"]]


def test_a_list_goes_on_where_its_next_partition_is_gone(server: LiveServer) -> None:
    client = server.client()
    for name in "abcd":
        client.create_partition(name)
    first = server.controller.ListPartitions(pb.ListPartitionsRequest(page_size=2))
    client.clear_partition("c")
    client.create_partition("bb")
    assert pages_of_names(server, page_size=2, page_token=first.next_page_token) == [["d"]]


@pytest.mark.parametrize("method", ["ListPartitions", "ListSamplers"])
@pytest.mark.parametrize(("field", "value"), [("page_size", -1), ("page_token", "x\n"), ("page_token", "zzz")])
def test_pages_that_are_none_are_refused(server: LiveServer, method: str, field: str, value: Any) -> None:
    kind = getattr(pb, f"{method}Request")
    with pytest.raises(grpc.RpcError) as caught:
        getattr(server.controller, method)(kind(**{field: value}), timeout=20)
    assert status_of(caught.value) is grpc.StatusCode.INVALID_ARGUMENT
    assert violations_of(caught.value) == [field]


def test_a_token_of_another_list_is_refused(server: LiveServer) -> None:
    for name in ("a", "b1", "b2", "sequential"):
        server.client().create_partition(name)
    partitions = server.controller.ListPartitions(pb.ListPartitionsRequest(page_size=1)).next_page_token
    samplers = server.controller.ListSamplers(pb.ListSamplersRequest(page_size=1)).next_page_token
    assert pages_of_names(server, page_token=partitions) == [["b1", "b2", "sequential"]]
    others: list[tuple[Any, Any]] = [
        (server.controller.ListPartitions, pb.ListPartitionsRequest(prefix="b", page_token=partitions)),
        (server.controller.ListPartitions, pb.ListPartitionsRequest(page_token=partitions[:-1])),
        (server.controller.ListPartitions, pb.ListPartitionsRequest(page_token=samplers)),
        (server.controller.ListSamplers, pb.ListSamplersRequest(page_token=partitions)),
        (server.controller.LookupSamples, pb.LookupSamplesRequest(partition_id="a", page_token=partitions)),
    ]
    for method, request in others:
        with pytest.raises(grpc.RpcError) as caught:
            method(request, timeout=20)
        assert status_of(caught.value) is grpc.StatusCode.INVALID_ARGUMENT
        assert violations_of(caught.value) == ["page_token"]


def test_pages_of_samplers_are_as_long_as_asked(server: LiveServer) -> None:
    every = [each.name for each in server.controller.ListSamplers(pb.ListSamplersRequest()).samplers]
    asked, found = pb.ListSamplersRequest(page_size=2), []
    while True:
        answer = server.controller.ListSamplers(asked, timeout=20)
        assert len(answer.samplers) == 2 or not answer.next_page_token
        found += [each.name for each in answer.samplers]
        if not answer.next_page_token:
            break
        asked.page_token = answer.next_page_token
    assert found == every


def test_a_page_of_the_longest_names_fits_into_the_usual_message(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1_001):
        server.client().create_partition("\U00010400" * 507 + f"{number:05}")
    first = server.controller.ListPartitions(pb.ListPartitionsRequest(), timeout=20)
    assert len(first.partitions) == 1_000
    assert first.ByteSize() < DEFAULT_MESSAGE_BYTES
    assert len(server.client().list_partitions()) == 1_001


def status_of(error: grpc.RpcError) -> grpc.StatusCode:
    """Return the code of an error of a call."""
    code: grpc.StatusCode = error.code()
    return code


def test_the_client_makes_one_batch_of_all_pages(client: AnyClient) -> None:
    put = put_many(client)
    found, missing = client.lookup_samples("train")
    assert missing == []
    assert found == put
    assert client.get_data(found)["number"].tolist() == list(range(COUNT))


def test_many_keys_are_looked_up_and_located_in_parts(client: AnyClient) -> None:
    put_many(client)
    client.clear_samples("train", keys=KEYS[100:20_000:2])
    asked = KEYS[::-1]
    found, missing = client.lookup_samples("train", asked)
    gone = set(KEYS[100:20_000:2])
    assert found.keys == [key for key in asked if key not in gone]
    assert missing == [key for key in asked if key in gone]
    assert client.get_data(found)["number"].tolist() == found.global_indexes
    located = client.get_data("train", keys=asked, missing="skip")
    assert located["number"].tolist() == found.global_indexes
    by_index = client.get_data("train", global_indexes=found.global_indexes[::-1])
    assert by_index["number"].tolist() == found.global_indexes[::-1]
    with pytest.raises(tq.errors.KeyNotFoundError, match="k100"):
        client.get_data("train", keys=KEYS)


@pytest.mark.parametrize("size", [1_000, 0, 2**31 - 1])
def test_pages_have_the_size_that_was_asked_for_at_most(server: LiveServer, size: int) -> None:
    put_many(server.client())
    pages = list(all_pages(server, all_samples=True, page_size=size))
    counts = [len(page.meta.keys) for page in pages]
    assert max(counts) == counts[0] == (size if size == 1_000 else MOST_ON_A_PAGE)
    assert [key for page in pages for key in page.meta.keys] == KEYS
    assert all(page.ByteSize() < DEFAULT_MESSAGE_BYTES for page in pages)


@pytest.mark.parametrize("by_key", [False, True])
def test_a_page_of_long_names_has_fewer_samples(server: LiveServer, by_key: bool) -> None:
    count = 4_000  # which fit into one request, but not into one answer
    keys = [f"{number:05d}".ljust(500, "ü") for number in range(count)]
    client = server.client()
    client.insert("train", keys=keys, custom_meta=[{"text": "x" * 2 * number} for number in range(count)])
    pages = list(all_pages(server, **({"keys": keys} if by_key else {"all_samples": True})))
    assert [key for page in pages for key in page.meta.keys] == keys
    assert len(pages) > 2
    assert client.lookup_samples("train")[0].keys == keys


def test_one_sample_that_is_larger_than_a_page_is_a_page(server: LiveServer) -> None:
    client = server.client()
    meta = client.insert("train", 3, keys=["a", "b", "c"])
    for number in range(40):
        client.set_custom_meta(meta.select_samples([1]), [{f"text {number}": "x" * 16_000}])
    pages = list(all_pages(server, all_samples=True))
    assert [list(page.meta.keys) for page in pages] == [["a"], ["b"], ["c"]]


def test_samples_that_go_between_two_pages_are_left_out_and_new_ones_are_listed(server: LiveServer) -> None:
    client = server.client()
    put_many(client)
    pages = all_pages(server, all_samples=True, page_size=10_000)
    keys = list(next(pages).meta.keys)
    client.clear_samples("train", keys=KEYS[5_000:15_000])
    client.insert("train", keys=["new"])
    keys += [key for page in pages for key in page.meta.keys]
    assert keys == KEYS[:10_000] + KEYS[15_000:] + ["new"]


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_list_of_a_partition_that_was_cleared_ends(server: LiveServer, is_made_again: bool) -> None:
    client = server.client()
    put_many(client)
    pages = all_pages(server, all_samples=True)
    next(pages)
    client.clear_partition("train")
    if is_made_again:
        put_many(client)
    with pytest.raises(grpc.RpcError) as caught:
        next(pages)
    assert status_of(caught.value) is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    "request_",
    [
        pb.LookupSamplesRequest(all_samples=True, page_size=-1),
        pb.LookupSamplesRequest(all_samples=True, page_token="next"),
        pb.LookupSamplesRequest(all_samples=True, page_token="zz" * 16 + "-5"),
        pb.LookupSamplesRequest(all_samples=True, page_token="00" * 16 + "--5"),
        pb.LookupSamplesRequest(all_samples=True, page_token="00" * 16 + "-" + "9" * 40),
        pb.LookupSamplesRequest(keys=["k"] * 65_537),
        pb.LocateRequest(global_indexes=range(65_537)),
    ],
    ids=["size", "token", "no hex", "sign", "large", "keys", "indexes"],
)
def test_what_is_no_page_is_refused(server: LiveServer, request_: pb.LookupSamplesRequest | pb.LocateRequest) -> None:
    server.client().put("train", {"x": np.zeros(3)}, keys=["k", "l", "m"])
    request_.partition_id = "train"
    call = server.controller.Locate if isinstance(request_, pb.LocateRequest) else server.controller.LookupSamples
    with pytest.raises(grpc.RpcError) as caught:
        call(request_, timeout=20)
    assert status_of(caught.value) is grpc.StatusCode.INVALID_ARGUMENT


def test_a_token_goes_with_the_samples_that_were_asked_for(server: LiveServer) -> None:
    put_many(server.client())
    asked = pb.LookupSamplesRequest(partition_id="train", all_samples=True, page_size=2)
    token = server.controller.LookupSamples(asked).next_page_token
    others = [
        {"all_samples": False, "global_indexes": [0, 1, 2]},
        {"all_samples": False, "keys": ["k"]},
        {"where": [pb.Condition(column="x", operator=pb.OPERATOR_EQ, values=[pb.MetaValue(int64_value=1)])]},
    ]
    for other in others:
        wrong = pb.LookupSamplesRequest(**{"partition_id": "train", "all_samples": True, "page_token": token, **other})
        with pytest.raises(grpc.RpcError) as caught:
            server.controller.LookupSamples(wrong)
        assert violations_of(caught.value) == ["page_token"]
    more = pb.LookupSamplesRequest(
        partition_id="train", all_samples=True, page_token=token, page_size=1, missing_ok=True
    )
    assert len(read_indexes(server.controller.LookupSamples(more).meta)) == 1


def test_the_answer_to_a_large_write_is_small(server: LiveServer) -> None:
    write = commit_pb2.SampleWrite(partition_id="train", row_count=1 << 18)
    answer = server.controller.Insert(pb.InsertRequest(request_id=token_bytes(16), write=write), timeout=20)
    assert answer.ByteSize() < 100
    assert server.client().insert("train", 1 << 18).global_indexes == list(range(1 << 18, 1 << 19))


@pytest.mark.parametrize("by_key", [False, True])
def test_many_samples_are_cleared_in_parts(server: LiveServer, by_key: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    client, count = server.client(), 100_000
    keys = [f"k{number}" for number in range(count)]
    for some in np.array_split(keys, 7):
        client.insert("train", keys=some)
    real, sizes = Catalog.commit, []

    def commit(catalog: Catalog, change: Change) -> Any:
        if isinstance(change, SamplesCleared):
            sizes.append(change.global_indexes.size)
        return real(catalog, change)

    monkeypatch.setattr(Catalog, "commit", commit)
    named = {"keys": keys[1:]} if by_key else {"global_indexes": range(1, count)}
    request = pb.ClearSamplesRequest(request_id=token_bytes(16), partition_id="train", **named)  # type: ignore[arg-type]
    answers = [server.controller.ClearSamples(request, timeout=20).cleared_count for _ in range(2)]
    assert answers == [count - 1] * 2
    assert max(sizes) <= 32_768
    assert sum(sizes) == count - 1
    assert client.lookup_samples("train")[0].keys == ["k0"]


def test_a_clear_of_many_samples_does_not_reach_the_next_incarnation(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, count = server.client(), 100_000
    client.insert("train", count)
    real = Catalog.commit

    def commit(catalog: Catalog, change: Change) -> Any:
        answer = real(catalog, change)
        if isinstance(change, SamplesCleared):
            catalog.remove("train", b"")
            catalog.create("train", PartitionSettings())
        return answer

    monkeypatch.setattr(Catalog, "commit", commit)
    request = pb.ClearSamplesRequest(request_id=token_bytes(16), partition_id="train", global_indexes=range(count))
    with pytest.raises(grpc.RpcError) as caught:
        server.controller.ClearSamples(request, timeout=20)
    assert status_of(caught.value) is grpc.StatusCode.FAILED_PRECONDITION


def test_a_large_put_with_names_is_there_whole(client: AnyClient) -> None:
    count = 16_384
    keys = [f"k{number}" for number in range(count)]
    for start in (0, count // 2):
        some = keys[start : start + count // 2]
        client.put("train", {"x": np.arange(start, start + len(some))}, keys=some, groups=some)
    client.put("train", {"x": -np.arange(count)}, keys=keys)
    found, missing = client.lookup_samples("train", keys)
    assert (missing, found.groups) == ([], keys)
    assert client.get_data(found)["x"].tolist() == [-number for number in range(count)]
    with pytest.raises(tq.errors.InvalidArgumentError, match="'k7' occurs twice"):
        client.insert("train", keys=[*keys[1:], "k7"])
    with pytest.raises(tq.errors.AlreadyExistsError, match="k0"):
        client.insert("train", keys=keys)
