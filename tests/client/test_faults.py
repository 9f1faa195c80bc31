"""Servers that are down, slow, draining or empty: retries under one id, deadlines, released claims, lost bytes."""

import asyncio
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from client_support import make_client
from fake_server import FakeController, FakeStorage, Script, serving
from fault_seconds import FAULT_SECONDS

import tq_service as tq
from tq_service.client.transport import Backoff, Deadline
from tq_service.dataplane import receiving
from tq_service.v1 import commit_pb2, metadata_pb2
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1 import storage_service_pb2 as storage_pb
from tq_service.wire.columns import INLINE_BYTES


@pytest.fixture(params=["async", "sync"])
def kind(request):
    return request.param


DRAINING = tq.errors.UnavailableError("the server is draining")
BATCH = pb.GetMetaResponse(meta=metadata_pb2.BatchMeta(status=metadata_pb2.BATCH_STATUS_BATCH, global_indexes=[4]))
NOT_YET = pb.GetMetaResponse(meta=metadata_pb2.BatchMeta(status=metadata_pb2.BATCH_STATUS_NOT_YET))
EMBEDDED = pb.PlacePutResponse(
    storages=[metadata_pb2.StorageEndpoint(storage_id="one")],
    embedded=True,
    grant_duration={"seconds": 60},
    grant_bytes=1 << 40,
    max_granted_put_bytes=1 << 20,
)
QUEUE = {"partition_id": "p", "task_name": "t", "data_fields": ["x"], "batch_size": 1}


def endpoint(name, address="", boot=b"b" * 16, *, is_away=False):
    return metadata_pb2.StorageEndpoint(storage_id=name, boot_id=boot, address=address, is_away=is_away)


def answer_of(values, name="x"):
    values = np.asarray(values, np.int64)
    spec = metadata_pb2.FieldSpec(name=name, dtype="int64", layout=metadata_pb2.LAYOUT_DENSE, row_shape_known=True)
    header = metadata_pb2.ColumnHeader(spec=spec, value_bytes=values.nbytes)
    return [
        storage_pb.GetResponse(header=storage_pb.GetHeader(row_count=values.size, columns=[header])),
        storage_pb.GetResponse(frame=values.tobytes()),
    ]


def located(storages, owners):
    """A batch of which sample i is in storage `owners[i]`, each storage holding one put with its samples in order."""
    owners = np.asarray(owners)
    rows = [int(np.count_nonzero(owners[:at] == owner)) for at, owner in enumerate(owners)]
    return metadata_pb2.BatchMeta(
        status=metadata_pb2.BATCH_STATUS_BATCH,
        partition_id="p",
        incarnation=b"i" * 16,
        global_indexes=range(10, 10 + len(owners)),
        keys=[f"k{at}" for at in range(len(owners))],
        fields=[metadata_pb2.FieldSpec(name="x", dtype="int64", layout=metadata_pb2.LAYOUT_DENSE)],
        locations=metadata_pb2.Locations(
            storages=storages,
            puts=[metadata_pb2.StoredPut(put_id=bytes([at]) * 16, storage_index=at) for at in range(len(storages))],
            runs=[
                metadata_pb2.CellRuns(
                    field_names=["x"], put_indexes=owners.tolist(), first_rows=rows, row_counts=[1] * len(owners)
                )
            ],
        ),
    )


async def test_a_call_is_tried_again_under_one_request_id(kind):
    script = Script(DRAINING, DRAINING, pb.SealPartitionResponse(inserted_count=3))
    async with serving(FakeController(SealPartition=script)) as address:
        client = make_client(kind, address, timeout=20)
        assert await client.seal_partition("p") == 3
        await client.aclose()
    assert len(script.requests) == 3
    assert len({request.request_id for request in script.requests}) == 1


async def test_a_call_that_a_stopping_service_breaks_off_is_tried_again(kind):
    hanging = Script(asyncio.Event())
    async with serving(FakeController(SealPartition=hanging)) as address:
        client = make_client(kind, address, timeout=30)
        call = asyncio.ensure_future(client.seal_partition("p"))
        await hanging.entered.wait()
    # It has stopped without grace: gRPC tells the client that the call is cancelled.
    done, _ = await asyncio.wait([call], timeout=0.2)
    assert not done
    script = Script(pb.SealPartitionResponse(inserted_count=3))
    async with serving(FakeController(SealPartition=script), port=int(address.rpartition(":")[2])):
        assert await call == 3
        await client.aclose()
    assert script.requests == hanging.requests


