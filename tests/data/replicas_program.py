"""One of four processes, two DP ranks of two replicas each: prints what it was given, as JSON.

python replicas_program.py ADDRESS PARTITION RANK STORE_FILE
"""

import json
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from service_rows import dataset_of, taken
from stand_in_device import standing_in
from torch.distributed.device_mesh import init_device_mesh

import tq_service as tq
from tq_service.data import StreamingDataLoader, fetch_batch, replicas
from tq_service.data import on_device as to_device

claims: list[int] = []


def counted_fetch(*, batch_index: int, **keywords: Any) -> Any:
    claims.append(batch_index)
    return fetch_batch(batch_index=batch_index, **keywords)


def failing_fetch(**_: Any) -> Any:
    raise tq.errors.UnavailableError("the service is away for good")


def refused(**changes: Any) -> str:
    try:
        dataset_of(address, partition, **changes)
    except tq.errors.InvalidArgumentError as error:
        return str(error)
    raise AssertionError("was taken")


def indexes(items: Any) -> list[list[int]]:
    items = list(items)
    taken(items)
    return [meta.global_indexes for _, meta in items]


def loader_of(**changes: Any) -> StreamingDataLoader:
    options: dict[str, Any] = {"dp_group": mesh["dp"], "replica_group": mesh["tp"], "sampler": "seqlen_balanced"}
    return StreamingDataLoader(dataset_of(address, partition, **{**options, **changes}))


address, partition, rank, store = sys.argv[1:]
replicas._SIGN_OF_WAITING_SECONDS = 0.05  # so that the others hear often that there is nothing yet
dist.init_process_group("gloo", f"file://{store}", rank=int(rank), world_size=4, timeout=timedelta(seconds=60))
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

whole = loader_of(fetch_batch_fn=counted_fetch)
given = indexes(whole)
claimed = len(claims)
whole.reset()
again = indexes(whole)

begun = loader_of()
iterator = iter(begun)
before = indexes([next(iterator) for _ in range(2)])
state = begun.state_dict()
begun.close()
resumed = loader_of()
resumed.load_state_dict(state)
after = indexes(resumed)

try:
    next(iter(loader_of(fetch_batch_fn=failing_fetch)))
    failed = ""
except tq.errors.UnavailableError as error:
    failed = f"{error}; noted {len(error.__notes__) if hasattr(error, '__notes__') else 0}"

uploads: list[int] = []
with pytest.MonkeyPatch.context() as patch, standing_in(patch) as stand_in:
    stand_in.is_eager = True
    upload = to_device.upload
    patch.setattr(to_device, "upload", lambda arrays, where: uploads.append(len(arrays)) or upload(arrays, where))
    there = StreamingDataLoader(loader_of().dataset, device="cuda:0")
    items = list(there)
    assert all(stand_in.has(data["index"]) and stand_in.has(data["scores"]) for data, _ in items)
    on_device = indexes(items)

alone = loader_of(replica_group=None, dp_group=mesh["dp"].get_group())
print(
    json.dumps(
        {
            "given": given,
            "claimed": claimed,
            "on_device": on_device,
            "uploads": len(uploads),
            "again": again,
            "resumed": before + after,
            "state": state,
            "failed": failed,
            "alone": indexes(alone),
            "flattened": replicas.rank_and_size(mesh),
            "refused": [refused(dp_group=mesh["dp"], dp_rank=1), refused(dp_group=mesh["dp"], replica_group=mesh)],
            "by_default": [
                (each.source.request.dp_rank, each.source.request.dp_size)
                for each in (dataset_of(address, partition), dataset_of(address, partition, dp_size=2))
            ],
            "unclear": [refused(replica_group=mesh["tp"]), refused(cp_size=2, cp_fields=["index"])],
        }
    )
)
dist.barrier()
dist.destroy_process_group()
