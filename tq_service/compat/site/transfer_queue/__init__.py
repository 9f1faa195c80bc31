"""TransferQueue's API, implemented by tq_service. A tq_service server replaces TransferQueue's Ray actors.

Put this package first on PYTHONPATH, in the driver and in every worker; see docs/integrations/transferqueue.md.
"""

from transfer_queue.client import AsyncTransferQueueClient, TransferQueueClient
from transfer_queue.dataloader import StreamingDataLoader, StreamingDataset
from transfer_queue.interface import (
    async_kv_batch_get,
    async_kv_batch_get_by_meta,
    async_kv_batch_put,
    async_kv_clear,
    async_kv_list,
    async_kv_put,
    get_metrics_endpoint,
    kv_batch_get,
    kv_batch_get_by_meta,
    kv_batch_put,
    kv_clear,
    kv_list,
    kv_put,
    load_checkpoint,
    save_checkpoint,
)
from transfer_queue.metadata import BatchMeta, KVBatchMeta
from transfer_queue.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)
from transfer_queue.session import close, get_client, init
from transfer_queue.storage import StorageKeyNotFoundError

__version__ = "0.1.11"
"""Version of the TransferQueue API that this package implements. Callers compare it with the version they require."""

__all__ = [
    "AsyncTransferQueueClient",
    "BaseSampler",
    "BatchMeta",
    "GRPOGroupNSampler",
    "KVBatchMeta",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "StorageKeyNotFoundError",
    "StreamingDataLoader",
    "StreamingDataset",
    "TransferQueueClient",
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_put",
    "close",
    "get_client",
    "get_metrics_endpoint",
    "init",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_put",
    "load_checkpoint",
    "save_checkpoint",
]
