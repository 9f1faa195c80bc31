"""Access control: by the protocol and token of a call, or by the secret that services share, and by its rule."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal
from urllib.parse import unquote

import grpc

from tq_service.errors import (
    PartitionNotFoundError,
    PermissionDeniedError,
    ProtocolMismatchError,
    UnauthenticatedError,
)
from tq_service.server.audit import Audit, AuditLine
from tq_service.server.credential_files import (
    ALL_PARTITIONS,
    INTERNAL_KEY,
    InternalSecret,
    Token,
    TokenFile,
    digest_of,
    make_token,
)
from tq_service.server.rpc.inbox import Progress
from tq_service.server.rpc.methods import (
    Behavior,
    Caller,
    Context,
    EndableCalls,
    Method,
    Middleware,
    Refusal,
    shown_partitions,
    token_name,
)
from tq_service.version import BUILD, PROTOCOL, USER_AGENT
from tq_service.wire.connection import TOKEN_KEY, TOKEN_SCHEME

_SCRAPE: Final = "GET /metrics"  # stands for the method in the lines of scrapes that are refused
_NO_TOKEN: Final = "this service asks for a bearer token, and the call has none; send it as authorization metadata"  # noqa: S105
# The same for both: whether a token was valid once is not revealed to a finder.
_BAD_TOKEN: Final = "the token of the call is not valid: unknown here, or expired; ask for a new one"  # noqa: S105
_NO_PROOF: Final = (
    "this call is between the services of a deployment, which show that they share a secret; clients have other calls. "
    "A service needs the internal_secret_file of the one it calls"
)
_WRONG_PROOF: Final = (
    "the internal secret of the caller is not that of this service; give all services of a deployment the same "
    "internal_secret_file"
)
_AGENT: Final = re.compile(r"tq-service/(\S+) \(protocol (\d+)\)")
_SERVICE: Final = make_token(name="internal-secret", sha256="0" * 64, roles=["service"], prefixes=[ALL_PARTITIONS])
"""Stands for the secret that services share, which lets a call do what a token of role service does."""


class AccessControl(Middleware):
    """Lets calls in, or refuses them before anything of them is done.

    A call without a valid token, or of an internal method without the secret, is refused before anything of it is read;
    one whose token has not the role, or is not for a partition that the request names, once that has been read.

    Args:
        audit: where refusals and administrative calls are written.
        tokens: the tokens that are valid; None: everybody may do everything but call what is internal.
        secret: what the services of this deployment share; None: they know each other by tokens alone.
        stall_seconds: how long the first message of a stream may take, by which it is let in or not.

    Attributes:
        partition_of: returns the partition of a complete put of this storage service, None for one that is not here;
            None: there is no storage service.
        admitted_at: when a call of each connection was first let in, by peer and `time.monotonic`; probes, which need
            no token, do not count if there are tokens. Who follows the connections removes them.
    """

    def __init__(
        self,
        audit: Audit,
        tokens: TokenFile | None = None,
        *,
        secret: InternalSecret | None = None,
        stall_seconds: float = 60.0,
    ) -> None:
        self._audit = audit
        self._tokens = tokens
        self._secret = secret
        self._stall_seconds = stall_seconds
        self._anyone = Caller()
        self._service = Caller(name=_SERVICE.name, token=_SERVICE)
        self._no_proof = _stranger(_NO_PROOF, "no internal secret")
        self._wrong_proof = _stranger(_WRONG_PROOF, "another internal secret")
        self._no_token = _stranger(_NO_TOKEN, "no token")
        self._unknown_token = _stranger(_BAD_TOKEN, "unknown token")
        self._known: Mapping[str, Token] = {}
        self._callers: dict[str, Caller] = {}
        self._lasting = EndableCalls()
        self.admitted_at: dict[str, float] = {}
        self.partition_of: Callable[[bytes], str | None] | None = None

    def end_revoked(self) -> None:
        """End the calls that wait or stream and whose token has expired, or is not in the file as it was."""
        if self._tokens is None:
            return
        known = self._tokens.tokens

        def error_of(token: Token) -> UnauthenticatedError | None:
            is_valid = known.get(token.sha256) == token and not token.is_expired()
            return None if is_valid else UnauthenticatedError(_BAD_TOKEN)

        self._lasting.end(error_of)

    def admit(self, method: Method, details: grpc.HandlerCallDetails) -> Caller:
        """Return the caller, by the metadata of a call."""
        if method.is_open:
            return self._anyone
        metadata = dict(details.invocation_metadata or ())
        if (other := _other_protocol(_text(metadata.get("user-agent")))) is not None:
            return other
        if self._tokens is None and method.roles - {"service"}:
            return self._anyone
        bearer, proof = _bearer(_text(metadata.get(TOKEN_KEY))), _text(metadata.get(INTERNAL_KEY))
        if self._secret is not None and proof and self._secret.accepts(proof):
            return self._service
        if self._tokens is None:
            return self._wrong_proof if proof else self._no_proof
        if bearer is None:
            return self._wrong_proof if proof else self._no_token
        return self._holder(self._tokens, bearer)

    def _holder(self, tokens: TokenFile, secret: str) -> Caller:
        if tokens.tokens is not self._known:  # the file was read again
            self._known, self._callers = tokens.tokens, {}
        digest = digest_of(secret)
        token = self._known.get(digest)
        if token is None:
            return self._unknown_token
        if token.is_expired():
            return _stranger(_BAD_TOKEN, "token has expired", token.name)
        caller = self._callers.get(digest)
        if caller is None:
            caller = self._callers[digest] = Caller(name=token.name, token=token)
        return caller

    def wrap(self, method: Method, caller: Caller, behavior: Behavior) -> Behavior:
        """Return what lets calls of a method by a caller in, or refuses them.

        It looks at the request, or at the first message of a stream, unless the caller is refused whatever it asks for.
        """
        token, refusal = caller.token, caller.refusal
        is_known = refusal is None
        if token is not None:
            refusal = _lack(method, token)
        restricted = None if token is None or ALL_PARTITIONS in token.prefixes else token
        if restricted is not None:
            behavior = _showing_its_own(restricted, behavior)
        # Where everybody may do everything, clearing partitions is daily work, and has no line.
        is_noted = method.is_audited and (token is not None or method.concerns_all)
        # Of a caller with a token, a stream that does not begin is ended here whatever it may do.
        begins = token is not None and method.has_request_stream
        looks_at_request = is_known and (refusal is not None or restricted is not None or is_noted or begins)
        marks_peer = not (method.is_open and self._tokens is not None)

        async def call(request: Any, context: Context) -> Any:
            named: list[str] = []
            if looks_at_request:
                message = request
                if method.has_request_stream:
                    waiting = Progress(self._stall_seconds, "the first message of the stream did not come")
                    message = await waiting.wait_for(request.begin())
                named = self._named_by(method, message)
            if refusal is not None:
                self._note("refused", method, caller, context, named=named, reason=refusal.reason)
                raise refusal.make_error()
            outside = next((each for each in named if restricted is not None and not restricted.covers(each)), None)
            if restricted is not None and outside is not None:
                self._note("refused", method, caller, context, named=[outside], reason="outside its prefixes")
                raise _outside(restricted, outside)
            if is_noted:
                self._note("allowed", method, caller, context, named=named)
            if marks_peer and (peer := context.peer()) not in self.admitted_at:
                self.admitted_at[peer] = time.monotonic()
            token_name.set(caller.name)
            return await behavior(request, context)

        lasts = method.waits or method.has_request_stream or method.has_response_stream
        if token is None or token is _SERVICE or not lasts:
            return call
        return lambda request, context: self._lasting.run(call(request, context), token)

    def refused_scrape(self, loop: asyncio.AbstractEventLoop, authorization: str, peer: str) -> str | None:
        """Return why a scrape of metrics is refused, by its HTTP header, None if it is not; called on threads."""
        if self._tokens is None:
            return None
        token, reason = None, "no token"
        if secret := _bearer(authorization):
            token, reason = self._tokens.tokens.get(digest_of(secret)), "unknown token"
        if token is not None:
            if token.is_expired():
                reason = "token has expired"
            elif not token.roles & {"read", "admin"}:
                reason = "none of the roles admin, read"
            elif ALL_PARTITIONS not in token.prefixes:
                reason = "not for all partitions"
            else:
                return None
        name = "" if token is None else token.name
        line = AuditLine(decision="refused", method=_SCRAPE, peer=peer, token=name, reason=reason)
        loop.call_soon_threadsafe(self._audit.note, line)
        return f"{reason}; a scrape needs a token with the role read, for all partitions"

    def _named_by(self, method: Method, request: Any) -> list[str]:
        """Return the partitions that a request names, by themselves and by their puts."""
        named = list(method.partitions(request))
        if method.put_ids is not None and self.partition_of is not None:
            found = map(self.partition_of, method.put_ids(request))
            # A put that is not here is nothing to protect, and the call fails by itself.
            named += [partition_id for partition_id in found if partition_id is not None]
        return named

    def _note(
        self,
        decision: Literal["refused", "allowed"],
        method: Method,
        caller: Caller,
        context: Context,
        *,
        named: list[str],
        reason: str = "",
    ) -> None:
        certificate = next(iter(context.auth_context().get("x509_common_name", ())), b"")
        self._audit.note(
            AuditLine(
                decision=decision,
                method=method.name,
                peer=unquote(context.peer()),
                certificate=certificate.decode("utf-8", "replace"),
                token=caller.name,
                partition=named[0] if named else "",
                reason=reason,
            )
        )


def _showing_its_own(token: Token, behavior: Behavior) -> Behavior:
    """Return a handler that knows which partitions a token is for, and names no others in its errors."""

    async def call(request: Any, context: Context) -> Any:
        shown_partitions.set(token.covers)
        try:
            return await behavior(request, context)
        except PartitionNotFoundError as error:  # its text names partitions like the one that was asked for
            raise PartitionNotFoundError(
                "there is no such partition; ListPartitions shows those this token is for",
                metadata=error.metadata,
            ) from None

    return call


def _stranger(message: str, reason: str, name: str = "") -> Caller:
    return Caller(name=name, refusal=Refusal(lambda: UnauthenticatedError(message), reason))


def _other_protocol(agent: str) -> Caller | None:
    """Return a caller to refuse, if its user agent names another protocol; clients in other languages name none."""
    if agent.startswith(USER_AGENT) or (match := _AGENT.match(agent)) is None or int(match[2]) == PROTOCOL:
        return None
    build, protocol = match.groups()

    def make_error() -> ProtocolMismatchError:
        return ProtocolMismatchError(
            f"the caller is tq-service {build} with protocol {protocol}; expected protocol {PROTOCOL}, of this "
            f"service, tq-service {BUILD}. Install the same version on both sides.",
            metadata={"got": protocol, "expected": str(PROTOCOL), "version": BUILD},
        )

    return Caller(refusal=Refusal(make_error, "another protocol"))


def _lack(method: Method, token: Token) -> Refusal | None:
    """Return why a token does not allow a method whatever is asked for, None where it may."""
    if not method.roles:
        return _denied("no rule for the method", f"{method.short_name} has no rule in its proto: nothing may call it")
    if not token.roles & method.allowed_roles:
        needed = ", ".join(sorted(method.allowed_roles))
        return _denied(
            f"none of the roles {needed}",
            f"{method.short_name} needs one of the roles {needed}; token {token.name!r} has "
            f"{', '.join(sorted(token.roles))}",
            token=token.name,
            needed_roles=needed,
        )
    if method.concerns_all and ALL_PARTITIONS not in token.prefixes:
        return _denied(
            "not for all partitions",
            f"{method.short_name} concerns all partitions and needs the prefix ''; token {token.name!r} is for "
            f"{_listed(token.prefixes)}",
            token=token.name,
            needed_prefix=ALL_PARTITIONS,
        )
    return None


def _denied(reason: str, message: str, **metadata: str) -> Refusal:
    return Refusal(lambda: PermissionDeniedError(message, metadata=metadata), reason)


def _outside(token: Token, partition_id: str) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"token {token.name!r} is for partitions whose names begin with {_listed(token.prefixes)}; got "
        f"{partition_id[:64]!r}",
        metadata={"token": token.name, "partition_id": partition_id[:64]},
    )


def _listed(prefixes: Iterable[str]) -> str:
    return ", ".join(map(repr, prefixes))


def _text(value: str | bytes | None) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""


def _bearer(authorization: str) -> str | None:
    """Return the bearer token of an authorization header, None if it has none."""
    scheme, _, secret = authorization.partition(" ")
    return secret.strip() if scheme.lower() == TOKEN_SCHEME.strip().lower() else None
