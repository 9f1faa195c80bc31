"""A reward worker scores samples as they arrive. Workers of a task share its samples, and each is scored once."""

import tq_service as tq
from tq_service.testing import ServiceProcess

with ServiceProcess() as service, tq.Client(service.address) as client:
    client.put("train", {"response": ["4", "5", "four"]})
    client.seal_partition("train")  # no more samples: workers reach the end

    # Job: score samples under a lease. If this worker dies, another one gets them.
    for item in client.work("train", "reward", ["response"]):
        item.put({"reward": [float(response == "4") for response in item.data["response"]]})

    scored = client.get_data("train", global_indexes=range(3), data_fields=["reward"])
    print(f"rewards {scored['reward'].tolist()}")
