"""A program of a user that knows neither torch nor tensordict, which mypy checks with and without them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import tq_service as tq


def rewards(client: tq.Client, meta: tq.BatchMeta) -> NDArray[np.float64]:
    found: NDArray[np.float64] = client.get_data(meta, data_fields=["reward"])["reward"]
    return found


def score(client: tq.Client) -> int:
    count = 0
    for item in client.work("train", "reward", ["response"]):
        texts: list[str] = item.data["response"]
        item.put({"reward": np.array([len(text) for text in texts])})
        count += item.meta.size
    return count


def batch_of(client: tq.Client, index: int) -> list[str]:
    data, meta = client.get_batch("train", "eval", ["response"], batch_size=8, dp_rank=0, dp_size=1, batch_index=index)
    return (
        [] if data is None else [f"{sample}: {text}" for sample, text in zip(meta.keys, data["response"], strict=True)]
    )
