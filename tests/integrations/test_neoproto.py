"""verl's NeoProto over a real service; verl itself is represented by the contracts of its refs and registries."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from property_settings import examples

import tq_service as tq
from tq_service.testing import ServiceProcess

STUB = Path(__file__).parent / "neoproto_stub"


@pytest.fixture(scope="module")
def adapter() -> Iterator[Any]:
    sys.path.insert(0, str(STUB))
    try:
        from tq_service.integrations import neoproto

        yield neoproto
    finally:
        sys.path.remove(str(STUB))
        for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
            del sys.modules[name]
        sys.modules.pop("tq_service.integrations.neoproto", None)


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with ServiceProcess() as started:
        yield started


@pytest.fixture
def engine(adapter: Any, service: ServiceProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("TQ_ADDRESS", service.address)
    made = adapter.TqServiceStorageEngine()
    yield made
    made.clear()
    made.close()
    from verl.experimental.neoproto import neo
    from verl.experimental.neoproto.storage import default

    neo.GLOBAL_ENGINE_DICT.clear()
    default.set_default_storage_engine(None)


def rows(count: int = 16, length: int = 512) -> torch.Tensor:
    """Return rows of 2 KiB, which are stored one by one."""
    return torch.arange(count * length, dtype=torch.float32).reshape(count, length)


def assert_same(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert got.numpy(force=True).tobytes() == expected.numpy(force=True).tobytes() if expected.dtype not in {
            torch.bfloat16, torch.float8_e4m3fn,
        } else torch.equal(got.view(torch.uint8), expected.view(torch.uint8))  # fmt: skip
    elif isinstance(expected, np.ndarray):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.tobytes() == expected.tobytes() if got.dtype != object else got.tolist() == expected.tolist()
    else:
        assert got == expected


VALUES = {
    "rows": rows(),
    "a few numbers": torch.arange(12).reshape(3, 4),
    "one row": torch.arange(600.0)[None],
    "vector": torch.arange(5),
    "scalar": torch.tensor(2.5),
    "no rows": torch.zeros(0, 4, dtype=torch.int32),
    "empty rows": torch.zeros(3, 0),
    "bfloat16": rows(4).bfloat16(),
    "float8": torch.arange(8.0).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]),
    "three dimensions": torch.arange(4 * 8 * 128.0).reshape(4, 8, 128),
    "not contiguous": rows().T,
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "array in rows": rows().numpy(),
    "array without dimensions": np.array(3.5),
    "array of texts": np.array(["a", "bc"]),
    "array of objects": np.array(["a", None, {"x": [1]}], dtype=object),
    "text": "some text",
    "bytes": b"\x00\xff",
    "None": None,
    "number": 7,
    "nested": {"a": [1, 2.5, (True, None)], "b": torch.arange(3), 3: "c"},
}


@pytest.mark.parametrize("name", VALUES)
def test_what_was_put_comes_back(engine: Any, name: str) -> None:
    value = VALUES[name]
    ref = engine.put(value, key_hint="some/hint")
    got = engine.get(ref)
    if name == "nested":
        assert torch.equal(got.pop("b"), value["b"])
        value = {key: each for key, each in value.items() if key != "b"}
    assert_same(got, value)
    assert ref.backend == "tq_service"
    assert ref.uid.startswith("some_hint-")
    if isinstance(value, (torch.Tensor, np.ndarray)):
        assert (ref.shape, ref.dtype) == (tuple(value.shape), str(value.dtype).removeprefix("torch."))


def test_values_put_together_come_back_in_order(engine: Any) -> None:
    values = [value for name, value in VALUES.items() if name != "nested"]
    refs = engine.put_many(iter(values))
    assert len({ref.uid for ref in refs}) == len(values)
    for got, value in zip(engine.get_many(refs), values, strict=True):
        assert_same(got, value)
    assert engine.put_many([]) == engine.get_many([]) == []


def test_small_values_share_a_put_and_a_call(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("put", "get_data"):
        real = getattr(engine.client, name)
        monkeypatch.setattr(
            engine.client,
            name,
            lambda *args, real=real, name=name, **rest: (calls.append(name), real(*args, **rest))[1],
        )
    lengths = [3, 5, 5, 2]
    refs = engine.put_many([torch.full((length,), float(length)) for length in lengths] + [torch.tensor(1)])
    got = engine.get_many(refs)
    assert [each.tolist() for each in got[:4]] == [[float(length)] * length for length in lengths]
    assert calls == ["put", "put", "get_data", "get_data"]


@settings(examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(
        npst.arrays(
            st.sampled_from([np.int64, np.float32, np.uint8, np.bool_]),
            npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6),
        ),
        max_size=6,
    ),
    as_tensors=st.booleans(),
)
def test_arrays_of_any_shape_come_back(engine: Any, values: list[Any], as_tensors: bool) -> None:
    given_values = [torch.from_numpy(value) for value in values] if as_tensors else values
    refs = engine.put_many(given_values)
    for got, value in zip(engine.get_many(refs), given_values, strict=True):
        assert_same(got, value)
    engine.release(refs)


# Slices


class Asked:
    """Which samples were asked of the service."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.indexes: list[list[int]] = []
        real = engine.client.get_data

        def get_data(meta: Any, **rest: Any) -> Any:
            self.indexes.append(meta.indexes.tolist())
            return real(meta, **rest)

        monkeypatch.setattr(engine.client, "get_data", get_data)


