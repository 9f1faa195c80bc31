"""BatchMeta: selecting, cutting and joining keep every sample together with all that is known about it."""

import pickle
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tq_service.client.batch_meta import SAMPLE_COLUMNS, BatchMeta, Pack, Step, joined
from tq_service.errors import InvalidArgumentError
from tq_service.v1 import metadata_pb2 as pb
from tq_service.wire.metadata import encode_meta_columns, encode_produced, rows_to_meta_columns


def make(size=6, first=10, keyed=True, micro_batch=2, **changes):
    rows = [{"total_lengths": first + i, **({"tag": f"t{i}"} if i % 2 else {})} for i in range(size)]
    message = pb.BatchMeta(
        status=pb.BATCH_STATUS_BATCH,
        partition_id="train@0",
        incarnation=b"i" * 16,
        global_indexes=range(first, first + size),
        keys=[f"k{first + i}" for i in range(size)] if keyed else [],
        groups=[f"g{i // 2}" if i < 4 else "" for i in range(size)],
        rollouts=[f"r{i}" if i < 5 else "" for i in range(size)],
        custom_meta=encode_meta_columns(rows_to_meta_columns(rows)),
        fields=[
            pb.FieldSpec(name="a", dtype="int64", layout=pb.LAYOUT_DENSE, row_shape_known=True),
            pb.FieldSpec(name="b", dtype="float32", layout=pb.LAYOUT_JAGGED, row_shape=[-1], row_shape_known=True),
        ],
        locations=pb.Locations(
            storages=[pb.StorageEndpoint(storage_id="s", boot_id=b"b" * 16)],
            puts=[pb.StoredPut(put_id=b"p" * 16), pb.StoredPut(put_id=b"q" * 16)],
            runs=[
                pb.CellRuns(field_names=["a"], put_indexes=[0], first_rows=[first], row_counts=[size]),
                pb.CellRuns(field_names=["b"], put_indexes=[1], first_rows=[0], row_counts=[size]),
            ],
        ),
        steps=[
            pb.Step(
                packs=[
                    pb.Pack(rows=range(start, min(start + micro_batch, size)), padding_tokens=3)
                    for start in range(0, size, micro_batch)
                ]
            )
        ],
        produced=encode_produced([np.ones(size, bool), np.arange(first, first + size) % 3 > 0]),
    )
    for name, value in changes.items():
        message.ClearField(name)
        message.MergeFrom(pb.BatchMeta(**{name: value}))
    return BatchMeta.from_proto(message)


def facts(meta):
    """Everything known of each sample, by its index."""
    cells = {}
    for runs in meta.locations.runs:
        puts, rows = runs.expand()
        for name in runs.field_names:
            cells[name] = [
                (meta.locations.puts[put], row) for put, row in zip(puts.tolist(), rows.tolist(), strict=True)
            ]
    return {
        index: (
            meta.keys[at],
            meta.groups[at],
            meta.rollouts[at],
            meta.custom_meta[at],
            *(cells[name][at] for name in sorted(cells)),
            *(mask[at] for _, mask in sorted(meta.produced.items())),
        )
        for at, index in enumerate(meta.global_indexes)
    }


def test_what_a_message_says():
    meta = make()
    assert (meta.status, meta.size, len(meta), meta.partition_id) == ("batch", 6, 6, "train@0")
    assert meta.global_indexes == [10, 11, 12, 13, 14, 15]
    assert meta.keys[0] == "k10"
    assert meta.groups == ["g0", "g0", "g1", "g1", None, None]
    assert meta.custom_meta[:2] == [{"total_lengths": 10}, {"total_lengths": 11, "tag": "t1"}]
    assert meta.data_fields == ["a", "b"]
    assert meta.micro_batches == [[0, 1], [2, 3], [4, 5]]
    assert make(keyed=False).keys == [None] * 6


