"""Settings of the service: by flag, then `TQ_*` environment, then TOML file, then default, and where each came from."""

from __future__ import annotations

import difflib
import inspect
import ipaddress
import os
import re
import socket
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, TypeAdapter, ValidationError, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from tq_service.addresses import DEFAULT_PORT, normal_address, normal_addresses, redacted
from tq_service.errors import InvalidArgumentError
from tq_service.memory_limit import memory_limit_bytes

ENV_PREFIX = "TQ_"
CONFIG_VARIABLE = "TQ_CONFIG"
CLIENT_VARIABLES: Final = frozenset(
    {
        "TQ_ADDRESS",
        "TQ_LOGGING_LEVEL",
        "TQ_NAMESPACE",
        "TQ_PINNED_BYTES",
        "TQ_PRE_ALLOC_SAMPLE_NUM",
        "TQ_SHARED_MEMORY",
        "TQ_SHARED_MEMORY_DIR",
        "TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL",
        "TQ_TLS_CA",
        "TQ_TLS_CERT",
        "TQ_TLS_KEY",
        "TQ_TOKEN",
        "TQ_TOKEN_FILE",
    }
)
"""Those that clients read; they may be set where a service starts."""
# What Kubernetes sets in pods for a Service whose name begins so: TQ_X_SERVICE_HOST, TQ_X_PORT=tcp://..., and others.
_LINK_NAME: Final = re.compile(r"TQ_\w+_(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_LINK_VALUE: Final = re.compile(r"(tcp|udp|sctp)://.*")

Role = Literal["controller", "storage", "all"]
Source = Literal["flag", "env", "file", "default"]

# Settings that are given together or not at all.
_PAIRS: Final = (
    ("tls_cert", "tls_key"),
    ("journal", "cluster"),
    ("etcd_cert", "etcd_key"),
    ("etcd_user", "etcd_password_file"),
)
_SIZE = re.compile(r"\d{1,18}(\.\d{1,18})?\s*(B|[KMGT](i?B)?)?", re.IGNORECASE)
_BYTES: Final = TypeAdapter(ByteSize)


def parse_size(text: object) -> object:
    """Return bytes for a size such as "8GiB", "500 MB" or "1024", None for "none"; other types pass unchanged.

    Raises:
        ValueError: the text is not a size.
    """
    if not isinstance(text, str):
        return text
    if text.strip().lower() == "none":
        return None
    if not _SIZE.fullmatch(text.strip()):  # ByteSize knows bits as well, and overlooks what comes after a size
        raise ValueError("expected bytes, such as 8GiB, 500MB or 1048576")
    return int(_BYTES.validate_python(text.strip()))


def format_size(size_bytes: int | None) -> str:
    """Return a size the way `parse_size` reads it, "none" for None; exact where a unit divides it."""
    if size_bytes is None:
        return "none"
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes and (count := ByteSize(size_bytes).to(unit)).is_integer():
            return f"{count:.0f}{unit}"
    return str(size_bytes)


def format_setting(name: str, value: object) -> str:
    """Return the value of a setting the way it would be given, a URL without its password; empty for None."""
    if name.endswith("_bytes") and (value is None or isinstance(value, int)):
        return format_size(value)
    if isinstance(value, str) and "://" in value:
        return redacted(value)
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)


