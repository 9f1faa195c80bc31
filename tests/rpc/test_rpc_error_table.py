"""Every row of the contract's table of errors, from both clients: class, code, reason, message; nothing changed."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np
import pytest
import rpc_faulty_samplers
import torch
from live_server import AnyClient, ClientKind, LiveServer, LoopThread, StartServer
from rpc_methods import DESCRIBED, names_in
from rpc_samples import (
    TRAIN,
    has_retry_info,
    put_train,
    reason_of,
    rpc_error_of,
    snapshot,
    violations_of,
    wire_code,
)

import tq_service as tq
from chaos.cluster import free_ports
from tq_service.errors import (
    AlreadyExistsError,
    CellNotFoundError,
    DataLossError,
    DeadlineError,
    FieldMismatchError,
    FieldNotFoundError,
    InvalidArgumentError,
    KeyNotFoundError,
    MissingLengthError,
    NotFoundError,
    PartitionClearedError,
    PartitionNotFoundError,
    PartitionSealedError,
    PreconditionError,
    QuotaExceededError,
    RankDisagreementError,
    SampleNotFoundError,
    SamplerError,
    SamplerTimeoutError,
    StaleEpochError,
    StaleIncarnationError,
    TaskNotFoundError,
    UnavailableError,
    UnsupportedObjectError,
)
from tq_service.testing import ServiceProcess
from tq_service.v1.controller_service_pb2 import PlacePutRequest
from tq_service.v1.storage_service_pb2 import StatRequest

CODE = grpc.StatusCode
RANK = {"dp_rank": 0, "dp_size": 2, "batch_index": 0}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A call that must be refused, and how.

    Attributes:
        call: gets the client and the samples of partition "train".
        says: parts of the message: what was got, what was expected, what to do.
        reason: of the error; empty: that of its class.
        violation: the argument that the error names.
    """

    name: str
    call: Callable[[AnyClient, tq.BatchMeta], object]
    error: type[tq.TqError]
    code: grpc.StatusCode
    says: tuple[str, ...]
    base: type[Exception] = Exception
    violation: str | None = None
    reason: str = ""
    prepare: Callable[[AnyClient, tq.BatchMeta], object] = field(default=lambda client, meta: None)


def get_meta(**changes: Any) -> Callable[[AnyClient, tq.BatchMeta], object]:
    arguments = {**TRAIN, "batch_size": 2, "max_wait": 5.0, **changes}
    return lambda client, meta: client.get_meta(**arguments)


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


def put(
    data: dict[str, Any], partition_id: str = "train", **arguments: Any
) -> Callable[[AnyClient, tq.BatchMeta], object]:
    return lambda client, meta: client.put(partition_id, data, **arguments)


def get(**arguments: Any) -> Callable[[AnyClient, tq.BatchMeta], object]:
    return lambda client, meta: client.get_data(meta, **arguments)


def remake_train(client: AnyClient, meta: tq.BatchMeta) -> None:
    client.clear_partition("train")
    put_train(client)


def consume_a_batch(client: AnyClient, meta: tq.BatchMeta) -> None:
    client.get_meta(**TRAIN, batch_size=1, **RANK)


def declare_tasks(client: AnyClient, meta: tq.BatchMeta) -> None:
    client.create_partition("declared", tasks=["update_actor", "reward"])
    client.put("declared", {"score": torch.zeros(2)})


def get_declared(task_name: str) -> Callable[[AnyClient, tq.BatchMeta], object]:
    return get_meta(partition_id="declared", task_name=task_name)


def declare_write_once(client: AnyClient, meta: tq.BatchMeta) -> None:
    client.create_partition("once", fields=[tq.FieldSpec("reward", write_once=True)])
    client.put("once", {"reward": torch.ones(2)}, keys=["a", "b"])


# A claim under the name of a task that there is not.
MISNAMED = tq.BatchMeta(
    partition_id="declared", indexes=np.zeros(1, np.int64), claim_id=bytes(16), task_name="rewards", lease_seconds=60.0
)


def not_found(name: str, call: Any, error: type[tq.TqError], *says: str, **more: Any) -> Row:
    return Row(name=name, call=call, error=error, code=CODE.NOT_FOUND, says=says, base=KeyError, **more)


def invalid(
    name: str,
    call: Any,
    violation: str,
    *says: str,
    error: type[tq.TqError] = InvalidArgumentError,
    **more: Any,
) -> Row:
    more |= {"base": ValueError, "violation": violation}
    return Row(name=name, call=call, error=error, code=CODE.INVALID_ARGUMENT, says=says, **more)


def refused(name: str, call: Any, error: type[tq.TqError], *says: str, **more: Any) -> Row:
    return Row(name=name, call=call, error=error, code=CODE.FAILED_PRECONDITION, says=says, base=RuntimeError, **more)


