"""A trainer resumes from its checkpoint: batches that are not in its weights are delivered again."""

import tq_service as tq
from tq_service.data import StreamingDataLoader, StreamingDataset
from tq_service.testing import ServiceProcess

with ServiceProcess() as service, tq.Client(service.address) as client:
    client.put("train", {"x": list(range(8))})
    client.seal_partition("train")
    loader = StreamingDataLoader(
        StreamingDataset(service.address, partition_id="train", task_name="actor", data_fields=["x"], batch_size=2)
    )
    trained: list[int] = []
    for _, meta in loader:
        trained += meta.global_indexes
        if len(trained) == 4:
            # Job: save the position of the loader with the weights.
            state = loader.state_dict()

    # Job: after a crash, continue there, in a loader of the new process.
    loader.load_state_dict(state)

    trained = trained[:4] + [index for _, meta in loader for index in meta.global_indexes]
    print(f"trained {trained}")
