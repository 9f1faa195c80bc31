"""The channels of one client: one for each address, opened on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tq_service.client.channel import CHANNEL_OPTIONS, controller_stub, get_call, health_stub, put_call, storage_stub
from tq_service.client.concurrency import AsyncHome
from tq_service.client.outage import Outage
from tq_service.client.sent_sizes import SentSizes
from tq_service.dataplane.shared_memory.client import HostLink
from tq_service.errors import PreconditionError
from tq_service.wire.credentials import Credentials, async_open_channel

if TYPE_CHECKING:
    from tq_service.client.channel import AsyncControllerStub, AsyncStorageStub

# Channels of a parent process: closing them in a forked child would hang, and so may their destructors.
_ABANDONED: Final[list[object]] = []


class AsyncEndpoint:
    """A channel to one address, and the calls on it."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.address = address
        self.metadata = credentials.metadata
        self.opened_with = credentials.signature()
        self.channel = async_open_channel(address, credentials, CHANNEL_OPTIONS)
        self.controller: AsyncControllerStub = controller_stub(self.channel)
        self.storage: AsyncStorageStub = storage_stub(self.channel)
        self.health: Any = health_stub(self.channel)
        self.put: Any = put_call(self.channel)
        self.get: Any = get_call(self.channel)
        self.link = HostLink()
        self.outage = Outage(address)
        self.sent_sizes = SentSizes()


class AsyncChannels:
    """Opens channels where they are first used, and anew where the old ones no longer work.

    Attributes:
        closed: whether `aclose` was called.
    """

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.address = address
        self.credentials = credentials
        self._home = AsyncHome()
        self._endpoints: dict[str, AsyncEndpoint] = {}
        self._outdated: list[AsyncEndpoint] = []
        self.closed = False

    def endpoint(self, address: str = "") -> AsyncEndpoint:
        """Return the channel to an address; an empty one is the client's own.

        Raises:
            ForkedClientError: the channels belong to another process or event loop and cannot be opened anew.
            PreconditionError: the client is closed.
            InvalidArgumentError: the credentials cannot be used for this address.
        """
        self._check_open()
        if self._home.moved():
            self._abandon()
        target = address or self.address
        # No lock, which a fork could leave locked: threads that race make two channels, and all use the first stored.
        endpoint = self._endpoints.get(target) or self._endpoints.setdefault(
            target, AsyncEndpoint(target, self.credentials)
        )
        self._check_open()  # again, for a thread that closed the client before this channel was there to be closed
        return endpoint

    def _check_open(self) -> None:
        if self.closed:
            raise PreconditionError("the client is closed; make a new one")

    def follow_files(self) -> None:
        """Leave channels whose certificates have been replaced since; calls that are under way on them may end."""
        signature = self.credentials.signature()
        for address, endpoint in list(self._endpoints.items()):
            if endpoint.opened_with != signature and self._endpoints.pop(address, None) is endpoint:
                endpoint.link.close()
                self._outdated.append(endpoint)

    def _abandon(self) -> None:
        """Leave the channels of a parent process."""
        _ABANDONED.append((self._endpoints, self._outdated))
        self._endpoints, self._outdated = {}, []
        self._home = AsyncHome()  # last: until then other threads of the child leave them, too

    async def aclose(self) -> None:
        """Close all channels; calls that are still running are cancelled."""
        self.closed = True
        if self._endpoints and self._home.moved():
            self._abandon()
        while self._endpoints:
            _, endpoint = self._endpoints.popitem()
            self._outdated.append(endpoint)
        while self._outdated:
            endpoint = self._outdated.pop()
            endpoint.link.close()
            await endpoint.channel.close()
