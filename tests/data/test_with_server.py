"""The loader against a real service."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from certificates import add_token
from certificates import replace as replace_file
from service_rows import dataset_of, fill, taken

import tq_service as tq
from tq_service.data import StreamingDataLoader, StreamingDataset
from tq_service.testing import ServiceProcess


@pytest.fixture
def partition(request: pytest.FixtureRequest, address: str) -> Iterator[str]:
    name = request.node.name
    yield name
    with tq.Client(address) as client:
        if name in {summary.partition_id for summary in client.list_partitions()}:
            client.clear_partition(name)


def test_one_rank_gets_everything_in_order(address: str, partition: str) -> None:
    fill(address, partition, 42)
    items = list(StreamingDataLoader(dataset_of(address, partition)))
    assert taken(items) == list(range(42))
    assert [meta.size for _, meta in items] == [3, 3, 2] * 5 + [2]


@pytest.mark.parametrize("sampler", ["sequential", "rank_aware", "seqlen_balanced"])
@pytest.mark.parametrize("count", [1, 7, 24, 50])
def test_ranks_that_start_first_end_together(address: str, partition: str, sampler: str, count: int) -> None:
    results: dict[int, list[Any]] = {}

    def consume(rank: int) -> None:
        dataset = dataset_of(address, partition, dp_rank=rank, dp_size=3, sampler=sampler)
        results[rank] = list(StreamingDataLoader(dataset))

    ranks = [threading.Thread(target=consume, args=(rank,)) for rank in range(3)]
    for thread in ranks:
        thread.start()
    fill(address, partition, count)
    for thread in ranks:
        thread.join()
    assert len({len(items) for items in results.values()}) == 1
    assert sorted(index for items in results.values() for index in taken(items)) == list(range(count))


def test_a_dataset_asks_for_a_layout(address: str, partition: str) -> None:
    """Rows that all are alike, in a field that is not declared: the batches are of the layout that the trainer says."""
    with tq.Client(address) as client:
        client.put(partition, {"x": torch.arange(8).reshape(4, 2), "score": torch.zeros(4)})
        client.seal_partition(partition)
    for layout in (None, "jagged", "dense"):
        dataset = dataset_of(
            address, partition, data_fields=["x", "score"], batch_size=4, micro_batch_size=2, layout=layout,
            task_name=f"task {layout}",
        )  # fmt: skip
        batches = [micro_batch for micro_batch, _ in StreamingDataLoader(dataset)]
        assert [batch["x"].is_nested for batch in batches] == [layout == "jagged"] * 2
        assert [row.tolist() for batch in batches for row in batch["x"].unbind()] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert all(batch["score"].shape == (2,) for batch in batches)


def test_what_is_no_address_is_refused_when_the_dataset_is_made() -> None:
    with pytest.raises(tq.errors.InvalidArgumentError, match="address: got 'http://localhost', expected 'host:port'"):
        dataset_of("http://localhost", "train")


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_service_that_is_not_there_is_not_waited_for_in_silence(
    num_workers: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    dataset = dataset_of(address, "p", max_wait=1.0, timeout=5.0)
    context = "spawn" if num_workers else None
    with (
        StreamingDataLoader(dataset, num_workers=num_workers, multiprocessing_context=context) as loader,
        pytest.raises(tq.errors.UnavailableError, match=f"cannot reach {address}: connection refused; tried for 6 s"),
    ):
        next(iter(loader))
    # What a worker process logs goes to stderr where its program has not said otherwise.
    lines = capfd.readouterr().err.splitlines() if num_workers else caplog.messages
    assert (
        len([line for line in lines if line.startswith(f"the service is unavailable; retrying address={address} ")])
        == 1
    )


def test_finite_mode_and_step(address: str, partition: str) -> None:
    other = f"{partition}-next"
    fill(address, partition, 10, seal=False)
    fill(address, other, 5)
    with StreamingDataLoader(dataset_of(address, partition, finite=True)) as loader:
        assert taken(list(loader)) == list(range(10))
        loader.step(other)
        assert taken(list(loader)) == list(range(5))
    with tq.Client(address) as client:
        client.clear_partition(other)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_no_batch_is_planned_further_ahead_of_the_published_version_than_the_lag(
    address: str, partition: str, num_workers: int
) -> None:
    """Also over a state and another partition: the versions go on where batches begin with 0 again."""
    other, policy = f"{partition}-next", f"policy of {partition}"
    fill(address, partition, 24)
    fill(address, other, 40)

    def planned(client: tq.Client, name: str) -> int:
        (task,) = client.describe_partition(name).tasks
        return task.planned_batch_count

    def trained(client: tq.Client, loader: StreamingDataLoader, name: str, version: int, count: int) -> int:
        for _, meta in loader:
            if meta.global_indexes and meta.global_indexes[-1] % 8 == 7:  # the last micro-batch
                assert planned(client, name) <= loader.dataset.batch_index + 1
                version += 1
                client.publish_version(version, policy=policy)
                count -= 1
                if not count:
                    break
        return version

    options: dict[str, Any] = {
        "batch_size": 8, "micro_batch_size": 3, "version_lag": 1, "first_version": 5, "policy": policy,
        "max_wait": 0.2,
    }  # fmt: skip
    with tq.Client(address) as client:
        client.publish_version(5, policy=policy)
        with StreamingDataLoader(
            dataset_of(address, partition, **options), num_workers=num_workers, prefetch_factor=4
        ) as loader:
            assert trained(client, loader, partition, 5, 1) == 6
            state = loader.state_dict()
        with StreamingDataLoader(
            dataset_of(address, partition, **options | {"first_version": 0}), num_workers=num_workers, prefetch_factor=4
        ) as loader:
            loader.load_state_dict(state)
            assert trained(client, loader, partition, 6, 9) == 8
            loader.step(other)
            assert trained(client, loader, other, 8, 9) == 13
        client.clear_partition(other)
        client.remove_policy(policy)


def leased_batch(
    *, client: tq.Client, partition_id: str, task_name: str, data_fields: list[str], batch_size: int,
    micro_batch_size: int, max_wait: float, **others: Any,
) -> tuple[Any, tq.BatchMeta]:  # fmt: skip
    meta = client.get_meta(
        partition_id=partition_id, task_name=task_name, data_fields=data_fields, batch_size=batch_size,
        min_batch_size=1, micro_batch_size=micro_batch_size, max_wait=max_wait, lease=600.0,
    )  # fmt: skip
    return (client.get_data(meta) if meta.status == "batch" else None), meta


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_queue_worker_acknowledges_leased_micro_batches(address: str, partition: str, num_workers: int) -> None:
    fill(address, partition, 26)
    dataset = dataset_of(address, partition, fetch_batch_fn=leased_batch)
    items = []
    with tq.Client(address) as client, StreamingDataLoader(dataset, num_workers) as loader:
        for micro_batch, meta in loader:
            assert client.ack(meta) == meta.size
            items.append((micro_batch, meta))
        status = client.check_consumption(partition, "update_actor")
    assert sorted(taken(items)) == list(range(26))
    assert (status.consumed_count, status.leased_count, status.complete) == (26, 0, True)


@pytest.mark.parametrize("kept_bytes", [0, 600, 1 << 20])
def test_reset_and_restart(address: str, partition: str, kept_bytes: int) -> None:
    fill(address, partition, 30)
    dataset = dataset_of(address, partition, replay_buffer_bytes=kept_bytes, sampler="seqlen_balanced")
    loader = StreamingDataLoader(dataset)
    first = list(loader)
    loader.reset()
    again = list(loader)
    assert [meta for _, meta in again] == [meta for _, meta in first]
    assert taken(again) == taken(first)
    assert len(loader.get_buffer()) == {0: 0, 600: 1, 1 << 20: 4}[kept_bytes]
    restarted = list(
        StreamingDataLoader(dataset_of(address, partition, start_batch_index=2, sampler="seqlen_balanced"))
    )
    assert [meta.global_indexes for _, meta in restarted] == [meta.global_indexes for _, meta in first[6:]]


def test_a_reset_task_is_another_epoch(address: str, partition: str) -> None:
    fill(address, partition, 30)
    loader = StreamingDataLoader(dataset_of(address, partition), prefetch_factor=0)
    assert len(list(loader)) == 12 - 1
    with tq.Client(address) as client:
        client.reset_consumption(partition, "update_actor", 0)
    loader.reset()
    with pytest.raises(tq.errors.StaleEpochError):
        list(loader)
    loader.step(partition)
    assert taken(list(loader)) == list(range(30))


def test_columns_can_be_put_for_a_micro_batch(address: str, partition: str) -> None:
    fill(address, partition, 10)
    with tq.Client(address) as client:
        for micro_batch, meta in StreamingDataLoader(dataset_of(address, partition)):
            client.put(meta, {"double": micro_batch["index"] * 2})
        found = client.get_meta(
            partition_id=partition, task_name="read", data_fields=["index", "double"], batch_size=10
        )
        batch = client.get_data(found)
        assert batch["double"].tolist() == [2 * index for index in batch["index"].tolist()]


@pytest.mark.parametrize(
    ("context", "numbers"),
    [
        ("default", [2]),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in [("fork", [1, 2, 3]), ("spawn", [3])]),
    ],
)
def test_workers_with_live_clients_in_the_parent(
    address: str, partition: str, context: str, numbers: list[int]
) -> None:
    """In a process of its own: this one has servers and clients of other tests, and a fork may meet them at work.

    It and each spawned worker take seconds to import torch: `test_workers_share_the_batches_in_order` spawns two.
    """
    program = Path(__file__).parent / "live_clients_program.py"
    command = [sys.executable, str(program), address, partition, context, *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    said = "".join(f"every sample, in order, twice, of {number}\n" for number in numbers)
    assert (done.returncode, done.stdout) == (0, said), done.stderr


def test_workers_started_before_the_producer(address: str, partition: str) -> None:
    with StreamingDataLoader(dataset_of(address, partition), 2) as loader:
        producer = threading.Thread(target=fill, args=(address, partition, 30), kwargs={"part": 4})
        iterator = iter(loader)
        producer.start()
        assert taken(list(iterator)) == list(range(30))
        producer.join()


def test_closing_does_not_wait_for_data_that_never_comes(address: str, partition: str) -> None:
    fill(address, partition, 8, seal=False)
    loader = StreamingDataLoader(dataset_of(address, partition, max_wait=60.0))
    iterator = iter(loader)
    items = [next(iterator) for _ in range(3)]
    thread = next(thread for thread in threading.enumerate() if thread.name == "tq-prefetch")
    loader.close()
    assert not thread.is_alive()
    assert taken(items) == list(range(8))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_errors_of_the_service_keep_their_type(address: str, partition: str, num_workers: int) -> None:
    dataset = dataset_of(address, partition, sampler="no_such_sampler")
    with (
        StreamingDataLoader(dataset, num_workers) as loader,
        pytest.raises(tq.errors.InvalidArgumentError, match="seqlen_balanced") as caught,
    ):
        list(loader)
    assert (type(caught.value), caught.value.reason) == (tq.errors.InvalidArgumentError, "UNKNOWN_SAMPLER")


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_first_program_prints_nothing_of_its_own(address: str, partition: str, num_workers: int) -> None:
    """In a process of its own: torch logs its notice about nested tensors once in a process."""
    program = Path(__file__).parent / "quiet_program.py"
    command = [sys.executable, str(program), address, partition, str(num_workers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "[2, 1]\n"), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].endswith("what the program logs itself")


def test_a_server_that_comes_back_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    address = f"127.0.0.1:{port}"
    loader = StreamingDataLoader(dataset_of(address, "train@0", timeout=60.0))
    results: list[Any] = []
    consumer = threading.Thread(target=lambda: results.extend(loader))
    consumer.start()
    for _ in range(2):
        with ServiceProcess("--port", str(port)) as server:
            server.kill()
    with ServiceProcess("--port", str(port)):
        fill(address, "train@0", 10)
        consumer.join(60)
    assert taken(results) == list(range(10))


@pytest.mark.parametrize("flags", [[], pytest.param(["--num-workers", "2"], marks=pytest.mark.nightly)])
def test_the_example_learns(address: str, flags: list[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "train_loop.py"
    command = [sys.executable, str(example), "--address", address, "--steps", "4", *flags]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=110).stdout
    losses = [float(line.rsplit(" ", 1)[1]) for line in output.splitlines() if line.startswith("step")]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 10


@pytest.mark.parametrize("context", ["forkserver", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_workers_do_not_run_an_unguarded_program_again(address: str, partition: str, context: str) -> None:
    done = run_unguarded(address, partition, context)
    assert (done.returncode, done.stdout) == (0, "[4, 4]\n"), done.stderr
    with tq.Client(address) as client:
        assert client.describe_partition(partition).live_count == 8


def test_a_function_of_an_unguarded_program_is_an_error_that_names_main(address: str, partition: str) -> None:
    done = run_unguarded(address, partition, "forkserver", "main")
    assert done.returncode == 1
    *_, last = done.stderr.strip().splitlines()
    assert "WorkerDiedError" in last
    assert "defined in __main__" in last
    assert 'if __name__ == "__main__":' in last


def run_unguarded(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = Path(__file__).parent / "unguarded_program.py"
    command = [sys.executable, str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_takes_the_addresses_of_several_controllers(address: str, partition: str, num_workers: int) -> None:
    fill(address, partition, 8)
    addresses = [address, address]
    for given in (addresses, ",".join(addresses)):
        with StreamingDataLoader(dataset_of(given, partition, task_name=str(given)), num_workers) as loader:
            assert taken(list(loader)) == list(range(8))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_takes_a_token_as_a_client_does(tmp_path: Path, num_workers: int) -> None:
    tokens, path = tmp_path / "tokens.toml", tmp_path / "trainer.token"
    secret = add_token(tokens, "trainer", ["produce", "consume"])
    replace_file(path, secret.encode())
    with ServiceProcess("--auth-tokens-file", str(tokens)) as service:
        with tq.Client(service.address, token=secret) as client:
            client.put("train", {"index": torch.arange(4)})
            client.seal_partition("train")
        for number, token in enumerate((secret, path)):
            dataset = StreamingDataset(
                service.address, batch_size=4, data_fields=["index"], partition_id="train", task_name=f"t{number}",
                token=token,
            )  # fmt: skip
            assert secret not in repr(dataset.source)
            with StreamingDataLoader(dataset, num_workers) as loader:
                assert [meta.size for _, meta in loader] == [4]


def test_ranks_of_another_number_resume_with_every_sample_trained_once(tmp_path: Path) -> None:
    """As docs/data_loading.md has it, with a service that is new as well: what was trained may be cleared."""
    options = {
        "batch_size": 4, "micro_batch_size": 2, "data_fields": ["index"], "partition_id": "train",
        "task_name": "update_actor", "max_wait": 0.5,
    }  # fmt: skip

    def loader_of(service: ServiceProcess, rank: int, size: int) -> StreamingDataLoader:
        return StreamingDataLoader(StreamingDataset(service.address, dp_rank=rank, dp_size=size, **options))

    trained: list[int] = []

    def train(client: tq.Client, item: tuple[Any, tq.BatchMeta]) -> None:
        trained.extend(item[0]["index"].tolist())
        client.clear_samples(item[1])

    flags = ("--checkpoint-dir", str(tmp_path))
    with ServiceProcess(*flags) as service, tq.Client(service.address) as client:
        client.put("train", {"index": torch.arange(64)})
        client.seal_partition("train")
        loaders = [loader_of(service, rank, 4) for rank in range(4)]
        iterators = [iter(loader) for loader in loaders]
        for _ in range(4):  # two batches
            for iterator in iterators:
                train(client, next(iterator))
        state = loaders[0].state_dict()
        client.checkpoint("step3")
        for loader in loaders:
            loader.close()
    assert len(trained) == 32
    with ServiceProcess(*flags) as service, tq.Client(service.address) as client:
        client.restore("step3")
        other = loader_of(service, 0, 2)
        with pytest.raises(tq.errors.RankDisagreementError, match=r"is 4, got 2.*restart the ranks"):
            next(iter(other))
        for rank in range(2):
            with loader_of(service, rank, 2) as loader:
                loader.load_state_dict(state)
                for item in loader:
                    train(client, item)
        assert sorted(trained) == list(range(64))
        assert client.describe_partition("train").live_count == 0


def test_dropped_samples_stay_dropped_after_a_restart_and_a_restore(tmp_path: Path) -> None:
    sampler = {"sampler": "packed", "sampler_config": {"optimizer_steps": 1, "pack_max_length": 9, "overlong": "drop"}}
    request: dict[str, Any] = {
        "partition_id": "train",
        "task_name": "update_actor",
        "data_fields": ["index"],
        **sampler,
    }
    ranks = [{"dp_rank": rank, "dp_size": 2, "batch_size": 2, "batch_index": 0} for rank in (0, 1)]
    service = ServiceProcess("--checkpoint-dir", str(tmp_path / "checkpoints"), data_dir=tmp_path / "data")
    with service, tq.Client(service.address) as client:
        client.put("train", {"index": torch.arange(4)}, custom_meta={"total_lengths": [20, 5, 5, 20]})
        client.seal_partition("train")
        answers = [client.get_meta(**request, **rank) for rank in ranks]
        assert sorted(row for meta in answers for row in meta.dropped_indexes.tolist()) == [0, 3]
        assert [len(part.dropped_indexes) for part in answers[0].chunk(2)] == [len(answers[0].dropped_indexes)] * 2
        status = client.check_consumption("train", "update_actor")
        client.checkpoint("here")
        service.kill()
        service.start()
        for _ in ("recovered", "restored"):
            assert [client.get_meta(**request, **rank) for rank in ranks] == answers
            assert client.check_consumption("train", "update_actor") == status
            assert client.clear_samples("train", skipped_by="update_actor") == 2
            client.clear_partition("train")
            client.restore("here")