def default_max_bytes() -> int:
    """Return half of the memory this process may use, in whole MiB: the other half is for streams and the rest."""
    return max(memory_limit_bytes() // 2 // 2**20, 1) * 2**20


def default_shared_memory_dir() -> Path:
    """Return the directory of this user for the sockets of shared memory."""
    directory = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108  (the service checks that what is there is this user's)
    return Path(directory) / f"tq_service-{os.getuid()}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def join_address(host: str, port: int) -> str:
    """Return "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _checked_address(text: str) -> str:
    normal_address(text)
    return text


def _checked_journal(text: str) -> str:
    scheme, separator, members = text.partition("://")
    if scheme != "etcd" or not separator or not members.strip("/"):
        raise ValueError("expected etcd://host:port,host:port,...")
    if "@" in members:
        raise ValueError("expected addresses without a user; give etcd_user and etcd_password_file instead")
    return f"etcd://{','.join(normal_address(each, ETCD_PORT) for each in members.rstrip('/').split(','))}"


ETCD_PORT: Final = 2379
Address = Annotated[str, AfterValidator(normal_address)]
Addresses = Annotated[str, AfterValidator(normal_addresses)]
Journal = Annotated[str, AfterValidator(_checked_journal)]
AdvertisedAddress = Annotated[str, AfterValidator(_checked_address)]  # its port may be that which is listened on
Size = Annotated[int, BeforeValidator(parse_size)]
SizeOrNone = Annotated[int | None, BeforeValidator(parse_size)]


class _Section(BaseSettings):
    """Some of the settings; what a section is for is the title of its group in the help and the docs."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True, frozen=True, extra="forbid")


class _Network(_Section):
    """Network."""

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 for all interfaces.")
    port: int = Field(DEFAULT_PORT, ge=0, le=65535, description="Port to listen on; 0 lets the system choose one.")
    advertise: AdvertisedAddress | None = Field(
        None,
        description="Address host:port at which clients reach this storage service, or this controller of a cluster; "
        "without a port it is the one listened on. Default: host name and port for role storage and for "
        "controllers of a cluster, the address used for the controller for role all.",
    )
    controller: Addresses | None = Field(
        None,
        description="Address host:port of the controller with which a storage service registers; without a port "
        "it is 50051. Of several controllers: their addresses with commas between them.",
    )
    shared_memory: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Whether clients on this host use shared memory instead of sending bytes: on, off, or auto "
        "(where the system and the directory allow it).",
    )
    shared_memory_dir: Path = Field(
        default_factory=default_shared_memory_dir,
        description="Directory of the socket for shared memory; its permissions decide which users may use it. "
        "Containers of one host mount the same directory. Default: tq_service-<uid> in the directory for "
        "temporary files, for this user alone.",
    )
    bulk: Literal["on", "off"] = Field(
        "on",
        description="Whether the bytes of puts and gets from 2 MiB on go over connections of their own, on every core, "
        "where clients reach the bulk port: on, or off (all bytes go in gRPC messages).",
    )
    bulk_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port to listen on for these connections, at the address of the service and secured as it is; 0 "
        "lets the system choose one, which firewalls and Kubernetes keep clients from.",
    )
    bulk_advertise: AdvertisedAddress | None = Field(
        None,
        description="Address host:port at which clients reach the bulk port; without a port it is the one listened "
        "on. Default: the host at which they reach this storage service.",
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port on which Prometheus scrapes metrics, at /metrics; 0 lets the system choose one. Secured as "
        "the service is: over TLS with tls_cert, and with auth_tokens_file for tokens with the role read "
        "and the prefix '' alone. Needs tq-service[metrics]. Default: none.",
    )
    metrics_host: str = Field(
        "127.0.0.1", min_length=1, description="Address to listen on for metrics; 0.0.0.0 for all interfaces."
    )
    reflection: bool = Field(False, description="Whether to serve gRPC reflection, for grpcurl and similar tools.")
    max_message_bytes: Size = Field(
        4 * 2**20,
        ge=4 * 2**20,
        description="Largest gRPC message accepted; larger requests and bulk data come in several messages.",
    )
    max_metadata_bytes: Size = Field(
        16 * 2**10, ge=2**10, description="Largest metadata of one call: its headers, the token among them."
    )
    stall_seconds: float = Field(
        60.0,
        gt=0,
        description="Idle timeout of streaming calls: a client that takes longer to send or to receive 64 KiB has "
        "its call aborted and its memory released.",
    )
    min_stream_rate_bytes: Size = Field(
        8 * 2**20,
        ge=0,
        description="Bytes per second that the streams of puts and gets must move, together and after 10 s, while puts "
        "wait for capacity; of n streams, those that move less than an nth are aborted. 0: any rate.",
    )