UNKNOWN_NAMES = [
    not_found("partition, describe", lambda c, m: c.describe_partition("trian"), PartitionNotFoundError,
              "'trian'", "'train'"),
    not_found("partition, seal", lambda c, m: c.seal_partition("trian"), PartitionNotFoundError, "'trian'"),
    not_found("partition, clear", lambda c, m: c.clear_partition("trian"), PartitionNotFoundError, "'train'"),
    not_found("partition, consumption", lambda c, m: c.check_consumption("trian", "t"), PartitionNotFoundError,
              "'train'"),
    not_found("partition, production", lambda c, m: c.check_production("trian", ["score"]), PartitionNotFoundError,
              "'train'"),
    not_found("partition, reset", lambda c, m: c.reset_consumption("trian", "t", 0), PartitionNotFoundError,
              "'train'"),
    not_found("partition, lookup", lambda c, m: c.lookup_samples("trian", ["k0"]), PartitionNotFoundError,
              "'train'"),
    not_found("partition, get", lambda c, m: c.get_data("trian", keys=["k0"]), PartitionNotFoundError,
              "'train'"),
    not_found("partition, groups", lambda c, m: c.close_groups("trian", ["g0"]), PartitionNotFoundError, "'train'"),
    not_found("partition, samples", lambda c, m: c.clear_samples("trian", keys=["k0"]),
              PartitionNotFoundError, "'train'"),
    not_found("partition, existing keys", put({"score": torch.zeros(1, 3)}, partition_id="trian", keys=["k0"],
                                              key_mode="existing"), PartitionNotFoundError, "'trian'", "'train'"),
    not_found("field, get", lambda c, m: c.get_data(m, data_fields=["input_id"]), FieldNotFoundError,
              "'input_id'", "'input_ids'"),
    not_found("field, production", lambda c, m: c.check_production("train", ["scores"]), FieldNotFoundError,
              "'scores'", "'score'"),
    not_found("field, clear", lambda c, m: c.clear_fields(m, data_fields=["scores"]), FieldNotFoundError,
              "'scores'", "'score'"),
    not_found("key, get", lambda c, m: c.get_data("train", keys=["k1", "k9"]), KeyNotFoundError,
              "'k9'", "'k3'", "skip_missing to omit missing keys (in Python: missing='skip')"),
    not_found("key, put", put({"score": torch.zeros(1, 3)}, keys=["k9"], key_mode="existing"), KeyNotFoundError,
              "'k9'", "'k3'", "key_mode upsert"),
    not_found("sample, get", lambda c, m: c.get_data("train", global_indexes=[1, 99]),
              SampleNotFoundError, "99", "4 of its 4"),
    not_found("cell", lambda c, m: c.get_data("train", keys=["k1", "k2"], data_fields=["reward"]),
              CellNotFoundError, "'reward'", "'k2'", "(in Python: missing='skip', missing_fields='skip')",
              prepare=lambda c, m: c.put(m.select_samples([1]), {"reward": torch.zeros(1)})),
    not_found("task, consumption", lambda c, m: c.check_consumption("train", "update_acto"), TaskNotFoundError,
              "'update_acto'", "'update_actor'", prepare=consume_a_batch),
    not_found("task, reset", lambda c, m: c.reset_consumption("train", "update_acto", 0), TaskNotFoundError,
              "'update_acto'", "'update_actor'", prepare=consume_a_batch),
    not_found("task, claim", get_declared("update_acto"), TaskNotFoundError, "'update_acto'", "'update_actor'",
              prepare=declare_tasks),
    not_found("task, claim that is released", lambda c, m: c.release(MISNAMED), TaskNotFoundError,
              "'rewards'", "'reward'", prepare=declare_tasks),
    not_found("task, consumption of one declared, though it may be missing",
              lambda c, m: c.check_consumption("declared", "update_acto", missing_ok=True), TaskNotFoundError,
              "'update_acto'", "'update_actor'", prepare=declare_tasks),
    not_found("task, reset of one declared", lambda c, m: c.reset_consumption("declared", "update_acto"),
              TaskNotFoundError, "'update_acto'", "'update_actor'", prepare=declare_tasks),
    not_found("task, acknowledgement", lambda c, m: c.ack(MISNAMED), TaskNotFoundError,
              "'rewards'", "'reward'", prepare=declare_tasks),
    not_found("group", lambda c, m: c.close_groups("train", ["g0", "g7"]), NotFoundError, "'g7'", "'g1'",
              reason="GROUP_NOT_FOUND"),
]  # fmt: skip

