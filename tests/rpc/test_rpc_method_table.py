"""The table of methods, read from the protos."""

from __future__ import annotations

import itertools

import pytest

from tq_service.server.error_boundary import _FILL_THE_DISK, _WAIT_FOR_NOTHING
from tq_service.server.permissions import OPEN_METHODS, rules
from tq_service.server.rpc.method_table import METHODS
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1 import storage_service_pb2 as storage_pb

RULES = rules(lambda put_id: put_id.decode())
READ_ONLY = {
    "CheckConsumption", "CheckProduction", "LookupSamples", "Locate", "ListPartitions", "DescribePartition",
    "ListSamplers", "PlacePut", "Get", "GetSmall", "Stat",
}  # fmt: skip


def test_it_says_what_the_tables_of_strings_say() -> None:
    assert METHODS.keys() == RULES.keys() | OPEN_METHODS
    for name, method in METHODS.items():
        assert method.is_open == (name in OPEN_METHODS)
        assert method.fills_disk == (name in _FILL_THE_DISK)
        if name.startswith("/tq_service"):
            assert method.changes_state == (method.short_name not in READ_ONLY)
        if not method.short_name.startswith(("Get", "ServerReflection")):  # of streams no list said it
            assert method.is_answer_durable == (name in _WAIT_FOR_NOTHING)
        if method.is_open:
            continue
        rule = RULES[name]
        assert method.roles == rule.roles
        assert method.allowed_roles == rule.allowed_roles
        assert method.is_internal == rule.is_internal
        assert method.concerns_all == rule.is_whole
        assert method.is_audited == rule.is_audited
        assert method.lists_partitions == rule.lists_partitions


_IDS = [pb.SampleWrite(partition_id="a"), pb.SampleWrite()]
_HEADERS = [
    storage_pb.PutHeader(partition_id="b"),
    storage_pb.PutHeader(partition_id="b", commit=pb.CommitRequest(write=pb.SampleWrite(partition_id="c"))),
    storage_pb.PutHeader(partition_id="b", commit=pb.CommitRequest(write=pb.SampleWrite())),
]
_GET = storage_pb.GetRequest(put_ids=[b"d", b"e"])


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        *(("Insert", pb.InsertRequest(write=write)) for write in _IDS),
        *(("Commit", pb.CommitRequest(write=write)) for write in _IDS),
        *(("Put", header) for header in _HEADERS),
        *(("PutSmall", storage_pb.PutSmallRequest(header=header)) for header in _HEADERS),
        ("Get", _GET),
        ("GetSmall", storage_pb.GetSmallRequest(get=_GET)),
        ("Stat", storage_pb.StatRequest()),
    ],
)
def test_partitions_are_found_where_the_rules_find_them(name: str, request_: object) -> None:
    (full,) = (each for each in METHODS if each.endswith(f"/{name}"))
    method = METHODS[full]
    found = [*method.partitions(request_), *(put_id.decode() for put_id in method.put_ids(request_))]
    assert found == list(RULES[full].partitions(request_))


def test_every_method_with_one_partition_names_it() -> None:
    services = itertools.chain(*(file.DESCRIPTOR.services_by_name.values() for file in (pb, storage_pb)))
    for service in services:
        for described in service.methods:
            if "partition_id" in described.input_type.fields_by_name and described.name not in {"ConfirmPut"}:
                request = described.input_type._concrete_class(partition_id="x")
                name = f"/{service.full_name}/{described.name}"
                assert METHODS[name].partitions(request) == list(RULES[name].partitions(request)) == ["x"]
