"""What a cluster is, and its controllers: written once, or by each of them while it lives."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from tq_service.cluster.etcd import Etcd, is_created_at, put
from tq_service.cluster.keys import ClusterKeys
from tq_service.errors import NewerVersionError
from tq_service.internal.v1 import etcd_pb2 as pb

_FORMAT_VERSION = 1


def controller_id_of(etcd: Etcd, keys: ClusterKeys, proposed: bytes) -> bytes:
    """Return the id that all controllers of a cluster have, the owner of its puts; blocks.

    Args:
        etcd: where the cluster is.
        keys: of the cluster.
        proposed: the id, where this is the first controller, or etcd has lost all: that of its data directory.

    Raises:
        JournalUnreachableError: etcd does not answer.
        NewerVersionError: a newer version has made the cluster.
    """
    about = {"format_version": _FORMAT_VERSION, "controller_id": proposed.hex(), "shards": 1}
    request = pb.EtcdTxnRequest(
        compare=[is_created_at(keys.about, 0)],
        success=[put(keys.about, json.dumps(about).encode())],
        failure=[pb.EtcdRequestOp(request_range=pb.EtcdRangeRequest(key=keys.about))],
    )
    answer: pb.EtcdTxnResponse = etcd.ask(request)
    if not answer.succeeded:
        about = json.loads(answer.responses[0].response_range.kvs[0].value)
    if about["format_version"] != _FORMAT_VERSION or about["shards"] != 1:
        raise NewerVersionError(
            f"cluster {keys.cluster!r} has format {about['format_version']} and {about['shards']} shards, this version "
            f"knows format {_FORMAT_VERSION} and one shard; install a newer version"
        )
    return bytes.fromhex(str(about["controller_id"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecord:
    """A controller of a cluster, as the others see it.

    Attributes:
        member_id: which one it is.
        address: where clients reach it.
        applied_number: of the last record that it has applied.
    """

    member_id: str
    address: str
    applied_number: int


def publish(etcd: Etcd, keys: ClusterKeys, record: MemberRecord, lease_id: int) -> None:
    """Let the others see a controller, until its lease ends; blocks.

    Raises:
        JournalUnreachableError: etcd does not answer.
        InvalidArgumentError: the lease has ended.
    """
    key = keys.members + record.member_id.encode()
    etcd.ask(pb.EtcdTxnRequest(success=[put(key, json.dumps(asdict(record)).encode(), lease_id)]), seconds=0.0)


def published(etcd: Etcd, keys: ClusterKeys) -> list[MemberRecord]:
    """Return the controllers that live; blocks.

    Raises:
        JournalUnreachableError: etcd does not answer.
    """
    return [_member_of(json.loads(each.value)) for each in etcd.get_all(keys.members, seconds=0.0)]


def _member_of(values: dict[str, Any]) -> MemberRecord:
    """Return a controller from what it wrote, which may have more of a newer version."""
    return MemberRecord(**{each.name: values[each.name] for each in fields(MemberRecord)})