async def test_a_service_that_starts_after_its_client_is_found(kind):
    async with serving() as address:
        pass
    client = make_client(kind, address, timeout=30)
    call = asyncio.ensure_future(client.list_partitions())
    done, _ = await asyncio.wait([call], timeout=0.2)
    assert not done
    port = int(address.rpartition(":")[2])
    async with serving(FakeController(ListPartitions=Script(pb.ListPartitionsResponse())), port=port):
        assert await call == []
        await client.aclose()


async def test_a_service_that_stays_down_is_an_error_at_the_deadline(kind):
    client = make_client(kind, "127.0.0.1:1", timeout=0.3)
    with pytest.raises(tq.errors.UnavailableError, match=r"127\.0\.0\.1:1.*tried for 0\.3 s") as raised:
        await client.list_partitions()
    assert isinstance(raised.value, ConnectionError)
    with pytest.raises(tq.errors.UnavailableError):
        await client.health(timeout=30)
    await client.aclose()


async def test_a_hung_service_is_an_error_at_the_deadline(kind):
    async with serving(FakeController(ListPartitions=Script(asyncio.Event()))) as address:
        client = make_client(kind, address)
        with pytest.raises(tq.errors.DeadlineError) as raised:
            await client.list_partitions(timeout=0.2)
        assert isinstance(raised.value, TimeoutError)
        await client.aclose()


async def test_another_service_at_the_address_is_named(kind):
    async with serving() as address:
        client = make_client(kind, address, timeout=5)
        with pytest.raises(tq.errors.InternalError, match="versions"):
            await client.list_partitions()
        await client.aclose()


async def test_long_polls_go_on_under_one_request_id_until_the_wait_is_spent(kind):
    script = Script(NOT_YET, DRAINING, NOT_YET, BATCH)
    async with serving(FakeController(GetMeta=script)) as address:
        client = make_client(kind, address, timeout=20)
        meta = await client.get_meta(**QUEUE, max_wait=20)
        assert (meta.status, meta.global_indexes) == ("batch", [4])
        script.answers = [NOT_YET]
        assert (await client.get_meta(**QUEUE, max_wait=0.2)).status == "not_yet"
        await client.aclose()
    first, rest = script.requests[:4], script.requests[4:]
    assert len({request.request_id for request in first}) == 1
    waits = [request.max_wait.ToNanoseconds() / 1e9 for request in first]
    assert all(later < earlier for earlier, later in pairwise(waits))  # what is left of the wait
    assert waits[0] <= 20
    assert len({request.request_id for request in rest}) == 1
    assert rest[0].request_id != first[0].request_id
    assert len(rest) < 10


async def test_a_cancelled_queue_claim_is_released():
    asked, released = Script(asyncio.Event(), BATCH), Script(pb.ReleaseClaimResponse())
    async with serving(FakeController(GetMeta=asked, ReleaseClaim=released)) as address:
        client = tq.AsyncClient(address, timeout=20)
        call = asyncio.ensure_future(client.get_meta(**QUEUE))
        await asyncio.wait_for(asked.entered.wait(), 20)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await client.aclose()
    assert [request.claim_request_id for request in released.requests] == [asked.requests[0].request_id]
    assert released.requests[0].task_name == "t"


async def test_a_queue_claim_that_ran_out_of_time_is_released(kind):
    asked, released = Script(asyncio.Event()), Script(pb.ReleaseClaimResponse())
    async with serving(FakeController(GetMeta=asked, ReleaseClaim=released)) as address:
        client = make_client(kind, address)
        with pytest.raises(tq.errors.DeadlineError):
            await client.get_meta(**QUEUE, max_wait=0.5, timeout=0.5)
        await client.aclose()
    assert [request.claim_request_id for request in released.requests] == [asked.requests[0].request_id]


async def test_an_interrupted_sync_claim_is_released(monkeypatch):
    released = Script(pb.ReleaseClaimResponse())
    async with serving(FakeController(GetMeta=Script(BATCH), ReleaseClaim=released)) as address:
        client = make_client("sync", address, timeout=20)

        def interrupt(*_arguments):
            raise KeyboardInterrupt

        monkeypatch.setattr(client.client, "_poll", interrupt)

        def claim():
            with pytest.raises(KeyboardInterrupt):
                client.client.get_meta(**QUEUE)

        await asyncio.to_thread(claim)
        await client.aclose()
    assert len(released.requests) == 1


