"""Tensors of a device through the service, on each way that bytes take, with a stand-in for the device."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from live_server import AnyClient, ClientKind, LiveServer, StartServer
from stand_in_device import StandIn, set_pinned_memory, standing_in

from tq_service.dataplane import driver
from tq_service.errors import InvalidArgumentError, UnavailableError
from tq_service.wire import host_memory

WAYS = {
    "inline or frames": {"shared_memory": "off", "bulk": "off"},
    "bulk": {"shared_memory": "off"},
    "shared memory": {"shared_memory": "on"},
}
FIRST = torch.arange(1 << 19).reshape(4, -1)  # 4 MiB


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with standing_in(monkeypatch) as stand_in:
        yield stand_in


@pytest.fixture(params=WAYS)
def client(start_server: StartServer, client_kind: ClientKind, request: pytest.FixtureRequest) -> AnyClient:
    """A client of either kind that has found the way."""
    server: LiveServer = start_server(**WAYS[request.param], max_bytes=1 << 30)
    client = server.client(client_kind)
    client.put("first", {"x": FIRST})
    client.get_data(client.lookup_samples("first")[0])
    while request.param == "bulk" and not is_bulk_up(client):
        time.sleep(0.01)
    return client


def is_bulk_up(client: AnyClient) -> bool:
    homes = client.real._calls._channels.values()
    return any(endpoint.driver._bulk.is_up for endpoints in homes for endpoint in endpoints.values())


@pytest.mark.parametrize("rows", [4, 4000], ids=["small", "large"])
def test_a_put_from_the_device_is_a_put_from_the_host(client: AnyClient, stand_in: StandIn, rows: int) -> None:
    wide = torch.arange(rows * 512).reshape(rows, 512)
    ragged = [torch.full((number % 7,), number, dtype=torch.float32) for number in range(rows)]
    on_device = {
        "wide": stand_in.later(wide),
        "host": wide.to(torch.int32),
        "nested": stand_in.nested(ragged),
        "list": [stand_in.put(row) for row in ragged],
        "objects": [{"number": number} for number in range(rows)],
    }
    meta = client.put("p", on_device)
    back = client.get_data(meta)
    assert torch.equal(back["wide"], wide)
    assert torch.equal(back["host"], wide.to(torch.int32))
    for name in ("nested", "list"):
        assert all(map(torch.equal, back[name].unbind(), ragged))
    assert back["objects"][-1] == {"number": rows - 1}
    assert host_memory.PINNED.pinned_bytes <= 64 << 20
    assert not host_memory.PINNED._copies  # nothing of the caller is kept


def test_a_put_that_was_broken_off_is_copied_down_again(
    client: AnyClient, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    putting, tries = driver._GrpcSteps._putting, []

    def broken_off_once(*args: Any) -> Any:
        tries.append(args)
        answer = yield from putting(*args)
        if len(tries) == 1:
            raise UnavailableError("broken off")
        return answer

    monkeypatch.setattr(driver._GrpcSteps, "_putting", broken_off_once)
    values = torch.arange(4 << 20).reshape(4, -1)  # 32 MiB
    meta = client.put("p", {"x": stand_in.later(values)})
    assert len(tries) == 2
    assert torch.equal(client.get_data(meta)["x"], values)


def columns_of(rows: int) -> dict[str, Any]:
    return {
        "wide": torch.arange(rows * 512).reshape(rows, 512),
        "half": torch.arange(rows).to(torch.bfloat16),
        "flags": torch.arange(rows) % 3 == 0,
        "ragged": [torch.full((number % 7,), number, dtype=torch.float32) for number in range(rows)],
        "alike": [torch.full((number % 7,), -number) for number in range(rows)],
        "last": [torch.full((3, number % 5), number, dtype=torch.int16) for number in range(rows)],
        "several": [torch.full((number % 3, number % 5), number) for number in range(rows)],
        "objects": [{"tensor": torch.arange(number % 3)} for number in range(rows)],
    }


@pytest.mark.parametrize("rows", [4, 4000], ids=["small", "large"])
def test_a_get_to_the_device_is_a_get_to_the_host(client: AnyClient, stand_in: StandIn, rows: int) -> None:
    meta = client.put("p", columns_of(rows))
    expected = client.get_data(meta)
    stand_in.log.clear()
    got = client.get_data(meta, device="cuda:0")
    assert ("used", "default") in stand_in.log
    assert "synchronize" not in [what for what, _ in stand_in.log]  # the copy may be done later than the call
    for name, dtype in (("wide", torch.int64), ("half", torch.bfloat16), ("flags", torch.bool)):
        assert stand_in.read(got[name]).dtype == dtype
        assert torch.equal(stand_in.read(got[name]), expected[name])
    for name in ("ragged", "alike", "last"):
        assert stand_in.has(got[name].offsets())
        for ours, theirs in zip(got[name].unbind(), expected[name].unbind(), strict=True):
            assert torch.equal(ours, theirs)
    assert got["ragged"].offsets() is got["alike"].offsets()
    assert all(map(torch.equal, map(stand_in.read, got["several"]), expected["several"]))
    assert all(torch.equal(*pair) for pair in zip_tensors(got["objects"], expected["objects"]))
    assert not any(stand_in.has(row["tensor"]) for row in got["objects"])


@pytest.mark.parametrize("rows", [4, 4000], ids=["small", "large"])
def test_padded_parts_go_to_the_device_and_into_tensors(client: AnyClient, stand_in: StandIn, rows: int) -> None:
    meta = client.put("p", columns_of(rows))
    form: dict[str, Any] = {
        "data_fields": ["ragged", "last", "wide"], "slices": {"ragged": (0, 5), "wide": (1, 4)}, "padded": ["ragged"],
        "pad_value": 9, "length": 5, "mask": True,
    }  # fmt: skip
    expected = client.get_data(meta, **form)
    got = client.get_data(meta, device="cuda:0", **form)
    for name in ("ragged", "ragged_mask", "wide"):
        assert torch.equal(stand_in.read(got[name]), expected[name])
    assert all(map(torch.equal, got["last"].unbind(), expected["last"].unbind()))
    out = {name: torch.zeros_like(expected[name]) for name in ("ragged", "wide")}
    client.get_data(meta, out=out, **form)
    assert all(torch.equal(out[name], expected[name]) for name in out)


def zip_tensors(left: Any, right: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return ((one["tensor"], other["tensor"]) for one, other in zip(left, right, strict=True))


def test_one_copy_takes_the_columns_of_one_memory_and_one_the_offsets(client: AnyClient, stand_in: StandIn) -> None:
    meta = client.put("p", {name: columns_of(4000)[name] for name in ("wide", "ragged", "half")})
    stand_in.log.clear()
    got = client.get_data(meta, device="cuda")
    stand_in.default.run()
    # Of shared memory the small columns come beside it, in a block.
    assert len([what for what, _ in stand_in.log if what == "up"]) == (3 if pinned_regions() else 2)
    assert torch.equal(stand_in.read(got["wide"]), columns_of(4000)["wide"])


def test_the_arena_is_not_written_before_its_memory_is_free(client: AnyClient, stand_in: StandIn) -> None:
    """Blocks of pinned memory come back after their copy: many gets, of which each is read after the next one."""
    values = torch.arange(1 << 20).reshape(8, -1)  # 8 MiB
    metas = [client.put("p", {"x": values + number}) for number in range(4)]
    waiting: list[tuple[int, Any]] = []
    for number in range(24):
        waiting.append((number % 4, client.get_data(metas[number % 4], device="cuda:0")))
        if len(waiting) == 3:
            index, data = waiting.pop(0)
            assert torch.equal(stand_in.read(data["x"]), values + index)
    assert stand_in.most_pinned_bytes <= 64 << 20


def test_a_device_without_memory_gives_everything_back(client: AnyClient, stand_in: StandIn) -> None:
    meta = client.put("p", {"x": FIRST})
    stand_in.free_bytes = 1000
    with pytest.raises(torch.OutOfMemoryError):
        client.get_data(meta, device="cuda:0")
    stand_in.free_bytes = None
    pinned = host_memory.PINNED.pinned_bytes
    assert pinned
    for _ in range(5):
        while any(each.pin() for each in host_memory.PINNED._pinned.values()):
            time.sleep(0.01)  # the client's thread still holds the error, or the get before, and with it the block
            host_memory.PINNED.tidy()
        got = client.get_data(meta, device="cuda:0")
        assert torch.equal(stand_in.read(got["x"]), FIRST)
    assert host_memory.PINNED.pinned_bytes == pinned  # the memory of the failed call was used again


def test_a_get_without_pinned_memory(client: AnyClient, stand_in: StandIn) -> None:
    stand_in.refuses = True
    meta = client.put("p", columns_of(1000))
    got = client.get_data(meta, device="cuda:0")
    assert torch.equal(stand_in.read(got["wide"]), columns_of(1000)["wide"])
    assert stand_in.pinned == {}


def test_tensors_of_the_caller_are_filled(client: AnyClient, stand_in: StandIn) -> None:
    data = columns_of(1000)
    meta = client.put("p", data)
    out = {
        "wide": torch.zeros(1000, 512, dtype=torch.int64),
        "flags": stand_in.put(torch.zeros(1000, dtype=torch.bool)),
    }
    stand_in.default.run()
    address = out["wide"].data_ptr()
    got = client.get_data(meta, out=out)
    assert got["wide"].data_ptr() == address
    assert torch.equal(out["wide"], data["wide"])
    assert torch.equal(stand_in.read(out["flags"]), data["flags"])
    assert torch.equal(got["half"], data["half"])
    assert not stand_in.has(got["half"])
    twice = client.get_data("p", global_indexes=[1, 0, 1], data_fields=["wide"], out={"wide": out["wide"][:3]})
    assert torch.equal(twice["wide"], data["wide"][[1, 0, 1]])
    empty = client.get_data(meta.select_samples([]), data_fields=["half"], out={"half": torch.empty(0).bfloat16()})
    assert empty["half"].shape == (0,)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (
            {"wide": torch.zeros(4, 511, dtype=torch.int64)},
            r"out\['wide'\] is int64 \[4, 511\]; expected int64 \[4, 512\]",
        ),
        ({"wide": torch.zeros(4, 512)}, r"out\['wide'\] is float32 \[4, 512\]; expected int64 \[4, 512\]"),
        ({"wide": torch.zeros(512, 4, dtype=torch.int64).t()}, r"out\['wide'\] is not contiguous"),
        ({"wide": [1, 2]}, r"out\['wide'\] is a list; expected a tensor"),
        ({"ragged": torch.zeros(4)}, r"out has field 'ragged' \(.*\); expected only dense fields"),
        ({"objects": torch.zeros(4)}, r"out has field 'objects' \(.*\); expected only dense fields"),
        ({"other": torch.zeros(4)}, "out has field 'other', which is not fetched"),
    ],
)
def test_wrong_tensors_are_refused_before_anything_is_fetched(
    server: LiveServer, client_kind: ClientKind, stand_in: StandIn, out: dict[str, Any], message: str
) -> None:
    client = server.client(client_kind)
    meta = client.put("p", columns_of(4))
    good = torch.full((4,), 7).to(torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match=message):
        client.get_data(meta, out={"half": good, **out})
    assert good.tolist() == [7, 7, 7, 7]


# Regions

LARGE = torch.arange(1 << 20).reshape(8, -1)  # 8 MiB


@pytest.fixture
def host(start_server: StartServer, client_kind: ClientKind) -> AnyClient:
    """A client of either kind on the service's host."""
    client = start_server(shared_memory="on", max_bytes=1 << 30).client(client_kind)
    client.put("first", {"x": FIRST})
    return client