class _Process(_Section):
    """Process."""

    role: Role = Field(
        "all", description="What runs in this process: the controller, a storage service, or both (all)."
    )
    uvloop: Literal["auto", "on", "off"] = Field(
        "auto", description="Event loop: uvloop (on), asyncio's own (off), or uvloop where installed (auto)."
    )
    grace_seconds: float = Field(15.0, ge=0, description="How long running calls may take to finish after SIGTERM.")
    traces: bool = Field(
        False,
        description="Whether calls are traced with OpenTelemetry, below the spans of clients. Run the service in a "
        "program that configures a provider, such as opentelemetry-instrument. Needs tq-service[traces].",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level that is logged.")
    log_format: Literal["text", "json"] = Field("text", description="Format of the log lines on stderr.")


class _StorageAndDurability(_Section):
    """Storage and durability."""

    storage_id: str | None = Field(
        None,
        description="Name of the storage service; it must not change over restarts, and no other may have it. "
        "Default: host name and port.",
    )
    max_bytes: SizeOrNone = Field(
        default_factory=default_max_bytes,
        gt=0,
        description="Quota of the storage service, such as 8GiB; none for no limit. Default: half of the memory.",
    )
    data_dir: Path | None = Field(
        None,
        description="Data directory: the service's state, used by one process at a time. Default: none; the state "
        "is in memory and lost when the service stops.",
    )
    durability: Literal["auto", "memory", "process", "disk"] = Field(
        "auto",
        description="What an acknowledged change survives: nothing (memory), a crash of any process (process), or "
        "of the host (disk); auto is process with data_dir, memory without.",
    )
    mirror: str | None = Field(
        None,
        min_length=1,
        description="Where the puts of a storage service are a second time, on other nodes: URL of an engine, such as "
        "s3://bucket/prefix, see docs/engines.md; another storage service with the same mirror takes the puts over "
        "when this one is lost. For role storage without data_dir. Default: none.",
    )
    mirror_copies: int = Field(
        1, ge=1, description="Copies that each put is to have in the mirror, on other nodes than this one."
    )
    mirror_required: int = Field(
        1,
        ge=0,
        description="Copies that a put must have in the mirror before it is complete; 0 mirrors it afterwards, so that "
        "the latest puts are lost with this service.",
    )
    mirror_memory_bytes: Size | None = Field(
        None,
        ge=1,
        description="Memory for puts: those used longest ago leave it once the mirror has their copies, and come back "
        "when they are read, so that max_bytes may exceed memory. What comes and is read at a time is on top. For "
        "engines whose objects survive the loss of power. Default: all puts stay in memory.",
    )
    mirror_offered_bytes: Size = Field(
        0,
        ge=0,
        description="Memory of this node that it offers to the engine of the mirror for copies of other nodes' puts, "
        "where the engine lives on such memory; besides max_bytes.",
    )
    checkpoint_dir: Path | None = Field(
        None,
        description="Directory on the controller's host that holds the checkpoints, by name; best on another disk "
        "than data_dir. Default: checkpoints in data_dir; without data_dir none, and Checkpoint and "
        "Restore are rejected.",
    )
    accept_journal_loss: bool = Field(
        False,
        description="Start although a journal record in data_dir is damaged: the records before it are kept, "
        "later ones are dropped. Set it for one start, after reading the error of the start that "
        "failed.",
    )
    put_ttl_seconds: float = Field(300.0, gt=0, description="How long a put may stay uncommitted before it expires.")
    request_record_seconds: float = Field(
        600.0, gt=0, description="How long the answer of a mutating request is kept for retries."
    )
    request_record_bytes: Size = Field(
        128 * 2**20,
        ge=2**20,
        description="Memory for the answers kept for retries; when it is full the oldest are dropped.",
    )


class _Cluster(_Section):
    """Several controllers."""

    journal: Journal | None = Field(
        None,
        description="Where the journal of a cluster of controllers is: etcd://host:port,host:port,... with the client "
        "addresses of etcd's members. One of the controllers leads, the others follow the journal and take "
        "over. Goes with role controller, cluster and data_dir, in which each has its snapshots. Default: "
        "the journal is in data_dir.",
    )
    cluster: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$",
        description="Name of the cluster of controllers in etcd; all of them have the same.",
    )
    lease_seconds: float = Field(
        5.0,
        ge=2,
        le=60,
        description="Lease of the controller that leads: after its death another one takes over this much later.",
    )
    etcd_user: str | None = Field(None, min_length=1, description="User of etcd. Default: none; etcd asks for none.")
    etcd_password_file: Path | None = Field(None, description="File with the password of etcd_user.")
    etcd_ca: Path | None = Field(
        None,
        description="CA certificates (PEM) that verify those of etcd's members, which are reached over TLS with this "
        "or etcd_cert.",
    )
    etcd_cert: Path | None = Field(None, description="Client certificate for etcd, with its chain (PEM).")
    etcd_key: Path | None = Field(None, description="Private key of etcd_cert (PEM, no passphrase).")


