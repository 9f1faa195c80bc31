"""Samples have keys and tags, as in a key-value store. Nothing is claimed or consumed."""

import tq_service as tq
from tq_service.testing import ServiceProcess

with ServiceProcess() as service, tq.Client(service.address) as client:
    # Job: put, get and list by key.
    client.put("answers", {"text": ["4", "5"]}, keys=["a", "b"], custom_meta=[{"score": 1}, {"score": 0}])
    texts = client.get_data("answers", keys=["b", "a"])["text"]
    tags = client.tags("answers")

    print(f"{list(texts)}, tags {tags}")
