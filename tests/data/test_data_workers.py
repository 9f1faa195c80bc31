import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fake_client import FIELDS, SealedRows, batch_of, token_rows
from orphans_program import Endless

from tq_service.data import StreamingDataLoader, StreamingDataset, fetch_batch
from tq_service.data.columns import flatten
from tq_service.data.workers import worker_context
from tq_service.errors import QuotaExceededError


def loader_of(
    row_count: int, *, num_workers: int = 2, context: str | None = "fork", persistent: bool = True, **changes: Any
) -> StreamingDataLoader:
    options: dict[str, Any] = {
        "batch_size": 4, "micro_batch_size": 2, "data_fields": FIELDS, "partition_id": "train@0", "task_name": "t",
        "client_factory": SealedRows(row_count, ("train@0", "train@1")), "max_wait": 0.2,
    }  # fmt: skip
    dataset = StreamingDataset(None, **{**options, **changes})
    return StreamingDataLoader(dataset, num_workers, 2, context, persistent_workers=persistent)


def indexes(iterable: Any) -> list[int]:
    return [index for micro_batch, _ in iterable for index in micro_batch["index"].tolist()]


def worker_pids() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if child.pid}


# Each spawned worker takes seconds to import torch: `test_workers_with_live_clients_in_the_parent` spawns three.
@pytest.mark.parametrize(
    ("context", "num_workers"),
    [
        ("fork", 3),
        (None, 2),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in [("fork", 1), ("fork", 2), ("spawn", 2)]),
    ],
)
def test_workers_share_the_batches_in_order(context: str | None, num_workers: int) -> None:
    with loader_of(30, context=context, num_workers=num_workers) as loader:
        seen = list(loader)
        assert indexes(seen) == list(range(30))
        for micro_batch, meta in seen:
            assert micro_batch["index"].tolist() == meta.global_indexes
            assert micro_batch["input_ids"].layout is torch.jagged
            assert micro_batch["logprobs"].dtype is torch.bfloat16
            assert micro_batch["input_ids"].offsets() is micro_batch["logprobs"].offsets()
            expected = batch_of([token_rows(30)[index] for index in meta.global_indexes])
            assert torch.equal(micro_batch["input_ids"].values(), expected["input_ids"].values())
            assert list(micro_batch["text"]) == list(expected["text"])
        pids = worker_pids()
        assert len(pids) == num_workers
        loader.reset()
        assert indexes(loader) == list(range(30))
        loader.step("train@1")
        assert indexes(loader) == list(range(30, 60))
        assert worker_pids() == pids
    assert not worker_pids() & pids


def test_a_break_loses_nothing() -> None:
    with loader_of(40) as loader:
        taken = []
        for micro_batch, _ in loader:
            taken += micro_batch["index"].tolist()
            if len(taken) == 8:
                break
        taken += indexes(loader)
        assert taken == list(range(40))


def test_a_live_iterator_follows_reset() -> None:
    with loader_of(24, replay_buffer_bytes=flatten(batch_of(token_rows(4))).size_bytes) as loader:
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        loader.reset()
        assert indexes(iterator) == list(range(24))


def test_empty_ranks_come_typed_from_workers() -> None:
    with loader_of(9, dp_rank=1, dp_size=2) as loader:
        seen = list(loader)
    assert [meta.global_indexes for _, meta in seen] == [[4, 5], [6, 7], []]
    assert seen[-1][0]["input_ids"].layout is torch.jagged
    assert seen[-1][0]["logprobs"].dtype is torch.bfloat16


def fail_at(failing_index: int, error: Exception, **keywords: Any) -> Any:
    if keywords["batch_index"] == failing_index:
        raise error
    return fetch_batch(**keywords)


class PeculiarError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_functions_need_no_pickling_with_fork() -> None:
    def fetch(**keywords: Any) -> Any:
        return fetch_batch(**keywords)

    with loader_of(12, fetch_batch_fn=fetch) as loader:
        assert indexes(loader) == list(range(12))


def test_the_default_is_a_fork_server_where_functions_can_be_pickled() -> None:
    picklable, bound = loader_of(4).dataset.source, loader_of(4, fetch_batch_fn=lambda **_: (None, None)).dataset.source
    assert worker_context(None, picklable).get_start_method() == "forkserver"
    assert worker_context(None, bound).get_start_method() == "fork"
    assert worker_context("spawn", picklable).get_start_method() == "spawn"
    chosen = multiprocessing.get_context("fork")
    assert worker_context(chosen, picklable) is chosen