async def test_refused_claims_and_ranks_release_nothing(kind):
    refused = Script(tq.errors.StaleEpochError("epoch 1, expected 2"), DRAINING)
    released = Script(pb.ReleaseClaimResponse())
    async with serving(FakeController(GetMeta=refused, ReleaseClaim=released)) as address:
        client = make_client(kind, address, timeout=1.0)
        with pytest.raises(tq.errors.StaleEpochError):
            await client.get_meta(**QUEUE)
        with pytest.raises(tq.errors.UnavailableError):
            await client.get_meta(**QUEUE, dp_rank=0, dp_size=1, batch_index=0, max_wait=0)
        await client.aclose()
    assert released.requests == []


@pytest.mark.parametrize("row_count", [4, 1 << 19])
async def test_an_interrupted_put_is_sent_whole_again_under_its_ids(kind, row_count):
    data = torch.arange(row_count)
    commit = commit_pb2.CommitResponse(meta=metadata_pb2.BatchMeta(partition_id="p", global_indexes=[0]))
    storage = FakeStorage([DRAINING], storage_pb.PutResponse(commit=commit))
    controller = FakeController(PlacePut=Script(EMBEDDED))
    async with serving(controller, storage) as address:
        client = make_client(kind, address, timeout=20)
        meta = await client.put("p", {"x": data.reshape(1, -1)}, keys=["k"])
        await client.aclose()
    assert meta.keys == ["k"]
    assert storage.put_sizes == [data.nbytes]
    first, second = storage.put_headers
    assert first.put_id == second.put_id
    assert first.commit.request_id == second.commit.request_id
    assert first.size_bytes == data.nbytes


@pytest.mark.parametrize("more_bytes", [0, 1])
async def test_puts_up_to_a_limit_are_one_message(kind, more_bytes):
    storage = FakeStorage(put_answer=storage_pb.PutResponse(commit=commit_pb2.CommitResponse()))
    controller = FakeController(PlacePut=Script(EMBEDDED))
    data = torch.zeros(1, INLINE_BYTES - 8 + more_bytes, dtype=torch.uint8)
    async with serving(controller, storage) as address:
        client = make_client(kind, address, timeout=20)
        await client.put("p", {"x": data, "y": torch.arange(1)})
        await client.aclose()
    assert storage.put_sizes == [INLINE_BYTES + more_bytes]
    assert storage.whole_put_count == (0 if more_bytes else 1)


async def test_small_puts_into_the_controllers_own_storage_take_one_call(kind):
    place = Script(EMBEDDED)
    storage = FakeStorage(put_answer=storage_pb.PutResponse(commit=commit_pb2.CommitResponse()))
    async with serving(FakeController(PlacePut=place), storage) as address:
        client = make_client(kind, address, timeout=20)
        for _ in range(3):
            await client.put("p", {"x": torch.zeros(4)})
        await client.aclose()
    assert len(place.requests) == 1
    assert len(storage.put_headers) == storage.whole_put_count == 3


@pytest.mark.parametrize("only_one", [True, False])
async def test_large_puts_are_placed_each_unless_there_is_only_one_storage(kind, only_one):
    place = Script(
        pb.PlacePutResponse(
            storages=[endpoint("one")],
            embedded=True,
            grant_duration={"seconds": 60},
            grant_bytes=1 << 40,
            max_granted_put_bytes=1 << 40 if only_one else (1 << 20) - 1,
        )
    )
    storage = FakeStorage(put_answer=storage_pb.PutResponse(commit=commit_pb2.CommitResponse()))
    async with serving(FakeController(PlacePut=place), storage) as address:
        client = make_client(kind, address, timeout=20)
        for _ in range(3):
            await client.put("p", {"x": torch.zeros(1, 1 << 18)})
        await client.aclose()
    assert len(place.requests) == (1 if only_one else 3)
    assert len(storage.put_headers) == 3


def grant_of(*storages, put_bytes=1 << 20, seconds=60.0, all_bytes=1 << 40):
    return pb.PlacePutResponse(
        storages=storages,
        controller_id=b"c" * 16,
        grant_duration={"seconds": int(seconds)},
        grant_bytes=all_bytes,
        max_granted_put_bytes=put_bytes,
    )