class _Batches(_Section):
    """Batches and samplers."""

    max_wait_cap_seconds: float = Field(
        60.0,
        gt=0,
        description="Longest wait of one GetMeta or LookupSamples call; clients repeat it until their own timeout.",
    )
    sampler_timeout_seconds: float = Field(30.0, gt=0, description="Timeout of a sampler for one batch.")
    sampler_threads: int = Field(4, ge=1, description="Threads that run samplers, and nothing else.")
    allow_sampler_import: bool = Field(
        False,
        description="Whether clients may name samplers as module:Class, which imports the module in the server. "
        "Default: yes where only this machine reaches the server and no tokens are asked for, else "
        "no.",
    )


class _Security(_Section):
    """TLS, tokens and audit."""

    tls_cert: Path | None = Field(
        None,
        description="Certificate of the service with its chain (PEM); turns TLS on. Reloaded when it changes.",
    )
    tls_key: Path | None = Field(
        None, description="Private key of tls_cert (PEM, no passphrase); other users must not be able to read it."
    )
    tls_client_ca: Path | None = Field(
        None, description="CA certificates (PEM); every client must show a certificate signed by one of them (mTLS)."
    )
    tls_ca: Path | None = Field(
        None,
        description="CA certificates (PEM) that verify the other services' certificates; with this or tls_cert "
        "they are called over TLS, and tls_cert is the client certificate. Default: the CA "
        "certificates that gRPC knows.",
    )
    auth_tokens_file: Path | None = Field(
        None,
        description="File with the digests of the valid bearer tokens, written by `tq-service token new`; calls "
        "without a valid token are rejected. Reloaded when it changes.",
    )
    peer_token_file: Path | None = Field(
        None, description="File with the token of role service that this service sends to other services."
    )
    internal_secret_file: Path | None = Field(
        None,
        description="File with the secret that the services of one deployment share, which tells their calls from "
        "those of clients; role controller or all creates it where it is missing. Reloaded when it "
        "changes. Default: none where services have tokens of role service; a file of this user where "
        "all is on the loopback address; else none, and split services do not start.",
    )
    insecure: bool = Field(
        False, description="Listen beyond this machine without TLS and tokens; for trusted networks only."
    )
    audit_file: Path | None = Field(
        None,
        description="File to which the audit log is appended: a line for each rejected and each administrative "
        "call. Default: stderr, with the other log lines.",
    )
    audit_repeat_seconds: float = Field(
        0.0,
        ge=0,
        description="Window in which repeated rejections of one kind are logged as one line with their count, so "
        "that they cannot fill the disk; 0 logs each.",
    )


