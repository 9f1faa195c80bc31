"""Service settings, merged from flags, `TQ_*` variables, a TOML file and defaults, in order of precedence."""

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

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

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
"""Environment variables that clients read. The service ignores these variables and does not report them as unknown."""
# Kubernetes sets variables such as TQ_X_SERVICE_HOST and TQ_X_PORT=tcp://... in pods if the name of a Service starts
# with "tq".
_LINK_NAME: Final = re.compile(r"TQ_\w+_(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_LINK_VALUE: Final = re.compile(r"(tcp|udp|sctp)://.*")

Role = Literal["controller", "storage", "all"]
Source = Literal["flag", "env", "file", "default"]

# Pairs of settings that must be set together.
_PAIRS: Final = (
    ("tls_cert", "tls_key"),
    ("journal", "cluster"),
    ("etcd_cert", "etcd_key"),
    ("etcd_user", "etcd_password_file"),
)
_SIZE = re.compile(r"\d{1,18}(\.\d{1,18})?\s*(B|[KMGT](i?B)?)?", re.IGNORECASE)
_BYTES: Final = TypeAdapter(ByteSize)


def parse_size(text: object) -> object:
    """Convert a size such as "8GiB", "500 MB" or "1024" to bytes, and "none" to None.

    Values of other types are returned unchanged.

    Raises:
        ValueError: the text is not a valid size.
    """
    if not isinstance(text, str):
        return text
    if text.strip().lower() == "none":
        return None
    if not _SIZE.fullmatch(text.strip()):  # ByteSize also accepts bits, and ignores text after a size
        raise ValueError("expected a size in bytes, such as 8GiB, 500MB or 1048576")
    return int(_BYTES.validate_python(text.strip()))


def format_size(size_bytes: int | None) -> str:
    """Format a size as text from which `parse_size` can restore the exact value. None becomes "none"."""
    if size_bytes is None:
        return "none"
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes and (count := ByteSize(size_bytes).to(unit)).is_integer():
            return f"{count:.0f}{unit}"
    return str(size_bytes)


def format_setting(name: str, value: object) -> str:
    """Format a setting's value as a user would enter it, but without passwords in URLs. None becomes ""."""
    if name.endswith("_bytes") and (value is None or isinstance(value, int)):
        return format_size(value)
    if isinstance(value, str) and "://" in value:
        return redacted(value)
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)


