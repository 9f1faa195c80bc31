"""Fields that only some samples have: a get leaves them out, look-ups and puts answer which samples have which."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from live_server import AnyClient, LiveServer, LoopThread, StartServer
from rpc_samples import snapshot

import tq_service as tq
from tq_service.server.rpc.calls import Services
from tq_service.v1 import commit_pb2
from tq_service.v1 import controller_service_pb2 as pb

HAVE: dict[str, str] = {"prompt": "abcd", "response": "abc", "values": "b", "reward": "cd"}
"""Which of the samples a, b, c and d have each field."""


OF_CLIENTS = ("PutInline", "Put", "Commit", "LookupSamples", "Locate", "DescribePartition", "CheckProduction")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the methods by which servers of this process are called, in order."""
    made: list[str] = []
    find = Services.service

    def noted(services: Services, details: grpc.HandlerCallDetails) -> Any:
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


def put_some(client: AnyClient) -> None:
    """Put samples a to d, with the fields that each has."""
    for number, (name, keys) in enumerate(HAVE.items()):
        rows = torch.tensor([ord(key) + 1000 * number for key in keys])
        client.put("train", {name: rows}, keys=list(keys), custom_meta=[{"in_" + name: True}] * len(keys))


def value(name: str, key: str) -> int:
    return ord(key) + 1000 * list(HAVE).index(name)


def columns(batch: Any) -> dict[str, list[Any]]:
    assert not hasattr(batch, "batch_size") or len(batch.batch_size) == 1
    return {str(name): column.tolist() for name, column in batch.items()}


def expected(names: list[str], keys: str) -> dict[str, list[int]]:
    return {name: [value(name, key) for key in keys] for name in names}


def had(meta: tq.BatchMeta) -> dict[str, str]:
    """Return of each field which samples of a batch have it, by their keys."""
    return {
        name: "".join(str(key) for key, is_there in zip(meta.keys, mask, strict=True) if is_there)
        for name, mask in meta.produced.items()
    }


# What is got


@pytest.mark.parametrize(
    ("keys", "data_fields", "names"),
    [
        ("abcd", None, ["prompt"]),
        ("ca", None, ["prompt", "response"]),
        ("b", None, ["prompt", "response", "values"]),
        ("abc", ["values", "response", "nobody"], ["response"]),
        ("c", ["reward", "prompt"], ["reward", "prompt"]),
        ("abcd", ["values", "nobody"], []),
    ],
)
def test_fields_that_not_all_samples_have_are_left_out(
    client: AnyClient, calls: list[str], keys: str, data_fields: list[str] | None, names: list[str]
) -> None:
    put_some(client)
    calls.clear()
    batch = client.get_data("train", keys=list(keys), data_fields=data_fields, missing_fields="skip")
    assert columns(batch) == expected(names, keys)
    assert list(batch.keys()) == names
    assert batch.batch_size == torch.Size([len(keys)])
    assert calls.count("Locate") == 1


def test_without_it_a_field_that_a_sample_lacks_is_an_error(client: AnyClient) -> None:
    put_some(client)
    with pytest.raises(tq.errors.CellNotFoundError, match="no 'values', 'reward' yet"):
        client.get_data("train", keys=["a"])
    with pytest.raises(tq.errors.FieldNotFoundError, match="no field 'nobody'"):
        client.get_data("train", keys=["a"], data_fields=["nobody"], missing="skip")
    with pytest.raises(tq.errors.InvalidArgumentError, match="missing_fields is 'drop', expected 'error' or 'skip'"):
        client.get_data("train", keys=["a"], missing_fields="drop")


def test_samples_that_are_unknown_are_left_out_before_the_fields_are_chosen(client: AnyClient) -> None:
    put_some(client)
    got = client.get_data("train", keys=["b", "x", "a"], missing="skip", missing_fields="skip")
    assert columns(got) == expected(["prompt", "response"], "ba")
    with pytest.raises(tq.errors.KeyNotFoundError, match="no key 'x'"):
        client.get_data("train", keys=["b", "x"], missing_fields="skip")
    nobody = client.get_data("train", keys=["x"], missing="skip", missing_fields="skip")
    assert {name: list(column.shape) for name, column in nobody.items()} == {name: [0] for name in HAVE}