@pytest.mark.parametrize(
    ("bounds", "place_count"), [({}, 1), ({"seconds": 0.0}, 6), ({"all_bytes": 40}, 2), ({"put_bytes": 15}, 6)]
)
async def test_puts_go_to_the_storage_services_of_a_grant_in_turn_for_as_long_as_it_goes(kind, bounds, place_count):
    remotes = [FakeStorage(put_answer=storage_pb.PutResponse(storage=endpoint("x"), receipt=b"r")) for _ in range(2)]
    async with serving(storage=remotes[0]) as first, serving(storage=remotes[1]) as second:
        place = Script(grant_of(endpoint("one", first), endpoint("two", second), **bounds))
        commit = Script(commit_pb2.CommitResponse())
        async with serving(FakeController(PlacePut=place, Commit=commit)) as address:
            client = make_client(kind, address, timeout=20)
            for _ in range(6):
                await client.put("p", {"x": torch.zeros(4)})
            await client.aclose()
    assert len(place.requests) == place_count
    counts = [len(remote.put_headers) for remote in remotes]
    assert counts == {1: [3, 3], 2: [4, 2], 6: [6, 0]}[place_count]
    assert {header.controller_id for remote in remotes for header in remote.put_headers} == {b"c" * 16}
    assert {request.placement.receipt for request in commit.requests} == {b"r"}


@pytest.mark.parametrize("failure", [DRAINING, tq.errors.QuotaExceededError("full")])
async def test_a_storage_service_that_fails_is_left_at_once(kind, failure):
    gone = FakeStorage([None, failure], storage_pb.PutResponse(storage=endpoint("one")))
    other = FakeStorage(put_answer=storage_pb.PutResponse(storage=endpoint("two")))
    async with serving(storage=gone) as first, serving(storage=other) as second:
        place = Script(grant_of(endpoint("one", first)), grant_of(endpoint("two", second)))
        async with serving(FakeController(PlacePut=place, Commit=Script(commit_pb2.CommitResponse()))) as address:
            client = make_client(kind, address, timeout=20)
            await client.put("p", {"x": torch.zeros(4)})
            if failure is DRAINING:
                await client.put("p", {"x": torch.zeros(4)})
            else:
                with pytest.raises(tq.errors.QuotaExceededError):
                    await client.put("p", {"x": torch.zeros(4)})
            await client.put("p", {"x": torch.zeros(4)})
            await client.aclose()
    assert len(place.requests) == 2
    assert len(gone.put_headers) == 2


async def test_a_put_into_another_storage_is_committed_after_it(kind):
    remote = FakeStorage(put_answer=storage_pb.PutResponse(storage=endpoint("two", boot=b"2" * 16)))
    async with serving(storage=remote) as remote_address:
        place = Script(pb.PlacePutResponse(storages=[endpoint("two", remote_address)]))
        commit = Script(commit_pb2.CommitResponse(), tq.errors.PutNotFoundError("the put has expired"))
        async with serving(FakeController(PlacePut=place, Commit=commit)) as address:
            client = make_client(kind, address, timeout=20)
            await client.put("p", {"x": torch.zeros(4)})
            with pytest.raises(tq.errors.PutNotFoundError, match="expired"):
                await client.put("p", {"x": torch.zeros(4)})
            await client.aclose()
    request = commit.requests[0]
    assert request.placement.storage.boot_id == b"2" * 16
    assert request.placement.put_id == remote.put_headers[0].put_id
    assert request.columns[0].spec.name == "x"
    assert not remote.put_headers[0].HasField("commit")
    assert request.write.row_count == 4


@pytest.mark.parametrize(
    "failure", [tq.errors.DataLossError("storage two has restarted"), tq.errors.PutNotFoundError("expired"), DRAINING]
)
async def test_a_put_that_was_lost_before_its_commit_is_sent_again_under_another_put_id(kind, failure, monkeypatch):
    for module in ("_async", "_sync"):
        monkeypatch.setattr(f"tq_service.client.{module}.samples._COMMIT_PATIENCE_SECONDS", 0.0)
    remote = FakeStorage(put_answer=storage_pb.PutResponse(storage=endpoint("two")))
    async with serving(storage=remote) as remote_address:
        place = Script(pb.PlacePutResponse(storages=[endpoint("two", remote_address)]))
        commit = Script(failure, commit_pb2.CommitResponse(meta=metadata_pb2.BatchMeta(global_indexes=[3])))
        async with serving(FakeController(PlacePut=place, Commit=commit)) as address:
            client = make_client(kind, address, timeout=20)
            meta = await client.put("p", {"x": torch.zeros(1)})
            await client.aclose()
    assert meta.global_indexes == [3]
    assert remote.put_sizes == [4, 4]
    assert len({header.put_id for header in remote.put_headers}) == (1 if failure is DRAINING else 2)
    assert len({request.request_id for request in commit.requests}) == 1