def default_max_bytes() -> int:
    """Return half of the memory available to this process, rounded down to a whole number of MiB.

    The other half remains available for streams and everything else in the process.
    """
    return max(memory_limit_bytes() // 2 // 2**20, 1) * 2**20


def default_shared_memory_dir() -> Path:
    """Return the directory for the shared-memory sockets of the current user."""
    directory = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108  (the service checks that the user owns the directory)
    return Path(directory) / f"tq_service-{os.getuid()}"


def is_loopback(host: str) -> bool:
    """Return whether a server listening on `host` is reachable only from this machine."""
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
        raise ValueError("expected addresses without a user name; set etcd_user and etcd_password_file instead")
    return f"etcd://{','.join(normal_address(each, ETCD_PORT) for each in members.rstrip('/').split(','))}"


ETCD_PORT: Final = 2379
Address = Annotated[str, AfterValidator(normal_address)]
Addresses = Annotated[str, AfterValidator(normal_addresses)]
Journal = Annotated[str, AfterValidator(_checked_journal)]
AdvertisedAddress = Annotated[str, AfterValidator(_checked_address)]  # port default: the listening port
Size = Annotated[int, BeforeValidator(parse_size)]
SizeOrNone = Annotated[int | None, BeforeValidator(parse_size)]


class _Section(BaseModel):
    """A section of the settings. Each subclass's docstring is its section title in the help and the docs."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class _Network(_Section):
    """Network."""

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 for all interfaces.")
    port: int = Field(DEFAULT_PORT, ge=0, le=65535, description="Port to listen on; 0 for any free port.")
    advertise: AdvertisedAddress | None = Field(
        None,
        description="Address (host:port) that clients use to reach this storage service or cluster controller; the "
        "port defaults to the listening port. Default: host name and port for --role storage and for controllers of "
        "a cluster; the controller's address for --role all.",
    )
    controller: Addresses | None = Field(
        None,
        description="Address (host:port) of the controller that this storage service registers with; the port "
        "defaults to 50051. Separate the addresses of several controllers with commas.",
    )
    shared_memory: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Whether clients on this host exchange data with the service through shared memory: on, off, or "
        "auto (on if the operating system and shared_memory_dir permit it).",
    )
    shared_memory_dir: Path = Field(
        default_factory=default_shared_memory_dir,
        description="Directory of the shared-memory socket; the directory's permissions determine which users can use "
        "shared memory. Containers on one host must mount the same directory. Default: tq_service-<uid> in the "
        "temporary directory, accessible only to the current user.",
    )
    bulk: Literal["on", "off"] = Field(
        "on",
        description="Whether clients that can reach the bulk port use separate connections, which can use all CPU "
        "cores, for puts and gets of 2 MiB or more. If off, all data is sent in gRPC messages.",
    )
    bulk_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port for bulk connections, which use the service's listening address and security settings. With "
        "0, the service uses any free port, which firewalls and Kubernetes usually block.",
    )
    bulk_advertise: AdvertisedAddress | None = Field(
        None,
        description="Address (host:port) that clients use to reach the bulk port. If the port is omitted, the bulk "
        "port's own number is used. Default: the host of the storage service's own address.",
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port that serves /metrics for Prometheus; 0 for any free port. The endpoint uses TLS if tls_cert "
        "is set. If auth_tokens_file is set, Prometheus needs a token with the read role and an empty prefix. Requires "
        "tq-service[metrics]. Default: none.",
    )
    metrics_host: str = Field(
        "127.0.0.1", min_length=1, description="Address to serve metrics on; 0.0.0.0 for all interfaces."
    )
    reflection: bool = Field(False, description="Enable gRPC reflection for grpcurl and similar tools.")
    max_message_bytes: Size = Field(
        4 * 2**20,
        ge=4 * 2**20,
        description="Maximum size of a gRPC message; larger requests and transfers are split into several messages.",
    )
    max_metadata_bytes: Size = Field(
        16 * 2**10, ge=2**10, description="Maximum size of a call's metadata (headers, including the token)."
    )
    stall_seconds: float = Field(
        60.0,
        gt=0,
        description="Maximum time that a client may take to send or receive 64 KiB in a streaming call. Slower calls "
        "are aborted, and their memory is released.",
    )
    min_stream_rate_bytes: Size = Field(
        8 * 2**20,
        ge=0,
        description="Minimum combined rate of all put and get streams, in bytes per second; 0 for no minimum. While "
        "puts wait for capacity, each of n streams must reach 1/n of this rate after its first 10 s. Slower streams "
        "are aborted.",
    )


class _Process(_Section):
    """Process."""

    role: Role = Field("all", description="Role of this process: the controller, a storage service, or both (all).")
    uvloop: Literal["auto", "on", "off"] = Field(
        "auto", description="Event loop: uvloop (on), asyncio's default loop (off), or uvloop if installed (auto)."
    )
    grace_seconds: float = Field(15.0, ge=0, description="Time allowed for in-flight calls to finish after SIGTERM.")
    traces: bool = Field(
        False,
        description="Trace calls with OpenTelemetry; the service's spans become children of the clients' spans. Run "
        "the service under opentelemetry-instrument or another program that configures a tracer provider. Requires "
        "tq-service[traces].",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Minimum level to log.")
    log_format: Literal["text", "json"] = Field("text", description="Format of log lines on stderr.")


class _StorageAndDurability(_Section):
    """Storage and durability."""

    storage_id: str | None = Field(
        None,
        description="Unique name of the storage service, which must not change across restarts. Default: host name "
        "and port.",
    )
    max_bytes: SizeOrNone = Field(
        default_factory=default_max_bytes,
        gt=0,
        description="Byte quota of the storage service, such as 8GiB; none for no limit. Default: half of the "
        "available memory.",
    )
    data_dir: Path | None = Field(
        None,
        description="Directory for the service's persistent state, which only one process can use at a time. Default: "
        "none (the state is kept in memory and lost when the service stops).",
    )
    durability: Literal["auto", "memory", "process", "disk"] = Field(
        "auto",
        description="Which failures acknowledged changes survive: none (memory), a process crash (process), or a host "
        "crash (disk). With auto, the level is process if data_dir is set, and memory otherwise.",
    )
    mirror: str | None = Field(
        None,
        min_length=1,
        description="URL of an object store that keeps copies of this storage service's puts on other nodes, such as "
        "s3://bucket/prefix; see docs/engines.md. If this storage service is lost, another service with the same "
        "mirror takes over its puts. Requires --role storage; cannot be combined with data_dir. Default: none.",
    )
    mirror_copies: int = Field(
        1, ge=1, description="Number of copies of each put in the mirror, all on nodes other than this one."
    )
    mirror_required: int = Field(
        1,
        ge=0,
        description="Number of mirror copies required before a put completes. With 0, puts are mirrored in the "
        "background, and the most recent ones are lost if this service is lost.",
    )
    mirror_memory_bytes: Size | None = Field(
        None,
        ge=1,
        description="Memory limit for stored puts, which allows max_bytes to exceed the available memory. Beyond this "
        "limit, the least recently used puts that have mirror copies are evicted. Evicted puts are read back when "
        "accessed. Puts and gets in progress need additional memory. Requires an object store that survives a power "
        "loss. Default: none (all puts stay in memory).",
    )
    mirror_offered_bytes: Size = Field(
        0,
        ge=0,
        description="Memory that this node contributes, in addition to max_bytes, to an object store that pools the "
        "memory of its nodes. This memory stores copies of other nodes' puts.",
    )
    checkpoint_dir: Path | None = Field(
        None,
        description="Directory for checkpoints on the controller's host, preferably on a different disk than "
        "data_dir. Default: the checkpoints subdirectory of data_dir; without data_dir, Checkpoint and Restore calls "
        "are rejected.",
    )
    record: str | None = Field(
        None,
        min_length=1,
        description="Directory or object store URL, such as s3://bucket/prefix, where each batch planned for ranks is "
        "recorded together with its data, for tq-service replay; see docs/recording.md. Requires --role all. If "
        "the directory is on the same file system as data_dir, files are linked instead of copied. Default: none.",
    )
    record_steps: int | None = Field(
        None,
        ge=1,
        description="Maximum number of steps in the recording; beyond this limit, the oldest steps are removed. "
        "Default: unlimited.",
    )
    record_bytes: SizeOrNone = Field(
        None,
        ge=1,
        description="Maximum size of the recording; beyond this limit, the oldest steps are removed. Default: "
        "unlimited.",
    )
    accept_journal_loss: bool = Field(
        False,
        description="Start even if data_dir contains a damaged journal record. Earlier records are kept; the damaged "
        "record and all later ones are dropped. Set this option for a single start only, after reading the error "
        "message from the failed start.",
    )
    put_ttl_seconds: float = Field(300.0, gt=0, description="Time after which an uncommitted put expires.")
    request_record_seconds: float = Field(
        600.0,
        gt=0,
        description="How long responses to mutating requests are kept for retries.",
    )
    request_record_bytes: Size = Field(
        128 * 2**20,
        ge=2**20,
        description="Maximum size of the responses kept for retries; beyond this limit, the oldest responses are "
        "dropped.",
    )


class _Cluster(_Section):
    """Several controllers."""

    journal: Journal | None = Field(
        None,
        description="URL of the journal for a cluster of controllers: etcd://host:port,host:port,... with the client "
        "addresses of the etcd members. One controller leads, and the others follow the journal; if the leader fails, "
        "one of them takes over. Requires --role controller, a cluster name, and a data_dir for each controller's "
        "snapshots. Default: none (the journal is stored in data_dir).",
    )
    cluster: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$",
        description="Name of the controller cluster in etcd, which must be the same on all controllers.",
    )
    lease_seconds: float = Field(
        5.0,
        ge=2,
        le=60,
        description="Duration of the leading controller's lease; if the leader dies, a standby takes over when the "
        "lease expires.",
    )
    etcd_user: str | None = Field(
        None,
        min_length=1,
        description="User name for etcd. Default: none (no authentication).",
    )
    etcd_password_file: Path | None = Field(None, description="File containing the password of etcd_user.")
    etcd_ca: Path | None = Field(
        None,
        description="CA certificates (PEM) for verifying etcd members; setting etcd_ca or etcd_cert enables TLS for "
        "connections to etcd.",
    )
    etcd_cert: Path | None = Field(None, description="Client certificate for etcd, with its chain (PEM).")
    etcd_key: Path | None = Field(None, description="Private key of etcd_cert (PEM, no passphrase).")


class _Batches(_Section):
    """Batches and samplers."""

    max_wait_cap_seconds: float = Field(
        60.0,
        gt=0,
        description="Maximum time that a GetMeta or LookupSamples call waits; clients repeat the call until their own "
        "timeout expires.",
    )
    sampler_timeout_seconds: float = Field(30.0, gt=0, description="Time limit for a sampler to plan one batch.")
    sampler_threads: int = Field(4, ge=1, description="Number of threads reserved for samplers.")
    allow_sampler_import: bool = Field(
        False,
        description="Allow clients to specify samplers as module:Class; the service then imports the module. Default: "
        "true if the service is reachable only from this machine and requires no tokens, otherwise false.",
    )


class _Security(_Section):
    """TLS, tokens and audit."""

    tls_cert: Path | None = Field(
        None,
        description="Service certificate with its chain (PEM); enables TLS. The file is reloaded when it changes.",
    )
    tls_key: Path | None = Field(
        None, description="Private key of tls_cert (PEM, no passphrase); must not be readable by other users."
    )
    tls_client_ca: Path | None = Field(
        None, description="CA certificates (PEM) for mTLS; clients must present a certificate signed by one of them."
    )
    tls_ca: Path | None = Field(
        None,
        description="CA certificates (PEM) for verifying other services. Setting tls_ca or tls_cert enables TLS for "
        "calls to other services, with tls_cert as the client certificate. Default: gRPC's built-in CA certificates.",
    )
    auth_tokens_file: Path | None = Field(
        None,
        description="File containing the digests of valid bearer tokens, written by `tq-service token new`; calls "
        "without a valid token are rejected. The file is reloaded when it changes.",
    )
    peer_token_file: Path | None = Field(
        None,
        description="File containing a token with the service role, which this service presents to other services.",
    )
    internal_secret_file: Path | None = Field(
        None,
        description="File containing the secret shared by the services of one deployment. The secret proves that a "
        "call comes from a service, not from a client. A service with --role controller or --role all creates the "
        "file if it is missing. The file is reloaded when it changes. Default: none if services have tokens with the "
        "service role; a per-user file if all services listen on the loopback address; otherwise none, in which case "
        "services in separate processes do not start.",
    )
    insecure: bool = Field(
        False,
        description="Allow listening on non-loopback addresses without TLS and tokens. Use this only in trusted "
        "networks.",
    )
    audit_file: Path | None = Field(
        None,
        description="File to append the audit log to, with one line per rejected call and per administrative call. "
        "Default: the audit log is written to stderr with the other log lines.",
    )
    audit_repeat_seconds: float = Field(
        0.0,
        ge=0,
        description="Time window in which repeated rejections of the same kind are combined into one log line with a "
        "count, so that rejections cannot fill the disk. 0 logs each rejection separately.",
    )


class _Limits(_Section):
    """Limits."""

    max_connections: int = Field(
        16_384,
        ge=1,
        description="Maximum number of open connections; additional connections are closed.",
    )
    first_call_seconds: float = Field(
        10.0,
        gt=0,
        description="Time limit for the first call on a new connection; if no call is made in time, the connection is "
        "closed. If tokens are required, only calls with a valid token count, and health checks do not count.",
    )
    idle_connection_seconds: float = Field(
        600.0, gt=0, description="Idle time after which a connection is closed; clients reconnect automatically."
    )
    max_streams: int = Field(
        4_096,
        ge=1,
        description="Maximum number of concurrent calls per connection; clients queue additional calls.",
    )
    max_calls: int = Field(65_536, ge=1, description="Maximum number of concurrent calls, excluding health checks.")
    max_waiting_calls: int = Field(32_768, ge=1, description="Maximum number of calls waiting for samples or capacity.")
    max_waiting_calls_per_client: int = Field(
        2_048,
        ge=1,
        description="Maximum number of waiting calls per client (connection).",
    )
    max_watchers: int = Field(
        1_000,
        ge=1,
        description="Maximum number of concurrent calls that watch partitions. All watchers together receive at most "
        "about 100 responses per second.",
    )
    max_puts: int = Field(4_000_000, ge=1, description="Maximum number of puts stored by the storage service.")
    max_uncommitted_puts: int = Field(
        65_536,
        ge=1,
        description="Maximum number of stored puts that are not yet committed to a controller in another process.",
    )
    max_partitions: int = Field(10_000, ge=1, description="Maximum number of partitions.")
    max_policies: int = Field(1_000, ge=1, description="Maximum number of policies with published versions.")
    max_samples: int = Field(
        50_000_000,
        ge=1,
        description="Maximum total number of samples in all partitions; each sample uses about 60 bytes of controller "
        "memory, plus 8 bytes per field.",
    )
    max_fields: int = Field(1_024, ge=1, description="Maximum number of fields per partition.")
    max_tasks: int = Field(256, ge=1, description="Maximum number of tasks per partition.")
    max_meta_columns: int = Field(256, ge=1, description="Maximum number of custom_meta columns per partition.")
    max_sample_meta_bytes: Size = Field(
        16 * 2**10,
        ge=8,
        description="Maximum size of one sample's custom_meta in a single write.",
    )
    max_name_length: int = Field(
        512,
        ge=1,
        description="Maximum length, in characters, of a key or of the name of a group, field, task or custom_meta "
        "column.",
    )


class ServeSettings(_Limits, _Security, _Batches, _Cluster, _StorageAndDurability, _Process, _Network):
    """Settings of `tq-service serve`.

    The description of each setting is shown in the command's help and in the docs. The bases are listed in reverse
    order, because pydantic orders fields from the last base to the first.
    """

    @classmethod
    def section_of(cls, name: str) -> str:
        """Return the title of the section that the setting belongs to."""
        sections = (base for base in cls.__bases__ if issubclass(base, _Section) and name in base.model_fields)
        return inspect.cleandoc(next(sections).__doc__ or "").rstrip(".")

    @model_validator(mode="before")
    @classmethod
    def _import_follows_auth(cls, values: dict[str, Any]) -> dict[str, Any]:
        is_private = is_loopback(str(values.get("host", "127.0.0.1"))) and not values.get("auth_tokens_file")
        return {"allow_sampler_import": is_private, **values}

    @model_validator(mode="after")
    def _fit_together(self) -> ServeSettings:
        for problem in chain(
            self._wrong_in_security(), self._wrong_in_roles(), self._wrong_in_mirror(), self._wrong_in_recording()
        ):
            raise ValueError(problem)
        return self

    def _wrong_in_security(self) -> Iterator[str]:
        for name in ("etcd_user", "etcd_password_file", "etcd_ca", "etcd_cert", "etcd_key"):
            if self.journal is None and getattr(self, name) is not None:
                yield f"{name} requires a journal in etcd; set journal and cluster, or leave {name} out"
        for one, other in _PAIRS:
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                yield f"only one of {one} and {other} is set; set both or neither"
        if self.tls_client_ca is not None and self.tls_cert is None:
            yield "tls_client_ca requires tls_cert and tls_key; set both, or leave tls_client_ca out"
        hosts = [self.host] if self.metrics_port is None else [self.host, self.metrics_host]
        host = next((host for host in hosts if not is_loopback(host)), None)
        if not self.is_secured and host is not None and not self.insecure:
            lacking = [name for name in ("tls_cert", "auth_tokens_file") if getattr(self, name) is None]
            yield (
                f"other machines can reach {host}, but the service has no {' and no '.join(lacking)}; set up TLS and "
                "tokens (docs/security.md), listen on 127.0.0.1, or set insecure if the network itself is trusted"
            )

    def _wrong_in_roles(self) -> Iterator[str]:
        if self.role == "storage" and self.controller is None:
            yield "role is storage, but controller is not set; set controller to an address (host:port)"
        if self.role != "storage" and self.controller is not None:
            yield f"controller is set, but role is {self.role}; expected role storage. Leave one of the two out"
        if self.durability in {"process", "disk"} and self.data_dir is None:
            yield f"durability is {self.durability}, but data_dir is not set; set data_dir to a directory for the state"
        if self.durability == "memory" and self.data_dir is not None:
            yield "durability is memory, but data_dir is set; leave one of the two settings out"
        if self.journal is None:
            return
        if self.role != "controller":
            yield (
                f"journal is set, but role is {self.role}; expected role controller. Run storage services in separate "
                "processes, because their data is tied to one host"
            )
        if self.data_dir is None:
            yield ("journal is set, but data_dir is not; set data_dir to a directory for this controller's snapshots")
        if self.durability != "auto":
            yield f"durability is {self.durability}, but journal is set; leave durability out"

    def _wrong_in_mirror(self) -> Iterator[str]:
        if self.mirror is None:
            given = sorted(name for name in self.model_fields_set if name.startswith("mirror_"))
            if given:
                yield (
                    f"{', '.join(given)} set, but mirror is not; set mirror to the URL of an object store, or leave "
                    "the other mirror settings out"
                )
            return
        if self.role != "storage":
            yield (
                f"mirror is set, but role is {self.role}; expected role storage. Run the storage service in a separate "
                "process, so another storage service can take over its puts"
            )
        if self.data_dir is not None:
            yield "mirror and data_dir are both set, but a mirror replaces the files in data_dir; set only one of them"
        if "://" not in self.mirror:
            yield "mirror is not a URL; expected a URL such as s3://bucket/prefix or file:///mnt/shared"
        if (self.mirror_memory_bytes or 0) > (self.max_bytes or sys.maxsize):
            yield (
                f"mirror_memory_bytes is {self.mirror_memory_bytes}, but max_bytes is {self.max_bytes}; expected at "
                "most max_bytes, the quota for all puts. Raise max_bytes, or leave mirror_memory_bytes out"
            )
        if self.mirror_required > self.mirror_copies:
            yield (
                f"mirror_required is {self.mirror_required}, but mirror_copies is {self.mirror_copies}, so no put "
                "could ever complete. Set mirror_required to at most mirror_copies"
            )

    def _wrong_in_recording(self) -> Iterator[str]:
        if self.record is None:
            for name in ("record_steps", "record_bytes"):
                if getattr(self, name) is not None:
                    yield (
                        f"{name} is set, but record is not; set record to the location of the recording, or leave "
                        f"{name} out"
                    )
        elif self.role != "all":
            yield (
                f"record is set, but role is {self.role}; expected role all, because one process must both store and "
                "plan each recorded batch. Run both in one process, or leave record out"
            )

    @property
    def is_secured(self) -> bool:
        """Whether calls are encrypted and require a token."""
        return self.tls_cert is not None and self.auth_tokens_file is not None

    @property
    def etcd_members(self) -> tuple[str, ...]:
        """Addresses of the etcd members that store the journal."""
        return () if self.journal is None else tuple(self.journal.partition("://")[2].split(","))

    @property
    def effective_durability(self) -> Literal["memory", "process", "disk", "cluster"]:
        """The durability level, with "auto" resolved to the actual level."""
        if self.journal is not None:
            return "cluster"
        if self.durability == "auto":
            return "memory" if self.data_dir is None else "process"
        return self.durability

    def checkpoint_directory(self) -> Path | None:
        """Return the directory for checkpoints, or None if none is configured."""
        if self.checkpoint_dir is None and self.data_dir is not None:
            return self.data_dir / "checkpoints"
        return self.checkpoint_dir

    def advertised_address(self, port: int) -> str:
        """Return the address that clients use to reach this storage service or controller.

        `port` is the listening port. For a storage service in the controller's process, the address is empty, because
        clients use the controller's address.
        """
        if self.advertise is not None:
            return normal_address(self.advertise, port)
        if self.role != "storage" and self.journal is None:
            return ""
        anywhere = self.host in {"0.0.0.0", "::", "[::]"}  # noqa: S104  (only compared, never bound to)
        return join_address(socket.gethostname() if anywhere else self.host, port)

    def bulk_address(self, port: int) -> str:
        """Return the address to send in `StatResponse.bulk_address`, given the listening bulk port."""
        return f":{port}" if self.bulk_advertise is None else normal_address(self.bulk_advertise, port)

    def storage_name(self, port: int) -> str:
        """Return the name of this storage service, which by default contains the host name and the listening port."""
        return self.storage_id or f"{socket.gethostname()}-{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSettings:
    """Merged settings, with the source of each value.

    Attributes:
        settings: the merged settings.
        sources: source of each setting, by setting name.
        config: the settings file that was read, or None if no file was read.
    """

    settings: ServeSettings
    sources: Mapping[str, Source]
    config: Path | None

    def shown(self, name: str) -> str:
        """Format the value of a setting as a user would enter it."""
        return format_setting(name, getattr(self.settings, name))


def load_settings(flags: Mapping[str, object], config: Path | None = None) -> LoadedSettings:
    """Merge settings from flags, `TQ_*` environment variables, the settings file and defaults, in order of precedence.

    Args:
        flags: settings from the command line. Settings whose value is None are ignored.
        config: path of a TOML settings file. If None, the file named by the environment variable TQ_CONFIG is read, if
            set.

    Raises:
        InvalidArgumentError: the file cannot be read or contains unknown settings, or a value is invalid.
    """
    if config is None and os.environ.get(CONFIG_VARIABLE):
        config = Path(os.environ[CONFIG_VARIABLE])
    layers: list[tuple[Source, Mapping[str, object]]] = [
        ("file", _read_file(config) if config else {}),
        ("env", _read_environment()),
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
    """Map each unknown `TQ_*` environment variable of this process to the most similar known name, or to None.

    Most unknown variables are misspelled settings. Neither the service nor the clients read them.
    """
    known = {f"{ENV_PREFIX}{name.upper()}" for name in ServeSettings.model_fields} | CLIENT_VARIABLES
    known.add(CONFIG_VARIABLE)
    found: dict[str, str | None] = {}
    for name, value in sorted(os.environ.items()):
        is_link = _LINK_NAME.fullmatch(name) or (name.endswith("_PORT") and _LINK_VALUE.fullmatch(value))
        if name.startswith(ENV_PREFIX) and name not in known and not is_link:
            found[name] = next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8)), None)
    return found


def _read_environment() -> dict[str, str]:
    """Return the settings that `TQ_*` variables set. Empty variables are ignored."""
    values = {name: os.environ.get(f"{ENV_PREFIX}{name.upper()}") for name in ServeSettings.model_fields}
    return {name: value for name, value in values.items() if value}


def _read_file(path: Path) -> dict[str, object]:
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidArgumentError(f"the settings file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidArgumentError(f"the settings file {path} is not valid TOML: {error}") from None
    known = sorted(ServeSettings.model_fields)
    if unknown := sorted(set(values) - set(known)):
        close = difflib.get_close_matches(unknown[0], known, n=1)
        raise InvalidArgumentError(
            f"the settings file {path} has unknown settings: {', '.join(unknown)};"
            f"{f' did you mean {close[0]}?' if close else ''} known settings: {', '.join(known)}"
        )
    return values


def _explain(error: ValidationError, sources: Mapping[str, Source], config: Path | None) -> str:
    """Describe each invalid setting, with its value, its source, and the expected value."""
    problems = []
    for problem in error.errors(include_url=False):
        reason = problem["msg"].removeprefix("Value error, ")
        if not problem["loc"]:
            problems.append(reason)
            continue
        name = str(problem["loc"][0])
        got = problem["input"]
        if isinstance(got, str) and "@" in got and "://" in got:  # the URL may contain a password
            got = redacted(got)
        place = {
            "flag": f"--{name.replace('_', '-')}",
            "env": f"{ENV_PREFIX}{name.upper()}",
            "file": f"{name} in {config}",
        }.get(sources.get(name, "default"), name)
        reason = f"{place}: got {got!r}: {reason[:1].lower()}{reason[1:]}"
        if sources.get(name) == "env" and isinstance(got, str) and "://" in got:
            reason += (
                " (Kubernetes sets this variable for a Service named tq: rename the Service, or set "
                "enableServiceLinks: false)"
            )
        problems.append(reason)
    return "; ".join(problems)