class _Limits(_Section):
    """Limits."""

    max_connections: int = Field(16_384, ge=1, description="Open connections; further ones are closed.")
    first_call_seconds: float = Field(
        10.0,
        gt=0,
        description="Time in which a connection must make its first call, with a valid token if tokens are needed, or "
        "else it is closed. Health checks of a service with tokens do not count.",
    )
    idle_connection_seconds: float = Field(
        600.0, gt=0, description="Time without any call after which a connection is closed; clients reconnect."
    )
    max_streams: int = Field(
        4_096, ge=1, description="Concurrent calls of one connection; its client queues further ones."
    )
    max_calls: int = Field(65_536, ge=1, description="Concurrent calls, health checks not counted.")
    max_waiting_calls: int = Field(32_768, ge=1, description="Calls that wait for samples or for capacity.")
    max_waiting_calls_per_client: int = Field(
        2_048, ge=1, description="Of these, calls of one client (one connection)."
    )
    max_watchers: int = Field(
        1_000, ge=1, description="Calls that watch partitions; together they get at most about 100 answers a second."
    )
    max_puts: int = Field(4_000_000, ge=1, description="Puts that the storage service stores.")
    max_uncommitted_puts: int = Field(
        65_536, ge=1, description="Of these, puts not committed yet whose controller is another process."
    )
    max_partitions: int = Field(10_000, ge=1, description="Partitions.")
    max_policies: int = Field(1_000, ge=1, description="Policies with published versions.")
    max_samples: int = Field(
        50_000_000,
        ge=1,
        description="Samples in all partitions; each takes about 60 bytes of the controller's memory, and 8 per field.",
    )
    max_fields: int = Field(1_024, ge=1, description="Fields of one partition.")
    max_tasks: int = Field(256, ge=1, description="Tasks of one partition.")
    max_meta_columns: int = Field(256, ge=1, description="custom_meta columns of one partition.")
    max_sample_meta_bytes: Size = Field(16 * 2**10, ge=8, description="custom_meta of one sample in one write.")
    max_name_length: int = Field(
        512, ge=1, description="Characters of a key, or of the name of a group, field, task or custom_meta column."
    )