async def test_a_commit_that_is_never_answered_tells_of_the_whole_put(kind, monkeypatch):
    for module in ("_async", "_sync"):
        monkeypatch.setattr(f"tq_service.client.{module}.samples._COMMIT_PATIENCE_SECONDS", 0.2)
    storage = FakeStorage(put_answer=storage_pb.PutResponse(storage=endpoint("two")))
    async with serving(storage=storage) as storage_address:
        place = Script(pb.PlacePutResponse(storages=[endpoint("two", storage_address)]))
        async with serving(FakeController(PlacePut=place, Commit=Script(DRAINING))) as address:
            client = make_client(kind, address, timeout=FAULT_SECONDS)
            # The last try may have begun too late for an answer.
            said = rf"tried for {FAULT_SECONDS:g} s \(\d+ times(, plus one attempt without a response)?\)$"
            with pytest.raises(tq.errors.UnavailableError, match=f"^the server is draining; {said}") as raised:
                await client.put("p", {"x": torch.zeros(2)})
            await client.aclose()
    assert raised.value.message.count("tried") == 1
    assert len({header.put_id for header in storage.put_headers}) == 1
    assert len(storage.put_headers) > 1


async def test_small_gets_are_one_message_large_ones_streams_from_the_second_on(kind):
    small = storage_pb.GetInlineResponse(header=answer_of([7])[0].header, values=np.array([7]).tobytes(), size_bytes=8)
    large = storage_pb.GetInlineResponse(size_bytes=INLINE_BYTES + 1)
    storage = FakeStorage(get_answers=[answer_of([7])])
    calls = []
    async with serving(
        FakeController(Locate=Script(pb.LocateResponse(meta=located([endpoint("one")], [0])))), storage
    ) as address:
        client = make_client(kind, address, timeout=20)
        for storage.inline_get_answer in (small, large, small, large):
            batch = await client.get_data("p", keys=["k"], data_fields=["x"])
            assert batch["x"].tolist() == [7]
            calls.append((len(storage.inline_get_requests), len(storage.get_requests)))
        await client.aclose()
    # The stream sent little, so that the next is tried in one message again.
    assert calls == [(1, 0), (2, 1), (3, 1), (4, 2)]
    assert storage.inline_get_requests[0].get == storage.get_requests[0]


@pytest.mark.parametrize("more_rows", [0, 1])
async def test_a_get_of_known_size_goes_at_once_the_way_that_suits_it(kind, more_rows):
    row_count = INLINE_BYTES // 8192 + more_rows
    header, frame = answer_of(np.arange(row_count * 1024))
    spec = header.header.columns[0].spec
    spec.row_shape[:], header.header.row_count = [1024], row_count
    storage = FakeStorage(get_answers=[[header, frame]])
    storage.inline_get_answer = storage_pb.GetInlineResponse(header=header.header, values=frame.frame)
    meta = located([endpoint("one")], [0] * row_count)
    meta.fields[0].CopyFrom(spec)
    async with serving(FakeController(Locate=Script(pb.LocateResponse(meta=meta))), storage) as address:
        client = make_client(kind, address, timeout=20)
        for _ in range(2):
            batch = await client.get_data("p", keys=["k"], data_fields=["x"])
            assert batch["x"].flatten().tolist() == list(range(row_count * 1024))
        await client.aclose()
    calls = (len(storage.inline_get_requests), len(storage.get_requests))
    assert calls == ((0, 2) if more_rows else (2, 0))


def test_what_is_remembered_of_answers_is_bounded(monkeypatch):
    monkeypatch.setattr(receiving, "_MOST_REMEMBERED", 8)
    sizes = receiving.AnswerSizes()

    def request_of(field):
        return storage_pb.GetRequest(runs=[metadata_pb2.CellRuns(field_names=[field])])

    for number in range(100):
        sizes.note(request_of(f"field {number}"), 10, 1000)
        assert sizes.expected_bytes(request_of(f"field {number}"), 3) == 300
        assert sizes.expected_bytes(request_of("another"), 3) == 0
    assert len(sizes._row_bytes) <= 8