@pytest.mark.parametrize(
    ("dims", "fetched"),
    [
        ((5,), 1), ((-1,), 1), ((slice(3, 6),), 3), ((slice(12, 3),), 0), ((slice(-7, -2),), 5),
        ((slice(0, 16, 5),), 4), (([7, 2, 7],), 3), ((np.arange(16) < 2,), 2), ((None, slice(0, 4)), 16), ((2, 3), 1),
        ((slice(3, 6), slice(1, 7, 2)), 3), (([7, 2], [0, 3]), 2), ((slice(0, 4), [5, 1]), 4), ((None, [5, 1]), 16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("make", [rows, lambda: rows().numpy(), lambda: torch.arange(16 * 8).reshape(16, 8)])
def test_a_slice_is_what_torch_selects(
    engine: Any, monkeypatch: pytest.MonkeyPatch, make: Any, dims: tuple[Any, ...], fetched: int
) -> None:
    value = make()
    asked = Asked(engine, monkeypatch)
    index = tuple(slice(None) if dim is None else dim for dim in dims)
    assert_same(torch.as_tensor(engine.get(engine.put(value).with_spec(*dims))), torch.as_tensor(value[index]))
    is_split = value.nbytes >= 1024 * 16
    assert [len(each) for each in asked.indexes] == ([fetched] if fetched else []) if is_split else [[1]]


def test_selectors_that_verl_could_not_join_apply_one_after_the_other(engine: Any) -> None:
    value = rows()
    ref = engine.put(value)
    composed = ([9, 4, 1], slice(1, 3))
    assert torch.equal(engine.get(ref.with_spec(composed)), value[[4, 1]])
    assert torch.equal(engine.get(ref.with_spec(None, composed)), value[:, [4, 1]])
    assert torch.equal(engine.get(engine.put(value[:, 0]).with_spec(composed)), value[[4, 1], 0])


def test_rows_of_one_value_are_fetched_together(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    value = rows()
    ref = engine.put(value)
    asked = Asked(engine, monkeypatch)
    refs = [ref.with_spec(5), None, ref.with_spec(slice(2, 4)), ref.with_spec(5)]
    got = engine.get_many(refs)
    assert got[1] is None
    assert torch.equal(got[0], value[5])
    assert torch.equal(got[2], value[2:4])
    assert torch.equal(got[3], value[5])
    assert len(asked.indexes) == 1
    assert torch.equal(engine.get_many([ref.with_spec(5)], apply_ops=False)[0], value)


def test_operations_apply_after_slices(engine: Any) -> None:
    value = rows()
    ref = engine.put(value).with_spec(slice(0, 2)).with_operation("TO", {"dtype": torch.float64})
    ref = ref.with_operation("UNSQUEEZE", 0)
    assert_same(engine.get(ref), value[:2].to(torch.float64)[None])
    assert_same(engine.get_many([ref], apply_ops=False)[0], value)


def test_slices_of_lists_and_objects_select_along_the_first_axis(engine: Any) -> None:
    ref = engine.put(["a", "b", "c"])
    assert engine.get(ref.with_spec(1)) == "b"
    assert engine.get(ref.with_spec([2, 0])) == ["c", "a"]
    assert engine.get(ref.with_spec(slice(1, 3))) == ["b", "c"]
    objects = engine.put(np.array(["a", None, 3], dtype=object))
    assert engine.get(objects.with_spec([2, 1])).tolist() == [3, None]


def test_the_rows_of_a_rank_are_fetched_and_no_others(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, rewards, texts = rows(), torch.arange(16.0), [f"text {number}" for number in range(16)]
    refs = engine.put_many([tokens, rewards, texts, rows() + 1])
    asked = Asked(engine, monkeypatch)
    chosen = np.array([9, 3, 3])
    got = engine.get_rows_many(refs, chosen)
    assert torch.equal(got[0], tokens[chosen])
    assert torch.equal(got[1], rewards[chosen])
    assert got[2] == [texts[number] for number in chosen]
    assert torch.equal(got[3], tokens[chosen] + 1)
    assert sorted(len(each) for each in asked.indexes) == [1, 1, 6]
    part = refs[0].with_spec(slice(8, 16), slice(0, 4))
    assert torch.equal(engine.get_rows(part, [1, 7]), tokens[[9, 15], :4])
    moved = part.with_operation("UNSQUEEZE", 0)
    assert torch.equal(engine.get_rows(moved, [0]), tokens[8:16, :4][None])
    with pytest.raises(IndexError):
        engine.get_rows(part, [8])


# Lives of values


def test_what_is_released_is_gone_for_all(engine: Any, service: ServiceProcess, adapter: Any) -> None:
    first, second, third = engine.put_many([rows(), "text", torch.tensor(1)])
    alias = pickle.loads(pickle.dumps(first))
    other = adapter.TqServiceStorageEngine(service.address)
    engine.release([first, None, second, first])
    for ref in (first, alias, second):
        with pytest.raises(KeyError, match="has no sample"):
            other.get(ref)
    other.release([alias, second])  # once more
    assert engine.get(third) == 1
    engine.release(third)
    (usage,) = [each for each in engine.client.list_partitions() if each.partition_id == "neoproto"]
    assert usage.present_count == 0
    other.close()


def test_a_value_is_never_taken_for_one_of_a_later_life(engine: Any) -> None:
    ref = engine.put(torch.arange(3))
    engine.clear()
    with pytest.raises(KeyError):
        engine.get(ref)
    again = engine.put(torch.arange(3) + 1)
    assert again.dataptr.first_index == ref.dataptr.first_index
    assert ref != again
    with pytest.raises(KeyError, match="created again"):
        engine.get(ref)
    engine.release(ref)
    assert engine.get(again).tolist() == [1, 2, 3]


def test_readers_cannot_change_what_others_get(engine: Any) -> None:
    value = rows()
    ref = engine.put(value)
    value.zero_()
    engine.get(ref).fill_(7)
    engine.get_many([ref.with_spec(3)])[0].fill_(7)
    assert torch.equal(engine.get(ref), rows())


def test_nothing_stays_of_values_that_could_not_all_be_put(engine: Any) -> None:
    with pytest.raises(tq.errors.UnsupportedObjectError):
        engine.put_many([rows(200), torch.tensor(1), object()])
    assert all(each.present_count == 0 for each in engine.client.list_partitions())


def test_apply_runs_here_and_keeps_the_value(engine: Any) -> None:
    ref = engine.put(torch.arange(4))
    made = engine.apply(ref.with_spec(slice(1, 3)), lambda value: value * 10, key_hint="scaled")
    assert engine.get(made).tolist() == [10, 20]
    assert engine.get(ref).tolist() == [0, 1, 2, 3]
    with pytest.raises(ZeroDivisionError):
        engine.apply(ref, lambda value: 1 / 0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([rows(2), rows(3) + 1], torch.cat([rows(2), rows(3) + 1])),
        ([torch.tensor(1), torch.tensor(2)], torch.tensor([1, 2])),
        ([np.arange(2), np.arange(3)], np.array([0, 1, 0, 1, 2])),
        ([np.array(1.5), np.array(2.5)], np.array([1.5, 2.5])),
        (["a", None, {"b": 1}], np.array(["a", None, {"b": 1}], dtype=object)),
    ],
)
def test_consolidated_values_are_one(
    engine: Any, monkeypatch: pytest.MonkeyPatch, values: list[Any], expected: Any
) -> None:
    refs = [engine.put(value) for value in values]
    made = engine.consolidate(engine, refs)
    asked = Asked(engine, monkeypatch)
    assert_same(engine.get(made), expected)
    assert len(asked.indexes) == 1
    engine.release(refs)
    assert_same(engine.get(made), expected)


def test_consolidate_takes_refs_of_other_engines_and_slices(engine: Any) -> None:
    class Elsewhere:
        def get_many(self, refs: list[Any]) -> list[Any]:
            return [torch.tensor([float(len(ref))]) for ref in refs]

    assert engine.get(engine.consolidate(Elsewhere(), ["a", "bcd"])).tolist() == [1.0, 3.0]
    ref = engine.put(rows())
    made = engine.consolidate(None, [ref.with_spec(slice(4, 6)), ref.with_spec(slice(0, 1))])
    assert torch.equal(engine.get(made), rows()[[4, 5, 0]])


@pytest.mark.parametrize(
    "values", [[rows(2), torch.arange(3)], [torch.tensor(1), torch.arange(2)], [rows(1), rows(1).int()]]
)
def test_values_that_do_not_fit_are_not_consolidated(engine: Any, values: list[Any]) -> None:
    refs = engine.put_many(values)
    with pytest.raises(ValueError, match="expected the same dtype and row shape for all"):
        engine.consolidate(engine, refs)
    for bad in ([], [refs[0], None]):
        with pytest.raises(ValueError, match="expected at least one ref"):
            engine.consolidate(engine, bad)


def test_refs_of_other_backends_are_refused(engine: Any) -> None:
    from verl.experimental.neoproto.storage.engine import Ref

    mine, foreign = engine.put(1), Ref(backend="ray_object_store", uid="u", dataptr=object())
    for call in (
        engine.get,
        engine.release,
        lambda ref: engine.release([mine, ref]),
        lambda ref: engine.get_rows(ref, [0]),
    ):
        with pytest.raises(ValueError, match="has backend 'ray_object_store'"):
            call(foreign)
    assert engine.get(mine) == 1


def test_namespaces_and_partitions_keep_runs_apart(engine: Any, service: ServiceProcess, adapter: Any) -> None:
    own = adapter.TqServiceStorageEngine(service.address, namespace="run-7", partition_id="values", ttl_seconds=600.0)
    ref = own.put(torch.arange(3))
    assert engine.client.describe_partition("run-7/values").release.ttl_seconds == 600.0
    own.put(torch.arange(4))
    assert engine.get(ref).tolist() == [0, 1, 2]  # by refs, others find it
    engine.clear()
    assert own.get(ref).tolist() == [0, 1, 2]
    own.clear()
    with pytest.raises(KeyError):
        engine.get(ref)
    own.client.clear_partition("values")  # which it has made again, to keep its ttl
    own.close()
    own.close()
    again = pickle.loads(pickle.dumps(own))
    assert (again.partition_id, again.client.namespace) == ("values", "run-7")
    again.close()


# Processes


def in_a_child(connection: Any, stub: str, pickled: bytes) -> None:
    """Get what another process has put, put something, and release: a worker of verl that has installed nothing."""
    sys.path.insert(0, stub)
    refs = pickle.loads(pickled)
    from verl.experimental.neoproto import neo
    from verl.experimental.neoproto.storage.default import get_engine_for_backend

    found = neo.GLOBAL_ENGINE_DICT[refs[0].backend]
    made = found.put(found.get(refs[0]).sum())
    refs[1].release()
    connection.send(
        pickle.dumps((made, found.get(refs[0].with_spec(1)), get_engine_for_backend("tq_service") is found))
    )
    connection.close()


@pytest.mark.parametrize("method", ["spawn", pytest.param("fork", marks=pytest.mark.nightly)])
def test_refs_work_in_other_processes(engine: Any, method: str) -> None:
    value = rows()
    refs = engine.put_many([value, "released there"])
    engine.get(refs[0])  # a client is open as the child is made
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=in_a_child, args=(theirs, str(STUB), pickle.dumps(refs)))  # type: ignore[attr-defined]
    child.start()
    theirs.close()
    made, row, is_registered = pickle.loads(ours.recv())
    child.join()
    assert is_registered
    assert engine.get(made) == value.sum()
    assert torch.equal(row, value[1])
    with pytest.raises(KeyError):
        engine.get(refs[1])


def test_an_installed_engine_is_the_default_and_found_for_releases(engine: Any, adapter: Any) -> None:
    from verl.experimental.neoproto.storage import default

    assert adapter.install(engine) is engine
    assert default.get_engine_for_backend() is default.get_engine_for_backend("tq_service") is engine
    with pytest.raises(ValueError, match="unsupported NeoProto storage backend 'ray'"):
        default.get_engine_for_backend("ray")
    ref = engine.put("text")
    ref.release()
    with pytest.raises(KeyError):
        engine.get(ref)
    pickle.loads(pickle.dumps(ref))  # finds the engine that is installed
    assert default.get_engine_for_backend("tq_service") is engine
    find = default.get_engine_for_backend
    adapter.install(engine)
    assert default.get_engine_for_backend is find


def test_a_driver_clears_at_its_exit(engine: Any) -> None:
    program = (
        "from tq_service.integrations import neoproto\n"
        "engine = neoproto.install(clear_at_exit=True)\n"
        "engine.put('text')\n"
        "print([each.partition_id for each in engine.client.list_partitions() if each.partition_id == 'neoproto'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(STUB)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "['neoproto']\n", "")
    assert "neoproto" not in [each.partition_id for each in engine.client.list_partitions()]


def test_a_value_of_many_rows_is_released_whole(engine: Any) -> None:
    refs = [engine.put(torch.zeros(60_000, 256, dtype=torch.int32)[:, :256]) for _ in range(2)]
    assert refs[0].dataptr.row_count == 60_000
    engine.release(refs)
    assert all(each.present_count == 0 for each in engine.client.list_partitions())