def pinned_regions() -> int:
    """Return the bytes of regions that are pinned, blocks apart."""
    mappings = [pinned.mapping() for pinned in host_memory.PINNED._pinned.values()]
    return sum(mapping.size for mapping in mappings if mapping is not None and mapping.is_shared)


def test_a_put_is_copied_straight_into_its_region(host: AnyClient, stand_in: StandIn) -> None:
    for number in range(4):
        meta = host.put("p", {"x": stand_in.later(LARGE + number), "host": LARGE})
        got = host.get_data(meta)
        assert torch.equal(got["x"], LARGE + number)
        assert torch.equal(got["host"], LARGE)
        assert stand_in.pin_count == 1  # the region, and no block
        assert not stand_in.under_way
        del got
        host.clear_partition("p")
    assert pinned_regions() == host_memory.PINNED.pinned_bytes >= LARGE.nbytes


def test_a_get_goes_up_straight_from_its_region(host: AnyClient, stand_in: StandIn) -> None:
    meta = host.put("p", {"x": LARGE, "small": LARGE[:, :1].clone(), "ragged": list(LARGE.unbind())})
    for fields in (["x", "small", "ragged"], ["ragged"]):
        stand_in.log.clear()
        got = host.get_data(meta, data_fields=fields, device="cuda")
        stand_in.default.run()
        assert ("up", "stream 1") in stand_in.log
        if "x" in fields:
            assert torch.equal(stand_in.read(got["x"]), LARGE)
        assert all(map(torch.equal, got["ragged"].unbind(), LARGE.unbind()))
    assert pinned_regions() >= 2 * LARGE.nbytes
    assert host_memory.PINNED.pinned_bytes <= pinned_regions() + (8 << 20)  # a block for the offsets


