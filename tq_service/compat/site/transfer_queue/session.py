"""The session of this process. `init` starts or joins a run, and `close` leaves or ends the run."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any, Final

import tq_service as tq
import transfer_queue.sampler
from transfer_queue.client import Asking, TransferQueueClient
from transfer_queue.controller import Run, TransferQueueController, setting
from transfer_queue.sampler import BaseSampler

_log = logging.getLogger(__name__)

ACTOR_NAME: Final = "TransferQueueController"
ACTOR_NAMESPACE: Final = "transfer_queue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A process's membership in a run.

    Attributes:
        run: state shared by all processes of the run.
        client: this process's client for the service.
        controller: a `TransferQueueController`, or a Ray handle to one.
        call: function that calls a method of the controller by name, with the given arguments.
        ray: the `ray` module if the controller is a Ray actor, otherwise None.
        is_owner: whether this process started the run.
    """

    run: Run
    client: TransferQueueClient
    controller: Any
    call: Callable[..., Any]
    ray: Any
    is_owner: bool


_session: Session | None = None
_changing = threading.RLock()


def init(conf: Any = None) -> Any:
    """Start a run, or join the existing run. A Ray cluster has at most one run.

    Args:
        conf: configuration of the run, as a dict or DictConfig (see config.yaml). Ignored if a run already exists.

    Returns:
        The configuration of a new run, including defaults, address and namespace. If the process joins an existing run,
        `conf` is returned unchanged.

    Raises:
        ValueError: the configured sampler is invalid.
    """
    global _session  # noqa: PLW0603  (TransferQueue's calls are module functions)
    with _changing:
        if _session is not None:
            return conf
        _session = _join() or _begin(conf)
        return _session.run.filled_conf() if _session.is_owner else conf


def current(*, joins: bool = True) -> Session:
    """Return this process's session. In a Ray cluster, first join the cluster's run if necessary.

    Raises:
        RuntimeError: this process has not joined a run.
    """
    global _session  # noqa: PLW0603
    if _session is None and joins:
        with _changing:
            _session = _session or _join()
    if _session is None:
        raise RuntimeError("TransferQueue is not initialized in this process; call init() first")
    return _session


def close() -> None:
    """Leave the run, or end it if this process started it.

    Ending the run clears its namespace. If the run started the service, the service is also stopped.
    """
    global _session
    with _changing:
        session, _session = _session, None
        if session is None:
            return
        try:
            if session.is_owner:
                _end(session)
        finally:
            session.client.close()


def get_client() -> TransferQueueClient:
    """Return the client of this process's session.

    Raises:
        RuntimeError: this process has not called `init`.
    """
    return current(joins=False).client


def _join() -> Session | None:
    """Join the run of the Ray cluster. Return None if there is no run or the program does not use Ray."""
    ray = _ray()
    try:
        actor = ray and ray.get_actor(ACTOR_NAME, namespace=ACTOR_NAMESPACE)
    except ValueError:
        return None
    return _session_of(actor, ray) if actor else None


def _begin(conf: Any) -> Session:
    run, ray = _run_of(conf, in_cluster=_ray() is not None), _ray()
    if ray is None:
        controller = TransferQueueController(run)
        return _session_of(controller, None, is_owner=True)
    host = ray.util.get_node_ip_address()
    options = {"name": ACTOR_NAME, "namespace": ACTOR_NAMESPACE, "num_cpus": 0, "max_concurrency": 8}
    try:
        actor = ray.remote(TransferQueueController).options(**options).remote(run, host)
    except ValueError:  # another process started the run first
        return _session_of(ray.get_actor(ACTOR_NAME, namespace=ACTOR_NAMESPACE), ray)
    return _session_of(actor, ray, is_owner=True)


def _session_of(controller: Any, ray: Any, *, is_owner: bool = False) -> Session:
    def call(name: str, *arguments: Any, **keywords: Any) -> Any:
        method = getattr(controller, name)
        return method(*arguments, **keywords) if ray is None else ray.get(method.remote(*arguments, **keywords))

    run: Run = call("run")
    is_polling = bool(setting(run.conf, "controller", "polling_mode", default=False))
    wait_seconds = float(setting(run.conf, "controller", "wait_seconds", default=60.0))
    asking = Asking(
        sampler=run.sampler,
        sample=partial(call, "sample"),
        polling_mode=is_polling,
        wait_seconds=0.0 if is_polling else wait_seconds,
    )
    client = TransferQueueClient(asking=asking, **run.client_options())
    if is_owner:
        atexit.register(close)
    return Session(run=run, client=client, controller=controller, call=call, ray=ray, is_owner=is_owner)


def _end(session: Session) -> None:
    run = session.run
    is_cleared = setting(run.conf, "controller", "clear_on_close", default=True)
    if run.namespace and is_cleared and not run.is_service_owned:
        client = session.client.polling()(run.address)  # the program may have closed the session's client
        try:
            for partition in client.get_partition_list():
                client.clear_partition(partition)
        except tq.TqError as error:
            _log.warning("could not clear the partitions in namespace %r: %s", run.namespace, error)
        finally:
            client.close()
    ray = session.ray
    if ray is None or ray.is_initialized():  # otherwise the actor ended together with the cluster
        session.call("stop")
    if ray is not None and ray.is_initialized():
        ray.kill(session.controller)


def _run_of(conf: Any, *, in_cluster: bool) -> Run:
    conf = _with_defaults(conf)
    generated = f"run-{secrets.token_hex(4)}" if in_cluster else ""
    return Run(
        conf=conf,
        address=setting(conf, "controller", "address") or os.environ.get("TQ_ADDRESS") or "",
        namespace=setting(conf, "controller", "namespace") or os.environ.get("TQ_NAMESPACE") or generated,
        sampler=_sampler_of(setting(conf, "controller", "sampler", default="SequentialSampler")),
        service=dict(setting(conf, "controller", "service", default={})),
    )


def _with_defaults(conf: Any) -> Any:
    """Return the configuration with defaults from config.yaml, or an unchanged copy if OmegaConf is not installed."""
    try:
        from omegaconf import OmegaConf  # noqa: PLC0415  (programs without it pass dicts)
    except ImportError:
        return {name: dict(part) if isinstance(part, Mapping) else part for name, part in (conf or {}).items()}
    defaults = OmegaConf.load(str(resources.files("transfer_queue") / "config.yaml"))
    return OmegaConf.merge(OmegaConf.create({}, flags={"allow_objects": True}), defaults, conf or {})


def _sampler_of(given: Any) -> BaseSampler:
    """Return the sampler that `given` specifies by name, class or instance.

    Raises:
        ValueError: `given` is not a sampler.
    """
    kind = getattr(transfer_queue.sampler, given, None) if isinstance(given, str) else given
    if isinstance(kind, type) and issubclass(kind, BaseSampler):
        return kind()
    if isinstance(kind, BaseSampler):
        return kind
    raise ValueError(
        f"controller.sampler is {given!r}; expected the name of a class in transfer_queue.sampler, a subclass of "
        "BaseSampler, or an instance of such a class"
    )


def _ray() -> Any:
    """Connect to the Ray cluster and return the Ray module. Return None if the program does not use Ray."""
    ray = sys.modules.get("ray")
    if ray is not None and not ray.is_initialized():
        ray.init()
    return ray