WRONG_CLAIMS = [
    invalid("batch_size 0", get_meta(batch_size=0), "batch_size", "batch_size is 0", "positive"),
    invalid("batch_size below 0", get_meta(batch_size=-4, **RANK), "batch_size", "batch_size is -4", "positive"),
    invalid("batch_size, groups", get_meta(batch_size=3, sampler="grpo_group_n",
            sampler_config={"n_samples_per_prompt": 2}, **RANK), "batch_size", "3", "multiple", "2"),
    invalid("batch_size, balanced", get_meta(batch_size=5, sampler="seqlen_balanced",
            sampler_config={"n_samples_per_prompt": 2}, **RANK), "batch_size", "5", "multiple", "2"),
    invalid("dp_rank too large", get_meta(dp_rank=2, dp_size=2, batch_index=0), "dp_rank", "dp_rank is 2", "0 to 1"),
    invalid("dp_rank below 0", get_meta(dp_rank=-1, dp_size=2, batch_index=0), "dp_rank", "dp_rank is -1", "0 to 1"),
    invalid("dp_size 0", get_meta(dp_rank=0, dp_size=0, batch_index=0), "dp_size", "dp_size is 0"),
    invalid("batch_index below 0", get_meta(dp_rank=0, dp_size=2, batch_index=-1), "batch_index", "-1", "from 0"),
    invalid("only dp_rank", get_meta(dp_rank=0), "dp_size", "dp_rank", "all three"),
    invalid("only dp_size", get_meta(dp_size=2), "dp_rank", "dp_size", "all three"),
    invalid("only batch_index", get_meta(batch_index=0), "dp_rank", "batch_index", "all three"),
    invalid("no dp_rank", get_meta(dp_size=2, batch_index=0), "dp_rank", "without dp_rank", "all three"),
    invalid("no dp_size", get_meta(dp_rank=0, batch_index=0), "dp_size", "without dp_size", "all three"),
    invalid("no batch_index", get_meta(dp_rank=0, dp_size=2), "batch_index", "without batch_index", "all three"),
    invalid("no data_fields", get_meta(data_fields=[]), "data_fields", "data_fields is empty", "at least one"),
    invalid("data_fields twice", get_meta(data_fields=["score", "score"]), "data_fields", "score", "once"),
    invalid("min_batch_size too large", get_meta(min_batch_size=3), "min_batch_size", "3", "2"),
    invalid("min_batch_size of a rank", get_meta(min_batch_size=1, **RANK), "min_batch_size", "queue workers"),
    invalid("micro_batch_size below 0", get_meta(micro_batch_size=-1), "micro_batch_size", "-1", "positive"),
    invalid("task_name empty", get_meta(task_name=""), "task_name", "''", "characters"),
    invalid("where, mixed", get_meta(where=[("version", "in", [1, "a"])]), "where", "'version'", "one type"),
    invalid("where, operator", get_meta(where=[("version", "=~", 1)]), "where[0]", "=~", ">="),
    invalid("max_wait below 0", get_meta(max_wait=-1.0), "max_wait", "-1", ">= 0"),
    invalid("sampler", get_meta(sampler="seqlen_balance"), "sampler", "'seqlen_balance'", "'seqlen_balanced'",
            reason="UNKNOWN_SAMPLER"),
    invalid("sampler option", get_meta(sampler="seqlen_balanced", sampler_config={"n_sample_per_prompt": 2}),
            "sampler_config", "'n_sample_per_prompt'", "'n_samples_per_prompt'", reason="UNKNOWN_SAMPLER"),
    invalid("sampler option's type", get_meta(sampler="grpo_group_n", sampler_config={"n_samples_per_prompt": "2"}),
            "sampler_config", '"2"', "a whole number"),
    invalid("sampler option missing", get_meta(sampler="grpo_group_n"), "sampler_config", "'n_samples_per_prompt'"),
]  # fmt: skip