def test_a_region_is_not_used_again_before_it_was_copied_up(host: AnyClient, stand_in: StandIn) -> None:
    got = []
    for number in range(6):
        meta = host.put("p", {"x": LARGE + number})
        got.append(host.get_data(meta, device="cuda:0")["x"])  # no stream has worked since
        host.clear_partition("p")
    assert stand_in.under_way
    for number, tensor in enumerate(got):
        assert torch.equal(stand_in.read(tensor), LARGE + number)


@pytest.mark.parametrize("why", ["refused", "over the limit"])
def test_a_region_that_cannot_be_pinned_is_copied_through_blocks(
    host: AnyClient, stand_in: StandIn, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "refused":
        stand_in.refuses = True
    else:
        set_pinned_memory(monkeypatch, 8 << 20)
    values = torch.cat([LARGE, LARGE])
    for number in range(3):
        meta = host.put("p", {"x": stand_in.later(values + number)})
        got = host.get_data(meta, device="cuda:0")["x"]
        assert torch.equal(stand_in.read(got), values + number)
        del got
        host.clear_partition("p")
    assert stand_in.most_pinned_bytes == (0 if why == "refused" else 8 << 20)


def test_a_region_makes_way_for_another_one(
    host: AnyClient, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_pinned_memory(monkeypatch, 24 << 20)
    metas = [host.put("p", {"x": stand_in.later(LARGE + number)}) for number in range(5)]
    for number in (0, 1, 2, 3, 4, 0, 1):
        got = host.get_data(metas[number], device="cuda:0")["x"]
        assert torch.equal(stand_in.read(got), LARGE + number)
    assert stand_in.pin_count > 5
    assert stand_in.most_pinned_bytes <= 24 << 20


def test_what_ends_with_its_session_is_unpinned_first(host: AnyClient, stand_in: StandIn) -> None:
    meta = host.put("p", {"x": stand_in.later(LARGE)})
    got = host.get_data(meta, device="cuda:0")["x"]
    host.close()
    assert torch.equal(stand_in.read(got), LARGE)
    while host_memory.PINNED.pinned_bytes:
        gc.collect()
        time.sleep(0.01)
    assert stand_in.pinned == {}
