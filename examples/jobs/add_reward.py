"""Add a field to stored samples. From then on, tasks that request the field get the samples."""

import tq_service as tq
from tq_service.testing import ServiceProcess

with ServiceProcess() as service, tq.Client(service.address) as client:
    meta = client.put("train", {"response": ["4", "5"]})

    # Job: add rewards to the samples of a batch.
    client.put(meta, {"reward": [1.0, 0.0]})

    found = client.check_production("train", ["response", "reward"])
    print(f"{found.produced_count} of {found.total_count} samples have a response and a reward")