WRONG_PUTS = [
    invalid("dtype", put({"score": torch.zeros(2, 3, dtype=torch.float64)}), "columns", "float32 dense [3]",
            "float64 dense [3]", "convert", error=FieldMismatchError),
    invalid("row shape", put({"score": torch.zeros(2, 4)}), "columns", "[3]", "[4]", "as auto or jagged",
            error=FieldMismatchError),
    invalid("number of dims", put({"score": torch.zeros(2)}), "columns", "[3]", "[]", error=FieldMismatchError),
    invalid("layout", put({"score": [torch.zeros(3), torch.zeros(2)]}), "columns", "dense", "jagged",
            "as auto or jagged", error=FieldMismatchError),
    invalid("layout, objects", put({"score": ["a", "b"]}), "columns", "dense", "object", error=FieldMismatchError),
    invalid("jagged dims", put({"input_ids": [torch.zeros(2, 2, dtype=torch.int64)]}), "columns", "[-1]", "[2, 2]",
            error=FieldMismatchError),
    invalid("dtype of a column", lambda c, m: c.put(m.chunk(2)[0], {"score": torch.zeros(2, 3).half()}),
            "columns", "float16", "float32", error=FieldMismatchError),
    invalid("rows of fields", put({"score": torch.zeros(2, 3), "reward": torch.zeros(3)}), "data", "2 rows", "3",
            "one row per sample"),
    invalid("rows of keys", put({"score": torch.zeros(2, 3)}, keys=["a"]), "keys", "1 values", "2 samples"),
    invalid("rows of groups", put({"score": torch.zeros(2, 3)}, groups=["a"] * 3), "groups", "3 values", "2 samples"),
    invalid("rows of metadata", put({"score": torch.zeros(2, 3)}, custom_meta=[{"version": 1}]), "custom_meta",
            "1 sample(s)", "2"),
    invalid("rows of existing samples", lambda c, m: c.put(m, {"score": torch.zeros(3, 3)}),
            "data", "metadata has 4 samples", "field 'score' has 3 rows"),
    invalid("keys twice", put({"score": torch.zeros(2, 3)}, keys=["a", "a"]), "keys", "'a'", "occurs twice"),
    invalid("empty key", put({"score": torch.zeros(2, 3)}, keys=["a", ""]), "keys", "empty"),
    invalid("empty put", put({"score": torch.zeros(0, 3)}), "data", "0 rows", "at least one"),
    invalid("no columns", put({}), "data", "no fields", "at least one"),
    invalid("nothing at all", lambda c, m: c.put("train"), "row_count", "0", "at least one"),
    invalid("insert too many", lambda c, m: c.insert("train", 2**24 + 1), "row_count", str(2**24 + 1), str(2**24)),
    invalid("insert none", lambda c, m: c.insert("train", 0), "row_count", "0", "at least one"),
    invalid("metadata that is no JSON", lambda c, m: c.set_custom_meta(m, [{"tag": {1}}] * 4), "custom_meta",
            "custom_meta[0]['tag'] has type set", "a JSON value", "in a field"),
    invalid("not a number in metadata", put({"score": torch.zeros(1, 3)}, custom_meta=[{"tag": [float("nan")]}]),
            "custom_meta", "[nan]", "finite numbers"),
    invalid("not a number beside text", lambda c, m: c.set_custom_meta(m, [{"uid": "a"}, *[{"uid": float("nan")}] * 3]),
            "custom_meta", "nan, in a column of string values"),
    invalid("metadata nested too deeply", lambda c, m: c.set_custom_meta(m, [{"tag": nested(33)}] * 4), "custom_meta",
            "more than 32 lists and objects", "as an object field"),
    invalid("metadata too large", put({"score": torch.zeros(1, 3)}, custom_meta=[{"tag": ["x" * 20_000]}]),
            "custom_meta", "20004 bytes", "at most 16384", "into an object field"),
    invalid("ack of no claim", lambda c, m: c.put(m, {"score": torch.ones(4, 3)}, ack=True), "metadata",
            "does not come from a single leased claim", "claim(lease=...)"),
    invalid("ack without metadata", put({"score": torch.ones(1, 3)}, ack=True), "metadata",
            "ack is True, but the put targets a partition", "expected samples of a leased claim", "omit ack"),
    invalid("ack that is not fenced", lambda c, m: c.put(
            replace(m, claim_id=bytes(16), task_name="t", lease_seconds=60.0), {"score": torch.ones(4, 3)}, ack=True,
            fenced=False), "fenced",
            "fenced is False and ack is True", "omit one of the two"),
    invalid("write_once that is no truth value", lambda c, m: c.create_partition("new", fields=[
            tq.FieldSpec("x", write_once=1)]), "write_once", "write_once is 1", "True or False"),
    invalid("group of another size", put({"score": torch.zeros(2, 3)}, groups=["g0", "g0"], group_size=4), "group_size",
            "'g0'"),
    Row(name="key known", call=put({"score": torch.zeros(2, 3)}, keys=["new", "k2"], key_mode="new"),
        error=AlreadyExistsError, code=CODE.ALREADY_EXISTS, says=("'k2'", "key_mode upsert"), base=ValueError),
    Row(name="key known, insert", call=lambda c, m: c.insert("train", keys=["k2"]), error=AlreadyExistsError,
        code=CODE.ALREADY_EXISTS, says=("'k2'",), base=ValueError),
    Row(name="partition with other settings", call=lambda c, m: c.create_partition("train", expected_samples=7),
        error=AlreadyExistsError, code=CODE.ALREADY_EXISTS, says=("'train'", "7"), base=ValueError),
    Row(name="second value", prepare=declare_write_once,
        call=put({"reward": torch.zeros(1), "other": torch.zeros(1)}, partition_id="once", keys=["a"]),
        error=AlreadyExistsError, code=CODE.ALREADY_EXISTS, base=ValueError,
        says=("'reward' is write-once", "sample 0", "'once' already has a value", "1 of 1", "clear the field")),
    Row(name="only pickle", call=put({"text": ["fine", object()]}), error=UnsupportedObjectError,
        code=CODE.INVALID_ARGUMENT, says=("text[1]", "object"), base=TypeError),
    Row(name="only pickle, deep", call=put({"text": [{"a": [{1, 2}, lambda: 0]}]}), error=UnsupportedObjectError,
        code=CODE.INVALID_ARGUMENT, says=("text[0]",), base=TypeError),
]  # fmt: skip