async def test_a_batch_in_two_storages_comes_back_in_order(kind):
    one, two = FakeStorage(get_answers=[answer_of([0, 3])]), FakeStorage(get_answers=[answer_of([1, 2, 4])])
    async with serving(storage=two) as other:
        meta = located([endpoint("one"), endpoint("two", other)], [0, 1, 1, 0, 1])
        controller = FakeController(Locate=Script(pb.LocateResponse(meta=meta)))
        async with serving(controller, one) as address:
            client = make_client(kind, address, timeout=20)
            batch = await client.get_data("p", global_indexes=range(10, 15), data_fields=["x"])
            await client.aclose()
    assert batch["x"].tolist() == [0, 1, 2, 3, 4]
    assert list(one.get_requests[0].put_ids) == [b"\0" * 16]
    assert list(two.get_requests[0].runs[0].row_counts) == [3]


async def test_storages_are_read_at_the_same_time(kind):
    both_are_read = asyncio.Barrier(2)

    class Waiting(FakeStorage):
        async def Get(self, request, context):  # noqa: N802  (the name of the rpc)
            await both_are_read.wait()
            async for part in super().Get(request, context):
                yield part

    one, two = Waiting(get_answers=[answer_of([0, 2])]), Waiting(get_answers=[answer_of([1, 3])])
    async with serving(storage=two) as other:
        controller = FakeController(
            Locate=Script(pb.LocateResponse(meta=located([endpoint("one"), endpoint("two", other)], [0, 1, 0, 1])))
        )
        async with serving(controller, one) as address:
            client = make_client(kind, address, timeout=20)
            batch = await client.get_data("p", global_indexes=range(10, 14), data_fields=["x"])
            await client.aclose()
    assert batch["x"].tolist() == [0, 1, 2, 3]


async def test_cells_that_moved_are_located_again_once(kind):
    storage = FakeStorage(get_answers=[tq.errors.PutNotFoundError("compacted away"), answer_of([7])])
    locate = Script(pb.LocateResponse(meta=located([endpoint("one")], [0])))
    async with serving(FakeController(Locate=locate), storage) as address:
        client = make_client(kind, address, timeout=20)
        assert (await client.get_data("p", keys=["k"], data_fields=["x"]))["x"].tolist() == [7]
        storage.get_answers = [tq.errors.PutNotFoundError("gone for good")]
        with pytest.raises(tq.errors.PutNotFoundError, match="for good"):
            await client.get_data("p", keys=["k"], data_fields=["x"])
        await client.aclose()
    assert len(locate.requests) == 4


async def test_cells_that_move_again_and_again_are_followed(kind):
    places = [located([endpoint("one")], [0]) for _ in range(4)]
    for number, place in enumerate(places):
        place.locations.puts[0].put_id = bytes([number]) * 16
    storage = FakeStorage(get_answers=[tq.errors.PutNotFoundError("overwritten")] * 3 + [answer_of([7])])
    locate = Script(*(pb.LocateResponse(meta=place) for place in places))
    async with serving(FakeController(Locate=locate), storage) as address:
        client = make_client(kind, address, timeout=20)
        assert (await client.get_data("p", keys=["k"], data_fields=["x"]))["x"].tolist() == [7]
        await client.aclose()
    assert len(locate.requests) == 4


async def test_lost_bytes_name_the_samples_that_were_there(kind):
    one = FakeStorage(get_answers=[answer_of([0, 3])])
    two = FakeStorage(get_answers=[tq.errors.DataLossError("storage two came back empty")])
    async with serving(storage=two) as other:
        meta = located([endpoint("one"), endpoint("two", other)], [0, 1, 1, 0])
        async with serving(FakeController(Locate=Script(pb.LocateResponse(meta=meta))), one) as address:
            client = make_client(kind, address, timeout=20)
            with pytest.raises(tq.errors.DataLossError, match=r"11 \(k1\), 12 \(k2\) of partition 'p'") as raised:
                await client.get_data("p", global_indexes=range(10, 14), data_fields=["x"])
            await client.aclose()
    assert raised.value.metadata["global_indexes"] == "11,12"