@settings(deadline=None)
@given(st.permutations(range(6)), st.integers(0, 6))
def test_selection_takes_all_facts_along(order, count):
    meta = make()
    chosen = meta.select_samples(order[:count])
    assert chosen.global_indexes == [10 + at for at in order[:count]]
    known = facts(meta)
    assert facts(chosen) == {index: known[index] for index in chosen.global_indexes}
    packed = [chosen.global_indexes[at] for pack in chosen.micro_batches for at in pack]
    assert sorted(packed) == sorted(chosen.global_indexes)
    for step in chosen.steps:
        for pack in step.packs:
            assert pack.positions
            assert pack.padding_tokens == (3 if len(pack.positions) == 2 else 0)


@settings(deadline=None)
@given(st.integers(0, 9), st.integers(1, 12))
def test_chunks_join_to_the_whole(size, count):
    meta = make(size=size)
    parts = meta.chunk(count)
    sizes = [part.size for part in parts]
    assert len(parts) == count
    assert max(sizes) - min(sizes) <= 1
    whole = BatchMeta.concat(parts)
    assert whole.global_indexes == meta.global_indexes
    assert whole.custom_meta == meta.custom_meta
    assert whole.groups == meta.groups
    if size:
        assert facts(whole) == facts(meta)
    assert sorted(at for pack in whole.micro_batches for at in pack) == list(range(size))


def test_every_column_goes_with_the_samples():
    whole = replace(make(delivery_counts=[1, 2, 3, 1, 2, 3]), consumption=np.arange(6, dtype=np.uint8))
    assert all(len(getattr(whole, name)) for name in SAMPLE_COLUMNS)
    back = joined([whole.select_samples([5, 3]), whole.select_samples([]), whole.select_samples([0, 1, 2, 4])])
    back = back.select_samples([2, 3, 4, 1, 5, 0])
    for name in SAMPLE_COLUMNS.keys() - {"meta_columns"}:
        assert list(getattr(back, name)) == list(getattr(whole, name))
    assert back.custom_meta == whole.custom_meta


def test_the_columns_are_those_of_the_message():
    repeated = {each.name for each in pb.BatchMeta.DESCRIPTOR.fields if each.default_value == []}
    of_samples = repeated - {"global_indexes", "dropped_indexes", "fields", "steps", "totals", "produced"}
    assert {column.message_field for column in SAMPLE_COLUMNS.values()} - {""} == of_samples


def test_selecting_everything_changes_nothing():
    meta = make()
    assert meta.select_samples(range(6)) == meta
    assert meta.select_samples(np.arange(6)) == meta


def test_packs_without_samples_stay_so_that_ranks_agree():
    empty = BatchMeta.from_proto(pb.BatchMeta(steps=[pb.Step(packs=[pb.Pack(), pb.Pack()])]))
    assert empty.status == "batch"
    assert empty.micro_batches == [[], []]
    assert empty.select_samples([]) == empty


def test_joining_different_batches():
    joined = BatchMeta.concat([make(size=2), make(size=3, first=50, keyed=False)])
    assert joined.keys == ["k10", "k11", None, None, None]
    assert joined.global_indexes == [10, 11, 50, 51, 52]
    assert joined.micro_batches == [[0, 1], [2, 3], [4]]
    assert facts(joined)[50][3:] == facts(make(size=3, first=50))[50][3:]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([], "at least one"),
        ([make(), make(partition_id="other", first=50)], "differ in full_partition_id"),
        ([make(), make(epoch=2, first=50)], "differ in epoch"),
        ([make(status=pb.BATCH_STATUS_END)], "status 'end'"),
        ([make(), make(first=50).select_fields(["a"])], "differ in data_fields"),
    ],
)
def test_batches_that_cannot_be_joined(parts, words):
    with pytest.raises(InvalidArgumentError, match=words):
        BatchMeta.concat(parts)


@pytest.mark.parametrize("positions", [[6], [-1], [0, 0], [0.5], [[0]], ["a"]])
def test_positions_are_checked(positions):
    with pytest.raises(InvalidArgumentError, match="position"):
        make().select_samples(positions)


