"""Runs: begun, joined, left and ended, with and without a Ray cluster, for which a few calls of it stand in."""

import logging
import signal
import subprocess
import sys
from importlib import resources
from types import SimpleNamespace

import pytest
import torch
import transfer_queue
import transfer_queue as tq
from packaging.version import Version
from transfer_queue.controller import TransferQueueController
from transfer_queue.storage.simple_storage import SimpleStorageUnit
from transfer_queue.utils.logging_utils import get_logger

import tq_service
from tq_service.testing import ServiceProcess


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("TQ_ADDRESS", "TQ_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    yield
    tq.close()


def partitions(address):
    with tq_service.Client(address, namespace=False) as client:
        return [each.partition_id for each in client.list_partitions()]


def leave():
    """Forget the run, as another process of it would not know it."""
    session, transfer_queue.session._session = transfer_queue.session._session, None
    return session


_CALLS = ("run", "sample", "get_config", "stop")


class Cluster:
    """What Ray has of actors: by name, called one at a time, and gone when they are killed."""

    def __init__(self):
        self.actors = {}
        self.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    def is_initialized(self):
        return True

    def get_actor(self, name, namespace):
        if (namespace, name) not in self.actors:
            raise ValueError("no such actor")
        return self.actors[namespace, name]

    def remote(self, kind):
        return SimpleNamespace(
            options=lambda **options: SimpleNamespace(remote=lambda *a: self._made(kind, options, a))
        )

    def _made(self, kind, options, arguments):
        if (options["namespace"], options["name"]) in self.actors:
            raise ValueError("there is one")
        made = kind(*arguments)
        methods = {name: SimpleNamespace(remote=getattr(made, name)) for name in _CALLS}
        actor = self.actors[options["namespace"], options["name"]] = SimpleNamespace(**methods)
        return actor

    def get(self, answer):
        return answer

    def kill(self, actor):
        self.actors = {name: each for name, each in self.actors.items() if each is not actor}


@pytest.fixture
def ray(monkeypatch):
    cluster = Cluster()
    monkeypatch.setitem(sys.modules, "ray", cluster)
    return cluster


def test_without_an_address_a_run_has_a_service_of_its_own():
    conf = tq.init({"controller": {"service": {"max_bytes": "64MiB", "reflection": True}}})
    assert tq.init() is None
    address = conf["controller"]["address"]
    tq.kv_put("a", "train", fields={"x": torch.ones(2)})
    with tq_service.Client(address) as client:
        assert client.storage_stat().max_bytes == 64 << 20
    tq.close()
    tq.close()
    with pytest.raises(tq_service.errors.UnavailableError), tq_service.Client(address, timeout=0.1) as client:
        client.health()
    with pytest.raises(RuntimeError, match="call init"):
        tq.get_client()
    with pytest.raises(RuntimeError, match="call init"):
        tq.kv_list()


def test_a_service_of_its_own_ends_with_the_process():
    program = "import transfer_queue as tq; print(tq.init({})['controller']['address'], flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        address = process.stdout.readline().decode().strip()
        with tq_service.Client(address) as client:
            assert client.health()
            process.send_signal(signal.SIGKILL)
            process.wait()
            while is_there(client):
                pass


def is_there(client):
    try:
        client.health()
    except tq_service.errors.UnavailableError:
        return False
    return True


@pytest.mark.parametrize("how", ["conf", "environment"])
def test_an_address_and_a_namespace_are_given(service, monkeypatch, how):
    named = {"TQ_ADDRESS": service, "TQ_NAMESPACE": f"by {how}"}
    if how == "environment":
        for name, value in named.items():
            monkeypatch.setenv(name, value)
        conf = tq.init()
    else:
        conf = tq.init({"controller": {"address": service, "namespace": "by conf"}})
    assert (conf["controller"]["address"], conf["controller"]["namespace"]) == (service, f"by {how}")
    tq.kv_put("a", "train", tag={})
    assert partitions(service) == [f"by {how}/train"]
    tq.close()
    assert partitions(service) == []


def test_a_run_ends_also_after_its_client_was_closed(service):
    tq.init({"controller": {"address": service, "namespace": "ends"}})
    tq.kv_put("a", "train", tag={})
    tq.get_client().close()
    tq.close()
    assert partitions(service) == []


def test_a_call_tries_to_reach_the_service_for_timeout_seconds(tmp_path):
    with ServiceProcess(data_dir=tmp_path) as service:
        tq.init({"controller": {"address": service.address, "timeout_seconds": 4}})
        assert tq.get_client().sync_client.timeout == tq.get_client().async_client.timeout == 4
        tq.kv_put("a", "train", tag={"n": 1})
        service.kill()
        with pytest.raises(tq_service.errors.UnavailableError, match="4 s"):
            tq.kv_put("b", "train", tag={})
        service.start()
        assert tq.kv_list("train") == {"train": {"a": {"n": 1}}}


def test_a_shared_service_without_a_namespace_is_not_cleared(service):
    tq.init({"controller": {"address": service}})
    tq.kv_put("a", "shared", tag={})
    tq.close()
    assert partitions(service) == ["shared"]
    with tq_service.Client(service) as client:
        client.clear_partition("shared")


def test_a_namespace_that_is_to_stay(service):
    conf = {"controller": {"address": service, "namespace": "kept", "clear_on_close": False}}
    tq.init(conf)
    tq.kv_put("a", "train", tag={"n": 1})
    tq.close()
    tq.init(conf)
    assert tq.kv_list() == {"train": {"a": {"n": 1}}}
    tq.get_client().clear_partition("train")


def test_processes_of_a_cluster_join_its_run(ray, service, monkeypatch):
    monkeypatch.setenv("TQ_ADDRESS", service)
    conf = tq.init({"controller": {"polling_mode": True}})
    namespace = conf["controller"]["namespace"]
    assert namespace.startswith("run-")
    tq.kv_put("a", "train", tag={})
    owner = leave()
    monkeypatch.setenv("TQ_ADDRESS", "localhost:1")
    assert tq.init() is None
    assert tq.kv_list() == {"train": {"a": {}}}
    assert tq.get_client().get_meta(["x"], 1, "train", "fetch", "task").size == 0
    tq.close()
    assert partitions(service) == [f"{namespace}/train"]
    assert tq.kv_list() == {"train": {"a": {}}}  # joins by itself
    leave()
    transfer_queue.session._session = owner
    tq.close()
    assert (partitions(service), ray.actors) == ([], {})
    with pytest.raises(RuntimeError, match="call init"):
        tq.kv_list()


def test_the_actor_says_how_the_run_is_configured(ray, service):
    conf = tq.init({"controller": {"address": service, "polling_mode": True}})
    actor = ray.get_actor("TransferQueueController", namespace="transfer_queue")
    assert ray.get(actor.get_config.remote()) == conf
    assert (conf["controller"]["address"], conf["controller"]["polling_mode"]) == (service, True)


def test_the_actor_asks_and_forgets_a_sampler_of_users(ray, service):
    sampler = type("Mine", (tq.RankAwareSampler,), {})()
    tq.init({"controller": {"address": service, "sampler": sampler, "polling_mode": True}})
    for partition in ("one", "two"):
        tq.kv_put("a", partition, fields={"x": torch.tensor(1)})
        config = {"dp_rank": 0, "batch_index": 0, "task_name": "t", "partition_id": partition}
        meta = tq.get_client().get_meta(["x"], 1, partition, task_name="t", sampling_config=config)
        assert meta.size == 1
        assert list(sampler._states) == [partition]
        tq.get_client().clear_partition(partition)


def test_a_cluster_has_a_service_of_its_own_for_holders_of_its_token(ray):
    conf = tq.init({})
    tq.kv_put("a", "train", tag={})
    owner = leave()
    assert tq.kv_list() == {"train": {"a": {}}}
    with pytest.raises(tq_service.errors.UnauthenticatedError):
        partitions(conf["controller"]["address"])
    leave()
    transfer_queue.session._session = owner


def test_of_two_processes_that_begin_one_is_first(ray, service, monkeypatch):
    monkeypatch.setenv("TQ_ADDRESS", service)
    tq.init({})
    first = leave()
    known, real = [False], ray.get_actor

    def not_yet(name, namespace):
        if not known[0]:
            known[0] = True
            raise ValueError("not yet")
        return real(name, namespace)

    monkeypatch.setattr(ray, "get_actor", not_yet)
    conf = {"controller": {"namespace": "other"}}
    assert tq.init(conf) is conf
    assert tq.get_client().get_partition_list() == []
    assert transfer_queue.session.current().run.namespace == first.run.namespace
    leave()
    transfer_queue.session._session = first


def test_ray_is_connected_as_its_first_call_does(monkeypatch):
    connected = []
    cluster = Cluster()
    cluster.is_initialized = lambda: bool(connected)
    cluster.init = lambda: connected.append(True)
    monkeypatch.setitem(sys.modules, "ray", cluster)
    with pytest.raises(RuntimeError, match="call init"):
        tq.kv_list()
    assert connected == [True]


def test_names_that_callers_configure(ray):
    assert SimpleStorageUnit.options(num_cpus=1) is SimpleStorageUnit
    with pytest.raises(RuntimeError, match="cannot create a storage unit"):
        SimpleStorageUnit.remote()
    assert callable(TransferQueueController.options(name="x", namespace="y").remote)
    assert (resources.files("transfer_queue") / "config.yaml").is_file()
    assert Version(tq.__version__) >= Version("0.1.9")


def test_where_metrics_are(service):
    assert tq.get_metrics_endpoint() is None
    tq.init({"controller": {"address": service}, "metrics": {"endpoint": "host:9090"}})
    assert tq.get_metrics_endpoint() == "host:9090"


def test_loggers_of_users(monkeypatch):
    monkeypatch.setenv("TQ_LOGGING_LEVEL", "ERROR")
    logger = get_logger("theirs", default_level="INFO")
    assert (logger.name, logger.level, logger.hasHandlers()) == ("theirs", logging.ERROR, True)
    monkeypatch.delenv("TQ_LOGGING_LEVEL")
    assert get_logger("theirs", default_level="INFO").level == logging.INFO


def test_it_does_without_ray_and_omegaconf():
    assert not {"ray", "omegaconf"} & set(sys.modules)