WRONG_READS = [
    invalid("slice, not fetched", get(data_fields=["score"], slices={"input_ids": (0, 1)}), "slices", "'input_ids'",
            "which is not fetched", "'score'"),
    invalid("slice, second dimension", get(slices={"input_ids": tq.RowSlice(layers=(0, 1))}), "slices", "'input_ids'",
            "int64 jagged [-1]", "slice only the first dimension"),
    invalid("slice, ranges of other rows", get(slices={"score": [(0, 1)] * 3}), "slices", "3 rows", "4 rows"),
    invalid("slice, no range", get(slices={"score": "0:2"}), "slices", "'0:2'", "(start, stop)"),
    invalid("padded, not fetched", get(data_fields=["score"], padded=["input_ids"]), "padded", "'input_ids'",
            "which is not fetched"),
    invalid("padded, too long", get(padded=True, length=4), "length", "row 0", "'input_ids'", "5 items", "length=4",
            "truncate=True", error=FieldMismatchError),
    invalid("pad_value", get(padded=True, pad_value=0.5), "pad_value", "0.5", "int64", "per field"),
    invalid("padded and jagged", get(padded=True, layout="jagged"), "layout", "'jagged'", "only one of them"),
]  # fmt: skip

STALE = [
    refused("sealed, put", put({"score": torch.zeros(1, 3)}), PartitionSealedError, "'train'", "4 samples",
            "1 new", "key_mode existing", "clear the partition", prepare=lambda c, m: c.seal_partition("train")),
    refused("sealed, insert", lambda c, m: c.insert("train", 3), PartitionSealedError, "3 new",
            prepare=lambda c, m: c.seal_partition("train")),
    refused("sealed, unknown key", put({"score": torch.zeros(2, 3)}, keys=["k0", "k9"]), PartitionSealedError,
            "1 new", prepare=lambda c, m: c.seal_partition("train")),
    refused("incarnation, get", lambda c, m: c.get_data(m), StaleIncarnationError, "'train'", "Discard",
            prepare=remake_train),
    refused("incarnation, put", lambda c, m: c.put(m, {"score": torch.ones(4, 3)}), StaleIncarnationError,
            "'train'", "Discard", prepare=remake_train),
    refused("incarnation, metadata", lambda c, m: c.set_custom_meta(m, [{"version": 9}] * 4), StaleIncarnationError,
            "'train'", prepare=remake_train),
    refused("incarnation, clear samples", lambda c, m: c.clear_samples(m), StaleIncarnationError, "'train'",
            prepare=remake_train),
    refused("incarnation, clear", lambda c, m: c.clear_partition("train", incarnation=m.incarnation),
            StaleIncarnationError, "'train'", prepare=remake_train),
    refused("incarnation, seal", lambda c, m: c.seal_partition("train", incarnation=m.incarnation),
            StaleIncarnationError, "'train'", prepare=remake_train),
    refused("incarnation, groups", lambda c, m: c.close_groups("train", ["g0"], incarnation=m.incarnation),
            StaleIncarnationError, "'train'", prepare=remake_train),
    refused("incarnation, claim", lambda c, m: c.get_meta(**TRAIN, batch_size=1, incarnation=m.incarnation),
            StaleIncarnationError, "'train'", prepare=remake_train),
    refused("incarnation, gone", lambda c, m: c.get_meta(**TRAIN, batch_size=1, incarnation=m.incarnation),
            StaleIncarnationError, "'train'", prepare=lambda c, m: c.clear_partition("train")),
    refused("epoch, claim", get_meta(epoch=5, **RANK), StaleEpochError, "5", "0", prepare=consume_a_batch),
    refused("epoch, queue", get_meta(epoch=1, task_name="reward"), StaleEpochError, "1", "0"),
    refused("epoch, reset", lambda c, m: c.reset_consumption("train", "update_actor", 4), StaleEpochError, "4", "0",
            prepare=consume_a_batch),
    refused("failed sample", lambda c, m: c.put(m.select_samples([1]), state="live"), PreconditionError,
            "sample 1", "cannot be undone", reason="SAMPLE_FAILED",
            prepare=lambda c, m: c.put(m.select_samples([1]), state="failed")),
]  # fmt: skip


def disagreeing(name: str, *says: str, **changes: Any) -> Row:
    call = get_meta(**{"batch_size": 1, "dp_rank": 1, "dp_size": 2, "batch_index": 0, **changes})
    return refused("ranks disagree, " + name, call, RankDisagreementError, *says, prepare=consume_a_batch)


DISAGREEING = [
    disagreeing("dp_size", "dp_size", "3", "2", dp_size=3),
    disagreeing("dp_size of a later batch", "dp_size", "1", "2", dp_rank=0, dp_size=1, batch_index=1),
    disagreeing("batch_size", "batch_size", "2", "1", batch_size=2),
    disagreeing("batch_unit", "batch_unit", "group", "sample", batch_unit="group"),
    disagreeing("micro_batch_size", "micro_batch_size", "1", micro_batch_size=1),
    disagreeing("sampler", "sampler", "rank_aware", "sequential", sampler="rank_aware"),
    disagreeing("where", "where", "version", where=[("version", ">=", 3)]),
    disagreeing("order_by", "order_by", "version", order_by=["version"]),
    disagreeing("data_fields", "data_fields", "score", "input_ids", data_fields=["score"]),
    disagreeing("drop_last", "drop_last", "true", "false", drop_last=True),
]

