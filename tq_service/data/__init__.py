"""Data loading for the ranks of a torch trainer: `StreamingDataset` and `StreamingDataLoader`."""

try:
    from tq_service.data.columns import split_micro_batches, take_rows
    from tq_service.data.dataset import StreamingDataLoader, StreamingDataset
    from tq_service.data.packs import (
        PackedMicroBatch,
        PackedSequences,
        PackOptions,
        pack_sequences,
        split_packs,
        unpack_sequences,
    )
    from tq_service.data.source import fetch_batch
except ModuleNotFoundError as error:
    package = (error.name or "").partition(".")[0]
    if package not in {"torch", "tensordict"}:
        raise
    raise ModuleNotFoundError(
        f"tq_service.data needs {package}, which is not installed; install the build of torch that you need, then "
        "tq-service[data]",
        name=package,
    ) from None

__all__ = [
    "PackOptions",
    "PackedMicroBatch",
    "PackedSequences",
    "StreamingDataLoader",
    "StreamingDataset",
    "fetch_batch",
    "pack_sequences",
    "split_micro_batches",
    "split_packs",
    "take_rows",
    "unpack_sequences",
]