def test_an_error_in_a_worker_keeps_its_type() -> None:
    error = QuotaExceededError("no capacity", metadata={"quota": "7"})
    with loader_of(40, fetch_batch_fn=partial(fail_at, 3, error)) as loader:
        taken: list[int] = []
        with pytest.raises(QuotaExceededError, match="no capacity") as caught:
            for micro_batch, _ in loader:
                taken += micro_batch["index"].tolist()
    assert taken == list(range(12))
    assert caught.value.metadata == {"quota": "7"}
    assert "fail_at" in caught.value.__notes__[0]


def test_an_error_that_cannot_be_copied_keeps_its_text() -> None:
    with (
        loader_of(8, fetch_batch_fn=partial(fail_at, 0, PeculiarError(1, 2))) as loader,
        pytest.raises(RuntimeError, match="PeculiarError: 1 and 2"),
    ):
        list(loader)


def die_at(dying_index: int, **keywords: Any) -> Any:
    if keywords["batch_index"] == dying_index:
        os.kill(os.getpid(), signal.SIGKILL)
    return fetch_batch(**keywords)


def test_the_death_of_a_worker_is_an_error() -> None:
    loader = loader_of(40, fetch_batch_fn=partial(die_at, 5))
    with pytest.raises(RuntimeError, match="worker"):
        list(loader)
    assert not worker_pids()


@pytest.mark.parametrize("how", ["close", "step", "garbage"])
def test_workers_that_wait_for_data_let_go(how: str) -> None:
    loader: StreamingDataLoader | None = loader_of(8, client_factory=Endless())
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    pids = worker_pids()
    assert len(pids) == 2
    if how == "step":
        loader.reset()
        loader.dataset.get_buffer()
        loader.step("train@0")
        assert next(iterator)[1].global_indexes == [0, 1]
    if how == "garbage":
        del iterator, loader
    else:
        loader.close()
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)


def test_a_call_that_waits_is_ended_with_the_stream() -> None:
    """Were it not, the workers would have to be killed, which their exit codes tell."""
    loader = loader_of(8, client_factory=Endless(), max_wait=600.0)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    workers = [child for child in multiprocessing.active_children() if child.name.startswith("tq-worker")]
    loader.step("train@0")
    assert next(iterator)[1].global_indexes == [0, 1]
    loader.close()
    assert [worker.exitcode for worker in workers] == [0, 0]


def hang(hanging: Any, **keywords: Any) -> Any:
    if keywords["batch_index"] == 1:
        hanging.set()
        time.sleep(600)
    return fetch_batch(**keywords)


def test_a_worker_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tq_service.data.workers._JOIN_SECONDS", 0.2)
    hanging = multiprocessing.get_context("fork").Event()
    loader = loader_of(8, num_workers=1, fetch_batch_fn=partial(hang, hanging))
    iterator = iter(loader)  # kept: one that is garbage takes its requests back
    next(iterator)
    assert hanging.wait(60)
    (worker,) = (child for child in multiprocessing.active_children() if child.name.startswith("tq-worker"))
    loader.close()
    # Another thread of the pool may have seen its end, and not written it down yet.
    deadline = time.monotonic() + 60
    while worker.exitcode is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert worker.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("context", [pytest.param("fork", marks=pytest.mark.nightly), "forkserver"])
def test_workers_end_with_a_parent_that_is_killed(context: str) -> None:
    program = Path(__file__).parent / "orphans_program.py"
    with subprocess.Popen([sys.executable, str(program), context], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        parent.kill()
        gone, alive = psutil.wait_procs(workers, timeout=30)
    assert (len(gone), alive) == (2, [])


def test_workers_end_with_the_iterator_where_asked() -> None:
    loader = loader_of(8, persistent=False)
    assert indexes(loader) == list(range(8))
    assert not worker_pids()
    loader.reset()
    assert indexes(loader) == list(range(8))


def plain_data(**keywords: Any) -> Any:
    data, meta = fetch_batch(**keywords)
    return (None if data is None else data["index"].tolist()), meta


def sums(data: Any, meta: Any, micro_batch_size: int) -> Any:
    return [sum(data)]


def test_data_of_other_types_travels_to_a_process_function() -> None:
    with loader_of(12, fetch_batch_fn=plain_data, process_batch_fn=sums) as loader:
        assert list(loader) == [6, 22, 38]


def test_a_process_function_runs_in_the_training_thread() -> None:
    threads = set()

    def note(data: Any, meta: Any, micro_batch_size: int) -> Any:
        threads.add(threading.current_thread())
        return [data]

    with loader_of(12, process_batch_fn=note) as loader:
        assert len(list(loader)) == 3
    assert threads == {threading.current_thread()}


def test_a_dataset_in_a_plain_torch_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tq_service.data.dataset.get_worker_info", object)
    with pytest.raises(RuntimeError, match="StreamingDataLoader"):
        iter(loader_of(8).dataset)