def test_what_is_produced_is_known_of_fields_that_it_was_said_of():
    known = make()
    assert known.produced["b"].tolist() == [True, True, False] * 2
    assert not known.produced["a"].flags.writeable
    assert known.select_fields(["b"]).produced.keys() == {"b"}
    assert known.select_samples([2, 0]).produced["b"].tolist() == [False, True]
    claimed = make(produced=[])
    assert {name: mask.tolist() for name, mask in claimed.produced.items()} == {"a": [True] * 6, "b": [True] * 6}
    written = make(produced=[], locations=pb.Locations())
    assert written.produced == {}
    assert BatchMeta.concat([known, make(first=16, produced=[], locations=pb.Locations())]).produced == {}
    assert known == claimed


def test_pages_are_joined_with_the_fields_that_one_of_them_has_where_that_is_known():
    first, second = make().select_fields(["b"]), make(first=16)
    whole = joined([first, second])
    assert whole.data_fields == ["b", "a"]
    assert whole.produced["a"].tolist() == [False] * 6 + [True] * 6
    assert whole.produced["b"].tolist() == [*first.produced["b"], *second.produced["b"]]
    assert whole.locations.field_names == {"b"}
    unknown = joined([make(produced=[]).select_fields(["b"]), make(first=16, produced=[])])
    assert unknown.data_fields == ["b"]


def test_select_fields():
    meta = make().select_fields(["b"])
    assert meta.data_fields == ["b"]
    assert meta.locations.field_names == {"b"}
    with pytest.raises(InvalidArgumentError, match=r"no field 'c'.*'a', 'b'"):
        make().select_fields(["c"])


def test_equality_is_about_the_samples_not_where_they_are():
    meta = make()
    elsewhere = pickle.loads(pickle.dumps(meta.select_samples(range(6))))
    assert meta == elsewhere
    assert hash(meta) == hash(elsewhere)
    for other in (make(size=5), make(epoch=1), make(keyed=False), make(first=11), make().select_fields(["a"])):
        assert meta != other
    assert meta != "meta"


def test_it_is_pickled_whole_and_immutable():
    meta = make()
    back = pickle.loads(pickle.dumps(meta))
    assert facts(back) == facts(meta)
    with pytest.raises(FrozenInstanceError):
        meta.epoch = 3
    with pytest.raises(ValueError, match="read-only"):
        meta.indexes[0] = 3


@pytest.mark.parametrize(
    "change", [lambda meta: meta, lambda meta: meta.select_samples([4, 1]), lambda meta: meta.chunk(2)]
)
def test_what_is_read_late_is_as_if_it_was_read_at_once(change):
    late, early = make(), make()
    for each in fields(early):
        getattr(early, each.name)
    assert early == late
    late, early = make(), pickle.loads(pickle.dumps(early))
    whole = [BatchMeta.concat(each) if isinstance(each, list) else each for each in (change(late), change(early))]
    assert whole[0] == whole[1]
    assert facts(whole[0]) == facts(whole[1])
    assert whole[0].steps == whole[1].steps


def test_what_cannot_be_read_is_refused_when_it_is_asked_for():
    meta = make(custom_meta=[pb.MetaColumn(name="v", kinds=b"\1", int64_values=pb.Int64Values(values=[1, 2, 3]))])
    assert meta.micro_batches == [[0, 1], [2, 3], [4, 5]]
    for _ in range(2):
        with pytest.raises(InvalidArgumentError):
            _ = meta.custom_meta


@pytest.mark.parametrize("size", [2, 1000])
def test_equal_steps_are_read_alike_whatever_their_size(size):
    message = pb.Step(packs=[pb.Pack(rows=range(size), lengths=range(1, size + 1), padding_tokens=3)])
    step = Step.from_proto(message)
    assert step == Step(
        packs=(Pack(positions=tuple(range(size)), lengths=tuple(range(1, size + 1)), padding_tokens=3),)
    )
    message.packs[0].padding_tokens = 4
    assert Step.from_proto(message).packs[0].padding_tokens == 4
    assert step.packs[0].padding_tokens == 3