async def test_a_storage_service_that_takes_its_own_puts_over_again_is_believed_once_it_has(kind):
    """It said that they are lost before the controller knew, and is their place again after they were away."""
    lost = tq.errors.DataLossError("storage one has started again, and came back empty")
    storage = FakeStorage(get_answers=[lost, lost, answer_of([7])])
    here, away = located([endpoint("one")], [0]), located([endpoint("one", is_away=True)], [0])
    locate = Script(*(pb.LocateResponse(meta=each) for each in (here, here, away, here)))
    async with serving(FakeController(Locate=locate), storage) as address:
        client = make_client(kind, address, timeout=20)
        assert (await client.get_data("p", keys=["k"], data_fields=["x"]))["x"].tolist() == [7]
        await client.aclose()


@pytest.mark.parametrize("fault", ["down", "hung", "unknown"])
async def test_a_storage_service_out_of_reach_is_named_with_what_lies_there(kind, fault):
    one, two = FakeStorage(get_answers=[answer_of([0, 3])]), FakeStorage(get_answers=[asyncio.Event()])
    async with serving(storage=two) as hung_address:
        address_of_two = {"down": "127.0.0.1:1", "hung": hung_address, "unknown": ""}[fault]
        away = endpoint("two", address_of_two, is_away=fault == "unknown")
        locate = Script(pb.LocateResponse(meta=located([endpoint("one"), away], [0, 1, 1, 0])))
        async with serving(FakeController(Locate=locate), one) as address:
            client = make_client(kind, address)
            kind_of_error = tq.errors.DeadlineError if fault == "hung" else tq.errors.UnavailableError
            words = rf"'two'.*{address_of_two}.* did not answer within {FAULT_SECONDS:g} s; it stores 'x' of 2 of the 4"
            with pytest.raises(kind_of_error, match=words) as raised:
                await client.get_data("p", global_indexes=range(10, 14), data_fields=["x"], timeout=FAULT_SECONDS)
            await client.aclose()
    assert raised.value.metadata["storage_id"] == "two"
    assert raised.value.metadata["address"] == address_of_two
    assert (raised.value.metadata["sample_count"], raised.value.metadata["data_fields"]) == ("2", "x")


async def test_a_storage_service_out_of_reach_is_named_where_the_controller_hangs_then(kind):
    place = located([endpoint("one"), endpoint("two", is_away=True)], [0, 1])
    locate = Script(pb.LocateResponse(meta=place), asyncio.Event())
    async with serving(FakeController(Locate=locate), FakeStorage(get_answers=[answer_of([0])])) as address:
        client = make_client(kind, address)
        words = rf"'two'.* did not answer within {FAULT_SECONDS:g} s; it stores 'x' of 1 of the 2"
        with pytest.raises(tq.errors.UnavailableError, match=words):
            await client.get_data("p", global_indexes=[10, 11], data_fields=["x"], timeout=FAULT_SECONDS)
        await client.aclose()
    assert len(locate.requests) == 2


@pytest.mark.parametrize("is_away", [False, True])
async def test_a_storage_service_that_came_back_at_another_address_is_found_there(kind, is_away):
    async with serving(storage=FakeStorage(get_answers=[answer_of([7])])) as new_address:
        before = endpoint("two", "" if is_away else "127.0.0.1:1", is_away=is_away)
        locate = Script(
            *(pb.LocateResponse(meta=located([one], [0])) for one in (before, endpoint("two", new_address)))
        )
        async with serving(FakeController(Locate=locate)) as address:
            client = make_client(kind, address, timeout=20)
            batch = await client.get_data("p", keys=["k"], data_fields=["x"])
            await client.aclose()
    assert batch["x"].tolist() == [7]
    assert len(locate.requests) == 2
    assert list(locate.requests[1].global_indexes) == [10]


async def test_cells_that_moved_away_from_a_dead_storage_service_are_read_where_they_are(kind):
    storage = FakeStorage(get_answers=[answer_of([7])])
    places = [endpoint("dead", "127.0.0.1:1"), endpoint("one"), endpoint("one")]
    metas = [located([place], [0]) for place in places]
    metas[1].locations.puts[0].put_id = metas[2].locations.puts[0].put_id = b"again" * 3 + b"!"
    locate = Script(*(pb.LocateResponse(meta=meta) for meta in metas))
    async with serving(FakeController(Locate=locate), storage) as address:
        client = make_client(kind, address, timeout=20)
        assert (await client.get_data("p", keys=["k"], data_fields=["x"]))["x"].tolist() == [7]
        await client.aclose()
    assert list(storage.get_requests[0].put_ids) == [b"again" * 3 + b"!"]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([], "without a header"),
        (answer_of([1, 2])[:1], "8 bytes|16 bytes|before"),
        (answer_of([1, 2])[1:], "without a header"),
        (answer_of([1, 2, 3]), "3 rows; expected 2"),
        ([*answer_of([1, 2]), storage_pb.GetResponse(frame=b"x")], "more bytes"),
        ([storage_pb.GetResponse()], "sent an unreadable message"),
        (answer_of([1, 2], name="y"), "no storage service returned field 'x'"),
    ],
)
async def test_answers_that_do_not_agree_are_errors(kind, parts, words):
    storage = FakeStorage(get_answers=[parts])
    locate = Script(pb.LocateResponse(meta=located([endpoint("one")], [0, 0])))
    async with serving(FakeController(Locate=locate), storage) as address:
        client = make_client(kind, address, timeout=20)
        with pytest.raises(tq.errors.InternalError, match=words):
            await client.get_data("p", keys=["a", "b"], data_fields=["x"])
        await client.aclose()