class ServeSettings(_Limits, _Security, _Batches, _Cluster, _StorageAndDurability, _Process, _Network):
    """What `tq-service serve` runs with. Each setting's description is its help text and its line in the docs.

    The sections are named last to first, since pydantic takes the fields of the last base first.
    """

    @classmethod
    def section_of(cls, name: str) -> str:
        """Return the title of the section of a setting."""
        sections = (base for base in cls.__bases__ if issubclass(base, _Section) and name in base.model_fields)
        return inspect.cleandoc(next(sections).__doc__ or "").rstrip(".")

    @model_validator(mode="before")
    @classmethod
    def _import_follows_auth(cls, values: dict[str, Any]) -> dict[str, Any]:
        is_private = is_loopback(str(values.get("host", "127.0.0.1"))) and not values.get("auth_tokens_file")
        return {"allow_sampler_import": is_private, **values}

    @model_validator(mode="after")
    def _fit_together(self) -> ServeSettings:
        for problem in chain(self._wrong_in_security(), self._wrong_in_roles(), self._wrong_in_mirror()):
            raise ValueError(problem)
        return self

    def _wrong_in_security(self) -> Iterator[str]:
        for name in ("etcd_user", "etcd_password_file", "etcd_ca", "etcd_cert", "etcd_key"):
            if self.journal is None and getattr(self, name) is not None:
                yield f"{name} is for a journal in etcd; set journal and cluster, or leave it out"
        for one, other in _PAIRS:
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                yield f"got one of {one} and {other}; give both, or neither"
        if self.tls_client_ca is not None and self.tls_cert is None:
            yield "tls_client_ca asks clients for certificates, which needs tls_cert and tls_key"
        hosts = [self.host] if self.metrics_port is None else [self.host, self.metrics_host]
        host = next((host for host in hosts if not is_loopback(host)), None)
        if not self.is_secured and host is not None and not self.insecure:
            lacking = [name for name in ("tls_cert", "auth_tokens_file") if getattr(self, name) is None]
            yield (
                f"other machines reach {host}, and there is no {' and no '.join(lacking)}; give TLS and tokens "
                "(docs/security.md), listen on 127.0.0.1, or set insecure where the network itself is trusted"
            )

    def _wrong_in_roles(self) -> Iterator[str]:
        if self.role == "storage" and self.controller is None:
            yield "role storage needs the setting controller, the address host:port to announce itself to"
        if self.role != "storage" and self.controller is not None:
            yield f"the setting controller is for role storage, but the role is {self.role}; leave one out"
        if self.durability in {"process", "disk"} and self.data_dir is None:
            yield f"durability {self.durability} needs the setting data_dir, the directory to keep the state in"
        if self.durability == "memory" and self.data_dir is not None:
            yield "durability is memory, for which data_dir has no use; leave one of the two out"
        if self.journal is None:
            return
        if self.role != "controller":
            yield (
                f"the journal is in etcd, and the role is {self.role}; what a storage service holds is of its host, so "
                "run it apart: role controller here, and processes with role storage"
            )
        if self.data_dir is None:
            yield "the journal is in etcd, and data_dir is missing, in which this controller has snapshots"
        if self.durability != "auto":
            yield f"the journal is in etcd, so leave durability out; got {self.durability}"

    def _wrong_in_mirror(self) -> Iterator[str]:
        if self.mirror is None:
            given = sorted(name for name in self.model_fields_set if name.startswith("mirror_"))
            if given:
                yield f"got {', '.join(given)} without mirror, the URL of an engine; give it, or leave them out"
            return
        if self.role != "storage":
            yield (
                f"mirror is for role storage, but the role is {self.role}; run the storage service as a process of its "
                "own, so that another one can take its puts over"
            )
        if self.data_dir is not None:
            yield "mirror takes the place of the files in data_dir for puts; leave one of the two out"
        if "://" not in self.mirror:
            yield "mirror is no URL; expected one such as s3://bucket/prefix or file:///mnt/shared"
        if (self.mirror_memory_bytes or 0) > (self.max_bytes or sys.maxsize):
            yield (
                f"mirror_memory_bytes is {self.mirror_memory_bytes}, max_bytes {self.max_bytes}; the quota of all puts "
                "is at least what may be in memory of them: raise max_bytes, or leave mirror_memory_bytes out"
            )
        if self.mirror_required > self.mirror_copies:
            yield (
                f"mirror_required is {self.mirror_required}, mirror_copies {self.mirror_copies}; no put could ever be "
                "complete: require at most as many copies as are made"
            )

    @property
    def is_secured(self) -> bool:
        """Whether calls need a token, and travel encrypted."""
        return self.tls_cert is not None and self.auth_tokens_file is not None

    @property
    def etcd_members(self) -> tuple[str, ...]:
        """The addresses of the members of etcd that the journal is in."""
        return () if self.journal is None else tuple(self.journal.partition("://")[2].split(","))

    @property
    def effective_durability(self) -> Literal["memory", "process", "disk", "cluster"]:
        """What an acknowledged change survives."""
        if self.journal is not None:
            return "cluster"
        if self.durability == "auto":
            return "memory" if self.data_dir is None else "process"
        return self.durability

    def checkpoint_directory(self) -> Path | None:
        """Return the directory that all checkpoints are below, None where there is none."""
        if self.checkpoint_dir is None and self.data_dir is not None:
            return self.data_dir / "checkpoints"
        return self.checkpoint_dir

    def advertised_address(self, port: int) -> str:
        """Return where clients reach this storage service, or controller of a cluster; `port` is the one listened on.

        Empty means the address they use for the controller, in whose process it is.
        """
        if self.advertise is not None:
            return normal_address(self.advertise, port)
        if self.role != "storage" and self.journal is None:
            return ""
        anywhere = self.host in {"0.0.0.0", "::", "[::]"}  # noqa: S104  (compared with, not bound to)
        return join_address(socket.gethostname() if anywhere else self.host, port)

    def bulk_address(self, port: int) -> str:
        """Return where clients reach the bulk port, as `StatResponse.bulk_address`; `port` is the one listened on."""
        return f":{port}" if self.bulk_advertise is None else normal_address(self.bulk_advertise, port)

    def storage_name(self, port: int) -> str:
        """Return the name of this storage service; `port` is the one it listens on."""
        return self.storage_id or f"{socket.gethostname()}-{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSettings:
    """Settings and where each came from.

    Attributes:
        settings: the settings.
        sources: for each setting, the source that gave it.
        config: the file that was read, None without one.
    """

    settings: ServeSettings
    sources: Mapping[str, Source]
    config: Path | None

    def shown(self, name: str) -> str:
        """Return the value of a setting the way it would be given."""
        return format_setting(name, getattr(self.settings, name))