def test_fields_of_a_batch_are_left_out_likewise(client: AnyClient, calls: list[str]) -> None:
    put_some(client)
    meta, _ = client.lookup_samples("train", ["d", "c", "b"])
    assert columns(client.get_data(meta, missing_fields="skip")) == expected(["prompt"], "dcb")
    part = meta.select_samples([2, 1])
    assert columns(client.get_data(part, missing_fields="skip")) == expected(["prompt", "response"], "bc")
    assert columns(client.get_data(part, data_fields=["response", "x"], missing_fields="skip")) == expected(
        ["response"], "bc"
    )
    calls.clear()
    whole = client.lookup_samples("train", ["c"])[0]
    assert columns(client.get_data(whole, missing_fields="skip")) == expected(["prompt", "response", "reward"], "c")
    assert "Locate" not in calls  # the look-up said where they are
    client.put("train", {"values": torch.tensor([value("values", key) for key in "cd"])}, keys=["c", "d"])
    assert columns(client.get_data(meta, missing_fields="skip")) == expected(["prompt", "values"], "dcb")


def test_an_empty_batch_has_the_fields_that_there_are(client: AnyClient) -> None:
    put_some(client)
    nothing = client.lookup_samples("train", ["a"])[0].select_samples([])
    got = client.get_data(nothing, data_fields=["response", "nobody"], missing_fields="skip")
    assert {name: list(column.shape) for name, column in got.items()} == {"response": [0]}
    with pytest.raises(tq.errors.FieldNotFoundError, match="no field 'nobody'"):
        client.get_data(nothing, data_fields=["response", "nobody"])


def test_failed_samples_have_no_fields(client: AnyClient) -> None:
    put_some(client)
    client.put(client.lookup_samples("train", ["a"])[0], state="failed")
    got = client.get_data("train", keys=["a", "b"], missing_fields="skip")
    assert (dict(got.items()), got.batch_size) == ({}, torch.Size([2]))
    found, _ = client.lookup_samples("train")
    assert had(found) == {"prompt": "bcd", "response": "bc", "values": "b", "reward": "cd"}
    assert client.lookup_samples("train", ["a"])[0].data_fields == []