def test_pauses_double_to_a_bound_and_only_for_unavailable():
    backoff = Backoff(Deadline.after(3600), draw=lambda: 1.0)
    assert [round(backoff.after(DRAINING), 3) for _ in range(6)] == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5]
    assert Backoff(Deadline.after(3600), draw=lambda: 0.0).pause() == 0.025
    with pytest.raises(tq.errors.KeyNotFoundError):
        backoff.after(tq.errors.KeyNotFoundError("no"))


def test_the_leader_that_is_named_is_asked_at_once_and_only_once_without_a_pause():
    named = tq.errors.NotLeaderError("it stands by", metadata={"leader_address": "c:1"})
    backoff = Backoff(Deadline.after(3600), draw=lambda: 1.0)
    assert [round(backoff.after(named), 3) for _ in range(4)] == [0, 0.1, 0, 0.2]
    backoff = Backoff(Deadline.after(3600), draw=lambda: 1.0)
    assert [round(backoff.after(each), 3) for each in (named, DRAINING, named, DRAINING, named)] == [0, 0.1, 0, 0.2, 0]


def test_the_last_reason_is_that_of_the_leader_and_not_of_a_standby_that_names_it():
    named = tq.errors.NotLeaderError("it stands by", metadata={"leader_address": "c:1"})
    unknown = tq.errors.NotLeaderError("none is known", metadata={"leader_address": ""})
    for failures, words in (
        ((named, DRAINING, named), "draining"),
        ((DRAINING, unknown, named), "it stands by"),
        ((DRAINING, unknown), "none is known"),
        ((named, named), "it stands by"),
    ):
        backoff = Backoff(Deadline.after(3600))
        for failure in failures[:-1]:
            backoff.after(failure)
        backoff.deadline = Deadline.after(0.0)
        with pytest.raises(tq.errors.UnavailableError, match=f"{words}.*; tried for"):
            backoff.after(failures[-1])


def test_the_controllers_of_a_cluster_are_asked_in_short_pauses():
    unknown = tq.errors.NotLeaderError("it stands by", metadata={"leader_address": ""})
    backoff = Backoff(Deadline.after(3600), draw=lambda: 1.0)
    pauses = [backoff.after(DRAINING) for _ in range(5)]
    pauses += [backoff.after(each) for each in (unknown, DRAINING, DRAINING)]
    assert [round(each, 3) for each in pauses] == [0.05, 0.1, 0.2, 0.4, 0.5, 0.2, 0.2, 0.2]


def test_the_time_that_is_left_is_used_for_further_tries_and_the_last_reason_told():
    backoff = Backoff(Deadline.after(0.2), draw=lambda: 1.0)
    pauses = []
    with pytest.raises(tq.errors.UnavailableError, match=r"draining; tried for 0\.2 s \(\d+ times\)"):
        while True:
            pauses.append(backoff.after(DRAINING))
            time.sleep(pauses[-1])
    assert len(pauses) >= 3
    assert sum(pauses) < 0.2


async def test_a_service_that_comes_back_hung_is_unavailable_with_the_last_reason(kind):
    script = Script(DRAINING, asyncio.Event())
    async with serving(FakeController(ListPartitions=script)) as address:
        client = make_client(kind, address)
        with pytest.raises(
            tq.errors.UnavailableError,
            match=r"draining; tried for 0\.5 s \(once, plus one attempt without a response\)",
        ):
            await client.list_partitions(timeout=0.5)
        await client.aclose()
    assert len(script.requests) == 2