ROWS = [*UNKNOWN_NAMES, *WRONG_CLAIMS, *WRONG_PUTS, *WRONG_READS, *STALE, *DISAGREEING]


@pytest.fixture(params=["async", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("sync", "in a stream"))])
def refused_client(request: pytest.FixtureRequest, server: LiveServer) -> Iterator[AnyClient]:
    """A client of either kind, and one whose claims share a stream with one that waits, and gets its sample later."""
    if request.param != "in a stream":
        yield server.client(request.param)
        return
    client = server.client("async")
    claim = {**TRAIN, "partition_id": "later", "batch_size": 1, "max_wait": 60.0, "timeout": 70.0}
    waiting = []
    for count in (1, 2):  # the first goes alone, since it has no neighbour
        waiting.append(server.loop.start(client.real.get_meta(**claim)))
        while server.app.waiting.count < count:
            server.settle()
    assert server.app.calls.count == 3  # with the stream
    yield client
    client.put("later", {field: torch.ones(2) for field in TRAIN["data_fields"]})
    assert [each.result(20).status for each in waiting] == ["batch", "batch"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_refused_call_says_why_and_changes_nothing(row: Row, refused_client: AnyClient) -> None:
    client = refused_client
    meta = put_train(client)
    row.prepare(client, meta)
    before = snapshot(client)
    with pytest.raises(row.error) as caught:
        row.call(client, meta)
    error = caught.value
    assert type(error) is row.error
    assert error.reason == (row.reason or row.error.reason)
    assert isinstance(error, row.base)
    assert wire_code(error) == row.code
    call = rpc_error_of(error)
    if call is not None:
        assert reason_of(call) == error.reason
        assert error.metadata["method"].startswith("/tq_service.v1.")
        assert row.violation is None or violations_of(call) == [row.violation]
        assert set(violations_of(call)) <= names_in(DESCRIBED[error.metadata["method"]].input_type)
    if row.violation is not None:
        assert isinstance(error, InvalidArgumentError)
        assert error.field == row.violation
    for part in row.says:
        assert part in str(error)
    assert snapshot(client) == before
    assert client.health()


def test_errors_derive_from_the_built_in_that_fits() -> None:
    assert issubclass(InvalidArgumentError, ValueError)
    assert issubclass(NotFoundError, KeyError)
    assert issubclass(UnavailableError, ConnectionError)
    assert all(issubclass(kind, builtins.TimeoutError) for kind in (DeadlineError, SamplerTimeoutError))


def test_a_claim_of_a_partition_that_is_not_there_waits_for_it(client: AnyClient, server: LiveServer) -> None:
    assert client.get_meta(**TRAIN, batch_size=2, max_wait=0).status == "not_yet"
    assert client.list_partitions() == []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.get_meta, **TRAIN, batch_size=2, max_wait=30.0)
        put_train(server.client())
        assert waiting.result().global_indexes == [0, 1]


def test_sealed_partitions_take_columns_of_samples_they_have(client: AnyClient) -> None:
    meta = put_train(client)
    client.seal_partition("train")
    client.put(meta, {"reward": torch.ones(4)})
    client.put("train", {"value": torch.ones(1)}, keys=["k2"], key_mode="existing")
    client.put("train", {"value": torch.zeros(1)}, keys=["k3"])
    assert client.check_production("train", ["reward"]).complete
    assert client.get_data("train", keys=["k3", "k2"], data_fields=["value"])["value"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (tq.samplers.SeqlenBalancedSampler(length_field="x"), "length_field is 'x', which has scalars"),
        (tq.samplers.SeqlenBalancedSampler(), "data_fields is 'x', without a field of one-dimensional rows"),
    ],
    ids=["length_field", "data_fields"],
)
def test_fields_without_lengths_are_an_error(
    client: AnyClient, sampler: tq.samplers.SeqlenBalancedSampler, message: str
) -> None:
    client.put("bare", {"x": torch.zeros(4)})
    before = snapshot(client)
    asks: dict[str, Any] = {"partition_id": "bare", "task_name": "t", "data_fields": ["x"], "batch_size": 1, **RANK}
    asks["sampler"] = sampler
    with pytest.raises(MissingLengthError) as caught:
        client.get_meta(**asks)
    assert wire_code(caught.value) == CODE.INVALID_ARGUMENT
    assert message in str(caught.value)
    assert snapshot(client) == before


def test_lengths_that_no_sample_has_yet_are_waited_for(client: AnyClient) -> None:
    meta = client.put("late", {"x": torch.zeros(2)})
    client.seal_partition("late")
    asks: dict[str, Any] = {"partition_id": "late", "task_name": "t", "data_fields": ["x"], "batch_size": 1, **RANK}
    asks["sampler"] = tq.samplers.SeqlenBalancedSampler(length_key="total_lengths")
    waiting = client.get_meta(**asks, max_wait=0, explain=True)
    assert waiting.status == "not_yet"
    assert "2 have no length for the sampler in the custom_meta column 'total_lengths'" in waiting.reason
    client.set_custom_meta(meta, [{"total_lengths": 5}, {"total_lengths": 7}])
    assert client.get_meta(**asks).size == 1