def load_settings(flags: Mapping[str, object], config: Path | None = None) -> LoadedSettings:
    """Merge flags over `TQ_*` environment over file over defaults.

    Args:
        flags: settings given on the command line; None counts as not given.
        config: TOML file with settings by name; None takes the file that TQ_CONFIG names, if any.

    Raises:
        InvalidArgumentError: the file cannot be read or has unknown settings, or a value is wrong.
    """
    if config is None and os.environ.get(CONFIG_VARIABLE):
        config = Path(os.environ[CONFIG_VARIABLE])
    layers: list[tuple[Source, Mapping[str, object]]] = [
        ("file", _read_file(config) if config else {}),
        ("env", EnvSettingsSource(ServeSettings)()),
        ("flag", {name: value for name, value in flags.items() if value is not None}),
    ]
    merged: dict[str, Any] = {}
    sources: dict[str, Source] = dict.fromkeys(ServeSettings.model_fields, "default")
    for source, values in layers:
        merged.update(values)
        sources.update(dict.fromkeys(values, source))
    try:
        settings = ServeSettings(**merged)
    except ValidationError as error:
        raise InvalidArgumentError(_explain(error, sources, config)) from None
    return LoadedSettings(settings=settings, sources=sources, config=config)


def unknown_variables() -> dict[str, str | None]:
    """Return the variables `TQ_*` of this process that neither settings nor clients have, each with the nearest one.

    Most are misspelt settings, which have no effect.
    """
    known = {f"{ENV_PREFIX}{name.upper()}" for name in ServeSettings.model_fields} | CLIENT_VARIABLES
    known.add(CONFIG_VARIABLE)
    found: dict[str, str | None] = {}
    for name, value in sorted(os.environ.items()):
        is_link = _LINK_NAME.fullmatch(name) or (name.endswith("_PORT") and _LINK_VALUE.fullmatch(value))
        if name.startswith(ENV_PREFIX) and name not in known and not is_link:
            found[name] = next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8)), None)
    return found


def _read_file(path: Path) -> dict[str, object]:
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidArgumentError(f"the settings file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidArgumentError(f"the settings file {path} is not TOML: {error}") from None
    known = sorted(ServeSettings.model_fields)
    if unknown := sorted(set(values) - set(known)):
        close = difflib.get_close_matches(unknown[0], known, n=1)
        raise InvalidArgumentError(
            f"the settings file {path} has unknown settings: {', '.join(unknown)};"
            f"{f' did you mean {close[0]}?' if close else ''} known are {', '.join(known)}"
        )
    return values


def _explain(error: ValidationError, sources: Mapping[str, Source], config: Path | None) -> str:
    """Say for each wrong setting what was got, from where, and what was expected."""
    problems = []
    for problem in error.errors(include_url=False):
        reason = problem["msg"].removeprefix("Value error, ")
        if not problem["loc"]:
            problems.append(reason)
            continue
        name = str(problem["loc"][0])
        got = problem["input"]
        if isinstance(got, str) and "@" in got and "://" in got:  # it may hold a password
            got = redacted(got)
        place = {
            "flag": f"--{name.replace('_', '-')}",
            "env": f"{ENV_PREFIX}{name.upper()}",
            "file": f"{name} in {config}",
        }.get(sources.get(name, "default"), name)
        reason = f"{place}: got {got!r}: {reason[:1].lower()}{reason[1:]}"
        if sources.get(name) == "env" and isinstance(got, str) and "://" in got:
            reason += " (Kubernetes sets this for a service named tq: use another name, or enableServiceLinks: false)"
        problems.append(reason)
    return "; ".join(problems)