def test_parts_of_many_samples_have_the_fields_that_all_of_them_have(
    client: AnyClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_service.client.batch_meta.NAMED_AT_ONCE", 2)
    put_some(client)
    got = client.get_data("train", keys=list("cbad"), missing_fields="skip")
    assert columns(got) == expected(["prompt"], "cbad")
    got = client.get_data("train", keys=list("cba"), missing_fields="skip")
    assert columns(got) == expected(["prompt", "response"], "cba")


# What is known


@pytest.mark.parametrize("page_size", [16_384, 1, 3])
def test_a_look_up_answers_with_the_fields_of_the_samples(
    client: AnyClient, monkeypatch: pytest.MonkeyPatch, page_size: int
) -> None:
    monkeypatch.setattr("tq_service.serving.lookup._MOST_OF_A_PAGE", page_size)
    put_some(client)
    assert had(client.lookup_samples("train")[0]) == HAVE
    assert had(client.lookup_samples("train", ["c", "a"])[0]) == {"prompt": "ca", "response": "ca", "reward": "c"}
    none, missing = client.lookup_samples("train", ["x"])
    assert (none.data_fields, none.produced, missing) == ([], {}, ["x"])
    found, _ = client.lookup_samples("train", ["a", "d"])
    assert found.data_fields == ["prompt", "response", "reward"]
    assert {mask.dtype for mask in found.produced.values()} == {np.dtype(bool)}
    assert client.get_data(found, data_fields=["prompt"])["prompt"].tolist() == [value("prompt", key) for key in "ad"]


def test_look_ups_with_different_fields_make_one_batch_of_fields_that_both_have(client: AnyClient) -> None:
    put_some(client)
    one, other = (client.lookup_samples("train", [key])[0] for key in "db")
    with pytest.raises(tq.errors.InvalidArgumentError, match=r"parts differ in data_fields: .*select_fields"):
        tq.BatchMeta.concat([one, other])
    both = tq.BatchMeta.concat([one.select_fields(["prompt"]), other.select_fields(["prompt"])])
    assert had(both) == {"prompt": "db"}
    assert columns(client.get_data(both)) == expected(["prompt"], "db")


def test_a_claim_has_all_that_it_asked_for(client: AnyClient) -> None:
    put_some(client)
    claim = client.get_meta(partition_id="train", task_name="t", data_fields=["response"], batch_size=2, max_wait=5)
    assert {name: mask.tolist() for name, mask in claim.produced.items()} == {"response": [True, True]}


def test_bits_are_sent_only_where_some_samples_lack_a_field(server: LiveServer) -> None:
    put_some(server.client())
    answer = server.controller.LookupSamples(pb.LookupSamplesRequest(partition_id="train", all_samples=True))
    assert [spec.name for spec in answer.meta.fields] == list(HAVE)
    assert list(answer.meta.produced) == [b"", b"\x07", b"\x02", b"\x0c"]
    located = server.controller.Locate(pb.LocateRequest(partition_id="train", keys=["a"], data_fields=["prompt"]))
    assert not located.meta.produced


# What a put answers


def test_a_put_answers_with_all_that_its_samples_have(any_client: AnyClient, calls: list[str]) -> None:
    put_some(any_client)
    any_client.put("train", {"x": torch.zeros(4)}, keys=list("abcd"))  # learns where puts may go
    calls.clear()
    data, tags = {"values": torch.tensor([1, 2, 3])}, [{"n": 1}, {"n": 2}, {"in_prompt": False}]
    meta = any_client.put("train", data, keys=["c", "new", "a"], custom_meta=tags, return_meta="all")
    assert [name for name in calls if name in OF_CLIENTS] in (["PutInline"], ["PutInline", "Commit"])
    assert had(meta) == {"prompt": "ca", "response": "ca", "values": "cnewa", "reward": "c", "x": "ca"}
    found, _ = any_client.lookup_samples("train", ["c", "new", "a"])
    assert meta == found
    assert had(meta) == had(found)
    assert meta.custom_meta == [
        {"in_prompt": True, "in_response": True, "in_reward": True, "n": 1},
        {"n": 2},
        {"in_prompt": False, "in_response": True},
    ]
    assert any_client.get_data(meta, data_fields=["values"])["values"].tolist() == [1, 2, 3]
    assert columns(any_client.get_data(meta.select_samples([0]), missing_fields="skip"))["response"] == [
        value("response", "c")
    ]


@pytest.mark.parametrize("is_large", [False, True], ids=["small", "large"])
def test_a_put_to_a_claim_stays_of_the_claim(any_client: AnyClient, is_large: bool) -> None:
    put_some(any_client)
    claim = any_client.get_meta(
        partition_id="train", task_name="t", data_fields=["prompt"], batch_size=2, lease=60, max_wait=5
    )
    rows = torch.ones(2, 1 << 20 if is_large else 1)
    meta = any_client.put(claim, {"ref": rows}, return_meta="all")
    assert had(meta) == {"prompt": "ab", "response": "ab", "values": "b", "ref": "ab"}
    assert (meta.claim_id, meta.task_name, meta.delivery_counts) == (claim.claim_id, "t", (1, 1))
    assert meta.steps == claim.steps
    assert any_client.ack(meta) == 2


def test_a_put_of_metadata_alone_answers_with_all_too(any_client: AnyClient) -> None:
    put_some(any_client)
    found, _ = any_client.lookup_samples("train", ["d", "c"])
    meta = any_client.put(found, custom_meta=[{"n": 1}, {"n": 2}], return_meta="all")
    assert had(meta) == {"prompt": "dc", "response": "c", "reward": "dc"}
    assert [tags["n"] for tags in meta.custom_meta] == [1, 2]
    new = any_client.put("train", keys=["e"], custom_meta=[{"n": 3}], return_meta="all")
    assert (new.keys, new.custom_meta, new.data_fields, new.produced) == (["e"], [{"n": 3}], [], {})


def test_a_put_answers_as_before_where_it_is_not_asked(client: AnyClient) -> None:
    put_some(client)
    meta = client.put("train", {"x": torch.zeros(1)}, keys=["a"])
    assert (meta.data_fields, meta.custom_meta, meta.produced) == (["x"], [{}], {})
    found, _ = client.lookup_samples("train", ["a", "b"])
    assert client.put(found, {"x": torch.zeros(2)}).produced == {}
    with pytest.raises(tq.errors.InvalidArgumentError, match="return_meta is 'some', expected 'written' or 'all'"):
        client.put("train", {"x": torch.zeros(1)}, keys=["a"], return_meta="some")


def test_what_is_known_of_many_samples_comes_in_parts(client: AnyClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tq_service.serving.lookup._MOST_OF_A_PAGE", 3)
    put_some(client)
    keys = [*"abcd", *(f"k{number}" for number in range(6))]
    tags = [{"n": number} for number in range(10)]
    meta = client.put("train", {"x": torch.arange(10)}, keys=keys, custom_meta=tags, return_meta="all")
    assert had(meta) == HAVE | {"x": "".join(keys)}
    assert [one["n"] for one in meta.custom_meta] == list(range(10))
    assert client.get_data(meta, data_fields=["x"])["x"].tolist() == list(range(10))


def write_of(keys: list[str], **more: Any) -> commit_pb2.CommitRequest:
    write = commit_pb2.SampleWrite(partition_id="train", row_count=len(keys), keys=keys)
    return commit_pb2.CommitRequest(request_id=secrets.token_bytes(16), write=write, return_all_meta=True, **more)


def test_a_repeat_answers_with_what_is_known_by_then(server: LiveServer) -> None:
    client = server.client()
    put_some(client)
    request = write_of(["a", "new"])
    first = server.controller.Commit(request)
    assert [spec.name for part in first.all_meta for spec in part.fields] == ["prompt", "response"]
    client.put("train", {"reward": torch.tensor([1])}, keys=["new"])
    again = server.controller.Commit(request)
    assert again.meta == first.meta
    assert [spec.name for part in again.all_meta for spec in part.fields] == ["prompt", "response", "reward"]
    client.clear_samples("train", keys=["new"])
    without = server.controller.Commit(request)
    assert (without.meta, len(without.all_meta)) == (first.meta, 0)
    client.clear_partition("train")
    client.put("train", {"x": torch.zeros(2)}, keys=["a", "new"])
    assert server.controller.Commit(request) == without


def test_a_repeat_after_a_restart_answers_with_what_is_known(start_server: StartServer, tmp_path: Path) -> None:
    settings = {"data_dir": str(tmp_path), "durability": "process"}
    server = start_server(**settings)
    put_some(server.client())
    request = write_of(["a", "new"])
    first = server.controller.Commit(request)
    server.stop()
    again = start_server(**settings).controller.Commit(request)
    assert again.meta == first.meta
    assert [list(part.keys) for part in again.all_meta] == [["a", "new"]]
    assert [list(part.produced) for part in again.all_meta] == [list(part.produced) for part in first.all_meta]
    assert len(again.all_meta[0].produced) == 2


@pytest.mark.parametrize("way", ["embedded", "apart", "no data"])
def test_all_that_is_known_is_refused_of_more_samples_than_one_answer_is_about(
    start_server: StartServer, loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    for module in ("tq_service.server.puts", "tq_service.serving.lookup"):
        monkeypatch.setattr(f"{module}.MOST_NAMED", 3)
    server = start_server(role="controller" if way == "apart" else "all")
    if way == "apart":
        start_server(role="storage", controller=server.address)
    client = server.client()
    put_some(client)
    before = snapshot(client) if way != "apart" else client.describe_partition("train").summary

    def put(keys: str) -> tq.BatchMeta:
        data = None if way == "no data" else {"x": torch.zeros(len(keys))}
        meta: tq.BatchMeta = client.put("train", data, keys=list(keys), return_meta="all")
        return meta

    with pytest.raises(
        tq.errors.InvalidArgumentError, match="return_all_meta is set for 4 samples; expected at most 3"
    ) as caught:
        put("abce")
    assert caught.value.field == "return_all_meta"
    assert before == (snapshot(client) if way != "apart" else client.describe_partition("train").summary)
    assert put("abc").size == 3


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("named", ["claim", "written", "keys", "indexes"])
def test_samples_that_were_cleared_are_named_though_their_fields_went_with_them(
    client: AnyClient, named: str, count: int
) -> None:
    written = client.put("train", {"x": torch.arange(4)}, keys=list("abcd"))
    meta = client.get_meta(partition_id="train", task_name="t", data_fields=["x"], batch_size=4)
    client.clear_samples(meta.select_samples(range(count)))
    ways: dict[str, dict[str, Any]] = {
        "claim": {"target": meta},
        "written": {"target": written},
        "keys": {"target": "train", "keys": list("abcd"), "data_fields": ["x"]},
        "indexes": {"target": "train", "global_indexes": range(4), "data_fields": ["x"]},
    }
    says = "no key 'a'" if named == "keys" else rf"no sample 0 \({count} of 4 are missing\).*were cleared"
    with pytest.raises(tq.errors.NotFoundError, match=says) as refused:
        client.get_data(**ways[named])
    assert isinstance(refused.value, tq.errors.KeyNotFoundError if named == "keys" else tq.errors.SampleNotFoundError)
    assert client.get_data(**ways[named], missing="skip")["x"].tolist() == list(range(count, 4))
    with pytest.raises(tq.errors.FieldNotFoundError, match="no field 'y'"):
        client.get_data(**{**ways[named], "data_fields": ["y"]})


@pytest.mark.parametrize("count", [1, 4])
def test_samples_that_failed_are_named_though_their_fields_went_with_them(client: AnyClient, count: int) -> None:
    client.put("train", {"x": torch.arange(4)})
    meta = client.get_meta(partition_id="train", task_name="t", data_fields=["x"], batch_size=4)
    client.put(meta.select_samples(range(count)), state="failed")
    with pytest.raises(
        tq.errors.CellNotFoundError, match=r"sample 0 .* has no 'x' and never will, since the sample has failed"
    ):
        client.get_data(meta)
    assert client.get_data(meta, missing="skip")["x"].tolist() == list(range(count, 4))
