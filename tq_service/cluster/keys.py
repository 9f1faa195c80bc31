"""Where in etcd a cluster of controllers keeps what, and what stands there.

    /tq/<cluster>/0/about            the id of the controller that the cluster is, written once
    /tq/<cluster>/0/leader           the controller that leads, as JSON, under its lease; its epoch is the revision in
                                     which the key was created
    /tq/<cluster>/0/last             the end of the log, see `Position`
    /tq/<cluster>/0/log/<first>/<n>  a batch of records by the number of its first one, in pieces
    /tq/<cluster>/0/members/<id>     a controller, under its lease: its address, what it has applied, its snapshot
    /tq/<cluster>/0/snapshots/<id>   from where on a controller needs the log, beyond its life

The 0 is the shard; there is one.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from tq_service.errors import NewerVersionError

_POSITION: Final = struct.Struct("<4sQQQ")
_POSITION_MAGIC: Final = b"tqp1"


class Position(NamedTuple):
    """The end of the log, or of a prefix of it.

    Attributes:
        number: of the last record before it; 0: there is none.
        epoch: of the leader that wrote it.
        chain: checksum of all up to it, which two different logs do not share.
    """

    number: int
    epoch: int
    chain: int

    def encode(self) -> bytes:
        """Return its bytes."""
        return _POSITION.pack(_POSITION_MAGIC, *self)

    @classmethod
    def decode(cls, data: bytes) -> Position:
        """Return the position from its bytes.

        Raises:
            NewerVersionError: they have another format.
        """
        if len(data) != _POSITION.size or not data.startswith(_POSITION_MAGIC):
            raise NewerVersionError(
                "the journal in etcd was written by a newer version of the service; install that one"
            )
        return cls(*_POSITION.unpack(data)[1:])


BEGINNING: Final = Position(0, 0, 0)


class ClusterKeys:
    """The keys of a cluster.

    Args:
        cluster: its name.
    """

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        self.prefix = f"/tq/{cluster}/0/".encode()
        self.about = self.prefix + b"about"
        self.leader = self.prefix + b"leader"
        self.last = self.prefix + b"last"
        self.log = self.prefix + b"log/"
        self.members = self.prefix + b"members/"
        self.snapshots = self.prefix + b"snapshots/"

    def batch(self, first: int, piece: int = 0) -> bytes:
        """Return the key of a piece of the batch that begins with a record."""
        return self.log + b"%016x/%04x" % (first, piece)

    def batches_from(self, first: int) -> bytes:
        """Return where the keys of batches from a record on begin."""
        return self.log + b"%016x" % first

    def first_of(self, key: bytes) -> int:
        """Return the first record of the batch whose piece has a key."""
        return int(key[len(self.log) :].partition(b"/")[0], 16)
