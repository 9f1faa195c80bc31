"""A custom sampler: the samples of the newest weights first.

The service imports a sampler by its name `module:Class`, so the service must be able to import the module:

    PYTHONPATH=examples tq-service serve
    python examples/custom_sampler.py

An installed package registers its samplers under plain names instead, through the entry point group
`tq_service.samplers`. Unless a setting allows more, a service that other machines can reach accepts only such
registered samplers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tq_service.samplers import Plan, PlanRequest, Sampler, View

PARTITION = "custom_sampler"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestFirst(Sampler):
    """Takes the ready samples with the highest `version`, and skips those that are too old.

    The options of a sampler are the fields of its dataclass; `sampler_config` sets their values.

    Attributes:
        oldest: the lowest version that may be used.
    """

    name: ClassVar[str] = "newest_first"

    oldest: int = 0

    def plan(self, view: View, request: PlanRequest) -> Plan | None:
        """Return the newest samples, distributed round-robin over the ranks; None if too few are ready."""
        rows = view.ready()
        versions, known = view.values("version", rows)
        usable = known & (versions >= self.oldest)
        rows, versions = rows[usable], versions[usable]
        if rows.size < request.min_size:
            return None
        newest_first = rows[np.argsort(-versions, kind="stable")][: request.total_size]
        return Plan.of([newest_first[rank :: request.rank_count] for rank in range(request.rank_count)])


def main() -> None:
    """Put samples of four versions and print the sampler's order of delivery."""
    import torch

    import tq_service as tq

    with tq.Client() as client:
        versions = [0, 1, 2, 3] * 2
        client.put(
            PARTITION,
            {"value": torch.arange(8)},
            custom_meta=[{"version": version} for version in versions],
        )
        for batch_index in range(3):
            meta = client.claim(
                partition_id=PARTITION,
                task_name="update_actor",
                data_fields=["value"],
                batch_size=2,
                sampler="custom_sampler:NewestFirst",
                sampler_config={"oldest": 1},
                dp_rank=0,
                dp_size=1,
                batch_index=batch_index,
                max_wait=10.0,
            )
            print(f"batch {batch_index}: versions {[row['version'] for row in meta.custom_meta]}")
        client.clear_partition(PARTITION)


if __name__ == "__main__":
    main()
