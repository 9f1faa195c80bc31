"""Adapter for NeMo-RL: a `DataPlaneClient` that uses the service and can be selected in NeMo-RL's configuration.

`docs/integrations/nemo_rl.md` describes the settings, and contains a patch that lets NeMo-RL's factory select a class
by name.
"""

from __future__ import annotations

import json
import secrets
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from nemo_rl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from tensordict import TensorDict

import tq_service as tq
from tq_service.client.batch_meta import BatchMeta
from tq_service.custom_meta import keeping_nulls
from tq_service.schema import Encoding, Layout

_LENGTH_TAG: Final = "input_lengths"  # tag whose values NeMo-RL uses to balance its ranks
_LEAST_WAIT_SECONDS: Final = 0.05
_MARKER: Final = "tq_service.json"
_REMEMBERED_IDS: Final = 65_536  # above this number, ids of samples cleared by other processes are dropped


class TqServiceDataPlaneClient(DataPlaneClient):  # type: ignore[misc]  # NeMo-RL is not installed for type checks
    """The data plane client of a process.

    ::

        register_partition ──> create_partition: with its tasks, and the fields of `enums` as text
        put_samples        ──> put: sample_ids are keys, tags are custom_meta
        claim_meta         ──> claim as a queue worker: waits at the service, without polling
        get_samples        ──> get_data: rows of equal shape become dense tensors, other rows jagged tensors
        list_sample_ids    ──> lookup_samples
        clear_samples      ──> clear_samples: the named samples, or all samples put by this process

    Args:
        cfg: the `data_plane` section of NeMo-RL's configuration. `controller_address` is the service's address,
            "host:port", and defaults to `TQ_ADDRESS`. `namespace` isolates runs that share a service, and defaults to
            `TQ_NAMESPACE`. Size settings for TransferQueue's backends are ignored.
        bootstrap: whether this process is the driver. The driver immediately checks that the service is reachable.

    Raises:
        UnavailableError: `bootstrap` is set, and the service does not respond.
    """

    def __init__(self, cfg: Mapping[str, Any], *, bootstrap: bool = True) -> None:
        self._start(tq.Client(cfg.get("controller_address"), namespace=cfg.get("namespace")))
        if bootstrap:
            self._client.list_partitions()

    def _start(self, client: tq.Client) -> None:
        self._client = client
        self._is_clean = True
        # Ids of samples put by this process, by partition. `clear_samples(None)` clears these samples.
        self._put_ids: dict[str, dict[str, None]] = {}
        self._remembered_ids = _REMEMBERED_IDS

    def __getstate__(self) -> tq.Client:
        return self._client

    def __setstate__(self, client: tq.Client) -> None:
        self._start(client)  # the client was unpickled in a new process, which has not put any samples yet

    @property
    def _used_client(self) -> tq.Client:
        """The client, for use in calls after which `load_checkpoint` is no longer allowed."""
        self._is_clean = False
        return self._client

    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
    ) -> None:
        """Create a partition that only the given tasks can consume.

        If the partition exists with different settings but is empty, it is cleared and created again. Later steps can
        therefore reuse the name with new settings.

        Args:
            partition_id: name of the partition.
            fields: ignored, because a partition accepts any field.
            num_samples: ignored, because a partition grows as needed.
            consumer_tasks: names of the tasks that may consume the partition.
            grpo_group_size: ignored, because NeMo-RL balances groups in its driver.
            enums: text fields with few distinct values, by name. Their values are stored as text, and values of other
                types are rejected.

        Raises:
            AlreadyExistsError: the partition contains samples and was created with different tasks or enums.
        """
        del fields, num_samples, grpo_group_size
        settings: dict[str, Any] = {
            "tasks": consumer_tasks,
            "fields": [tq.FieldSpec(name, layout=Layout.OBJECT, encoding=Encoding.TEXT) for name in enums or {}],
        }
        try:
            self._used_client.create_partition(partition_id, **settings)
        except tq.errors.AlreadyExistsError:
            samples, _ = self._used_client.lookup_samples(partition_id, missing_ok=True)
            if samples.size:
                raise
            self._used_client.clear_partition(partition_id, missing_ok=True)
            self._used_client.create_partition(partition_id, **settings)

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta:
        """Claim samples for a task. No other claim of the task receives these samples.

        Args:
            partition_id: the partition.
            task_name: the task that consumes the samples.
            required_fields: fields that a sample must have before it can be claimed.
            batch_size: maximum number of samples in the batch.
            dp_rank: ignored, because NeMo-RL shards the batch itself.
            blocking: whether to wait for a full batch. If False, claim the samples that are ready, possibly none.
            timeout_s: seconds to wait for a full batch. If the batch is still not full after this time, the samples
                that are ready are claimed.

        Raises:
            TimeoutError: no sample became ready in time.
        """
        del dp_rank
        claim: dict[str, Any] = {
            "partition_id": partition_id,
            "task_name": task_name,
            "data_fields": required_fields,
            "batch_size": batch_size,
        }
        deadline = time.monotonic() + timeout_s
        meta: BatchMeta | None = None
        while blocking and (meta is None or meta.status == "not_yet") and (left := deadline - time.monotonic()) > 0:
            meta = self._used_client.get_meta(**claim, max_wait=left)
        if meta is None or meta.status != "batch":
            meta = self._used_client.get_meta(**claim, min_batch_size=1, max_wait=_LEAST_WAIT_SECONDS)
        if meta.status == "batch":
            return _batch_of(meta, task_name, required_fields)
        if blocking:
            raise TimeoutError(
                f"claim_meta: no sample of partition {partition_id!r} with the fields {required_fields} became ready "
                f"for task {task_name!r} within {timeout_s:g} s; batch_size is {batch_size}"
            )
        return KVBatchMeta(
            partition_id=partition_id, task_name=task_name, sample_ids=[], fields=list(required_fields), tags=[]
        )

    def get_data(self, meta: KVBatchMeta, select_fields: list[str] | None = None) -> TensorDict:
        """Return the data of a batch. Without `select_fields`, return the fields in `meta.fields`.

        Raises:
            ValueError: neither `select_fields` nor `meta.fields` contains field names.
        """
        fields = meta.fields if select_fields is None else select_fields
        if fields is None:
            raise ValueError("get_data: select_fields and meta.fields are both None; list the fields in one of them")
        return self.get_samples(meta.sample_ids, meta.partition_id, list(fields))

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        """Return whether every task has consumed or skipped all samples inserted into the partition so far."""
        statuses = [self._used_client.check_consumption(partition_id, name, missing_ok=True) for name in task_names]
        return all(status.consumed_count + status.skipped_count >= status.total_count for status in statuses)

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
    ) -> KVBatchMeta:
        """Put fields and tags of new or existing samples atomically.

        Returns:
            References to the samples, including their tags and the names of the fields that were put.
        """
        if sample_ids and (fields is not None or tags is not None):
            data = None if fields is None else fields.detach()
            kept = None if tags is None else keeping_nulls(tags)
            self._used_client.put(partition_id, data, keys=sample_ids, custom_meta=kept)
            self._remember(partition_id, sample_ids)
        return KVBatchMeta(
            partition_id=partition_id,
            task_name=None,
            sample_ids=list(sample_ids),
            fields=None if fields is None else [str(name) for name in fields.keys()],  # noqa: SIM118  (not a dict)
            tags=None if tags is None else [dict(tag) for tag in tags],
        )

    def _remember(self, partition_id: str, sample_ids: Sequence[str]) -> None:
        """Record the ids of samples put by this process.

        If there are many ids, drop ids of samples that other processes have cleared.
        """
        put_ids = self._put_ids.setdefault(partition_id, {})
        put_ids.update(dict.fromkeys(sample_ids))
        if len(put_ids) > self._remembered_ids:
            left = set(self.list_sample_ids(partition_id))
            self._put_ids[partition_id] = {name: None for name in put_ids if name in left}
            self._remembered_ids = max(_REMEMBERED_IDS, 2 * len(self._put_ids[partition_id]))

    def get_samples(self, sample_ids: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        """Return the selected fields of samples, in the order of `sample_ids`.

        Rows of equal shape form a dense tensor; other rows form a nested tensor.
        """
        if not sample_ids:
            return TensorDict({}, batch_size=(0,))
        data: TensorDict = self._used_client.get_data(
            partition_id, keys=sample_ids, data_fields=select_fields, layout="auto"
        )
        return data

    def list_sample_ids(self, partition_id: str) -> list[str]:
        """Return the sorted ids of the samples in a partition, or an empty list if the partition does not exist."""
        samples, _ = self._used_client.lookup_samples(partition_id, missing_ok=True)
        return sorted(key for key in samples.keys or () if key)

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        """Remove samples. Samples that do not exist are ignored.

        Args:
            sample_ids: the samples to remove. If None, the samples put by this process are removed. If this process has
                not put any samples, all samples in the partition are removed.
            partition_id: the partition.
        """
        put_ids = self._put_ids.get(partition_id, {})
        if sample_ids is None:
            named = list(put_ids) or self.list_sample_ids(partition_id)
            if not named:
                warnings.warn(
                    f"clear_samples(None, {partition_id!r}) found nothing to clear: this process has put no samples "
                    "into the partition, and the partition is empty. If another process has cleared the samples, pass "
                    "their sample_ids",
                    RuntimeWarning,
                    stacklevel=2,
                )
        else:
            named = list(sample_ids)
        if named:
            self._used_client.clear_samples(partition_id, keys=named, missing_ok=True)
        for name in named:
            put_ids.pop(name, None)

    def save_checkpoint(self, checkpoint_dir: str | Path, *, metadata: dict[str, Any] | None = None) -> None:
        """Write a checkpoint of the service, and record the checkpoint's name in `checkpoint_dir`.

        The checkpoint is named after the directory. The service, which must be started with `--checkpoint-dir`, writes
        the samples to its own checkpoint directory. Only a marker file is written to `checkpoint_dir`.
        """
        directory = Path(checkpoint_dir)
        copy = self._client.checkpoint(f"{directory.name}-{secrets.token_hex(8)}", metadata=metadata or {})
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _MARKER).write_text(json.dumps({"checkpoint": copy.name}))

    def load_checkpoint(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Replace the service's contents with the checkpoint recorded in a directory, and return the metadata.

        Raises:
            FileNotFoundError: `save_checkpoint` did not write to this directory.
            RuntimeError: this client has already been used to register, put, claim, read or clear.
        """
        if not self._is_clean:
            raise RuntimeError(
                f"load_checkpoint({str(checkpoint_dir)!r}) needs an unused data-plane client, but this one has already "
                "registered, put, claimed, read or cleared; load the checkpoint first"
            )
        marker = json.loads((Path(checkpoint_dir) / _MARKER).read_text())
        restored = self._client.restore(marker["checkpoint"], replace=True)
        return dict(restored.metadata or {})

    def close(self) -> None:
        """Close the client. The contents of the service are not affected. Closing the client again has no effect."""
        self._client.close()


def _batch_of(meta: BatchMeta, task_name: str, fields: Sequence[str]) -> KVBatchMeta:
    tags = [dict(tag) for tag in meta.custom_meta]
    lengths = [int(tag.get(_LENGTH_TAG) or 0) for tag in tags] if any(_LENGTH_TAG in tag for tag in tags) else None
    return KVBatchMeta(
        partition_id=meta.partition_id,
        task_name=task_name,
        sample_ids=[key or "" for key in meta.keys or ()],
        fields=list(fields),
        sequence_lengths=lengths,
        tags=tags,
    )