def test_samples_without_their_length_are_not_ready(client: AnyClient) -> None:
    meta = client.put("some", {"x": torch.zeros(4)}, custom_meta=[{"total_lengths": 5}, {}, {}, {}])
    asks: dict[str, Any] = {"partition_id": "some", "task_name": "t", "data_fields": ["x"], "batch_size": 1, **RANK}
    asks |= {"sampler": "seqlen_balanced", "sampler_config": {"n_samples_per_prompt": 1}}
    assert client.get_meta(**asks, max_wait=0).status == "not_yet"
    client.set_custom_meta(meta.select_samples([2]), [{"total_lengths": 7}])
    both = [client.get_meta(**{**asks, "dp_rank": rank}).global_indexes for rank in range(2)]
    assert sorted(both) == [[0], [2]]


def test_a_jagged_field_stands_in_for_the_length(client: AnyClient) -> None:
    client.put("some", {"x": [torch.zeros(3), torch.zeros(9)]})
    asks: dict[str, Any] = {"partition_id": "some", "task_name": "t", "data_fields": ["x"], "batch_size": 1, **RANK}
    config = {"n_samples_per_prompt": 1, "length_field": "x"}
    assert client.get_meta(**asks, sampler="seqlen_balanced", sampler_config=config).size == 1


def test_calls_that_wait_end_when_their_partition_is_cleared(client: AnyClient, server: LiveServer) -> None:
    put_train(client)
    other = server.client()
    with ThreadPoolExecutor(2) as pool:
        rank = pool.submit(client.get_meta, **TRAIN, batch_size=4, **RANK, max_wait=30.0)
        queue = pool.submit(client.get_meta, **{**TRAIN, "task_name": "reward"}, batch_size=9, max_wait=30.0)
        wait_until_waiting(other, "train", 2)
        other.clear_partition("train")
        for waiting in (rank, queue):
            error = waiting.exception(20)
            assert isinstance(error, PartitionClearedError)
            assert wire_code(error) == CODE.FAILED_PRECONDITION
            assert reason_of(rpc_error_of(error)) == "PARTITION_CLEARED"
            assert "'train'" in str(error)
            assert "Repeat the call" in str(error)


def test_a_put_larger_than_the_quota_is_refused_at_once(start_server: StartServer, client_kind: ClientKind) -> None:
    client = start_server(max_bytes=100_000).client(client_kind)
    before = snapshot(client)
    with pytest.raises(QuotaExceededError) as caught:
        client.put("p", {"x": torch.zeros(200_000, dtype=torch.uint8)}, timeout=60.0)
    assert wire_code(caught.value) == CODE.RESOURCE_EXHAUSTED
    assert caught.value.retry_after_seconds is None
    assert not has_retry_info(rpc_error_of(caught.value))
    assert "200000 bytes" in str(caught.value)
    assert "max_bytes" in str(caught.value)
    assert snapshot(client) == before


def test_a_put_that_finds_no_capacity_waits_then_is_refused(start_server: StartServer, client_kind: ClientKind) -> None:
    client = start_server(max_bytes=100_000).client(client_kind)
    meta = client.put("full", {"x": torch.zeros(80_000, dtype=torch.uint8)})
    before = snapshot(client)
    with pytest.raises(QuotaExceededError) as caught:
        client.put("full", {"x": torch.zeros(40_000, dtype=torch.uint8)}, timeout=1.0)
    assert wire_code(caught.value) == CODE.RESOURCE_EXHAUSTED
    assert caught.value.retry_after_seconds is not None
    assert has_retry_info(rpc_error_of(caught.value))
    assert "40000 bytes" in str(caught.value)
    assert "Clear" in str(caught.value)
    assert snapshot(client) == before
    assert client.get_data(meta.select_samples([0]))["x"].tolist() == [0]


def test_a_large_put_that_finds_no_capacity_is_refused_as_a_small_one(
    client_kind: ClientKind, loop_thread: LoopThread
) -> None:
    """Its frames do not fit into what the network takes unread, in a process of its own."""
    with ServiceProcess("--max-bytes", "24MiB") as server:
        client = AnyClient(client_kind, server.address, loop_thread)
        half = torch.zeros(1, 15 << 20, dtype=torch.uint8)
        client.put("full", {"x": half})
        before = snapshot(client)
        for _ in range(3):
            with pytest.raises(QuotaExceededError):
                client.put("full", {"x": half}, timeout=1.0)
        assert snapshot(client) == before
        client.close()


@pytest.mark.parametrize("size", [40_000, 4_000_000])
def test_a_put_that_waits_for_capacity_goes_on_when_there_is_some(
    start_server: StartServer, client_kind: ClientKind, size: int
) -> None:
    server = start_server(max_bytes=5 * size // 2)
    client, other = server.client(client_kind), server.client()
    client.put("full", {"x": torch.zeros(2 * size, dtype=torch.uint8)})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.put, "next", {"x": torch.ones(size, dtype=torch.uint8)})
        server.settle()
        other.clear_partition("full")
        assert client.get_data(waiting.result(20).select_samples([7]))["x"].tolist() == [1]
    assert other.storage_stat().used_bytes == size


def test_columns_of_existing_rows_may_use_the_reserve(start_server: StartServer, client_kind: ClientKind) -> None:
    client = start_server(max_bytes=100_000).client(client_kind)
    meta = client.put("full", {"x": torch.zeros(8, 11_000, dtype=torch.uint8)})
    client.put(meta, {"reward": torch.zeros(8, 250)})
    with pytest.raises(QuotaExceededError):
        client.put("full", {"x": torch.zeros(1, 11_000, dtype=torch.uint8)}, timeout=1.0)


def test_bytes_lost_with_a_storage_service_are_named(start_server: StartServer, client_kind: ClientKind) -> None:
    controller = start_server(role="controller")
    first = start_server(role="storage", controller=controller.address, storage_id="only")
    client = controller.client(client_kind)
    lost = put_train(client)
    old = first.storage.Stat(StatRequest()).storage
    first.stop()
    start_server(role="storage", controller=controller.address, storage_id="only")
    wait_for_storage(controller, old.boot_id)
    with pytest.raises(DataLossError) as caught:
        client.get_data(lost.select_samples([1, 3]))
    assert wire_code(caught.value) == CODE.DATA_LOSS
    assert "samples 1 (k1), 3 (k3)" in str(caught.value)
    assert str(caught.value).endswith("Put the data again, or clear the cells")
    again = client.put(lost, {"input_ids": [torch.arange(2)] * 4, "score": torch.ones(4, 3)})
    assert client.get_data(again)["score"].tolist() == torch.ones(4, 3).tolist()


FAULTS = [
    ("Raises", SamplerError, CODE.INTERNAL),
    ("ReturnsForeignRows", SamplerError, CODE.INTERNAL),
    ("ReturnsNonsense", SamplerError, CODE.INTERNAL),
    ("Hangs", SamplerTimeoutError, CODE.DEADLINE_EXCEEDED),
    ("HangsAwaiting", SamplerTimeoutError, CODE.DEADLINE_EXCEEDED),
]


@pytest.mark.parametrize("ranked", [True, False], ids=["ranked", "queue"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[0])
def test_a_faulty_sampler_harms_its_own_request_only(
    start_server: StartServer, client_kind: ClientKind, fault: tuple[str, Any, grpc.StatusCode], ranked: bool
) -> None:
    name, kind, code = fault
    rpc_faulty_samplers.let_go.clear()
    server = start_server(sampler_timeout_seconds=0.2)
    client = server.client(client_kind)
    put_train(client)
    before = snapshot(client)
    rank = RANK if ranked else {}
    with pytest.raises(kind) as caught:
        client.get_meta(**TRAIN, batch_size=1, sampler=f"rpc_faulty_samplers:{name}", **rank)
    rpc_faulty_samplers.let_go.set()
    assert type(caught.value) is kind
    assert wire_code(caught.value) == code
    assert name in str(caught.value)
    assert snapshot(client) == before
    assert client.get_meta(**TRAIN, batch_size=1, **rank).size == 1


def test_a_server_that_is_down_is_tried_until_the_deadline(server: LiveServer, client_kind: ClientKind) -> None:
    client = server.client(client_kind, timeout=0.6)
    server.stop()
    with pytest.raises(UnavailableError) as caught:
        client.list_partitions()
    assert isinstance(caught.value, ConnectionError)
    assert wire_code(caught.value) == CODE.UNAVAILABLE
    assert server.address in str(caught.value)
    with pytest.raises(UnavailableError):
        client.put("p", {"x": torch.zeros(2)}, timeout=0.3)
    with pytest.raises(UnavailableError):
        client.get_meta(**TRAIN, batch_size=1, max_wait=0.1, timeout=0.2)


def test_a_server_that_comes_back_is_found(start_server: StartServer, client_kind: ClientKind) -> None:
    (port,) = free_ports(1)  # the system gives it to nobody meanwhile
    first = start_server(port=port)
    client = first.client(client_kind)
    client.put("p", {"x": torch.zeros(2)})
    first.stop()
    started = threading.Event()
    with ThreadPoolExecutor(1) as pool:

        def ask() -> Any:
            started.set()
            return client.list_partitions()

        waiting = pool.submit(ask)
        assert started.wait(10)
        start_server(port=port)
        assert waiting.result(30) == []


def wait_until_waiting(client: AnyClient, partition_id: str, count: int) -> None:
    """Wait until so many calls wait on a partition."""
    while sum(task.waiting_count for task in client.describe_partition(partition_id).tasks) < count:
        pass


def wait_for_storage(controller: LiveServer, old_boot_id: bytes) -> None:
    """Wait until the new life of the storage service has announced itself."""
    while (
        controller.controller.PlacePut(PlacePutRequest(partition_id="p", size_bytes=1)).storages[0].boot_id
        == old_boot_id
    ):
        pass
