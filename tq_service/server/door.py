"""The door: lets a call in by its token, or refuses it before anything of it is read or done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

import grpc

from tq_service.errors import PermissionDeniedError, TqError, UnauthenticatedError
from tq_service.server.audit import Audit
from tq_service.server.gate import Gate, listed, short_name
from tq_service.server.internal_secret import INTERNAL_KEY, InternalSecret
from tq_service.server.permissions import OPEN_METHODS, Rule
from tq_service.server.tokens import ALL_PARTITIONS, Token, TokenFile, digest_of
from tq_service.wire.credentials import TOKEN_KEY, TOKEN_SCHEME

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_NO_TOKEN: Final = "this service asks for a bearer token, and the call has none; set TQ_TOKEN or TQ_TOKEN_FILE"  # noqa: S105
# The same for both: whether a token was valid once is nothing to tell to whoever found it.
_BAD_TOKEN: Final = "the token of the call is not valid: unknown here, or expired; ask for a new one"  # noqa: S105
_NO_PROOF: Final = (
    "this call is between the services of a deployment, which show that they share a secret; clients have other calls. "
    "A service needs the internal_secret_file of the one it calls"
)
_WRONG_PROOF: Final = (
    "the internal secret of the caller is not that of this service; give all services of a deployment the same "
    "internal_secret_file"
)
_SERVICE: Final = Token(name="internal-secret", digest=b"", roles=frozenset({"service"}))
"""Stands for the secret that services share, which lets a call do what a token of role service does."""


class Door:
    """Decides who comes in. Confined to one event loop.

    Args:
        rules: what a call of each method needs; a method without a rule is refused.
        audit: where refusals and administrative calls are written.
        tokens: the tokens that are valid; None: everybody may do everything but call what is internal.
        secret: what the services of this deployment share; None: they know each other by tokens alone.
        stall_seconds: how long the first message of a stream may take, by which it is let in or not.
    """

    def __init__(
        self,
        rules: Mapping[str, Rule],
        audit: Audit,
        tokens: TokenFile | None = None,
        *,
        secret: InternalSecret | None = None,
        stall_seconds: float = 60.0,
    ) -> None:
        self._rules = rules
        self._audit = audit
        self._tokens = tokens
        self._secret = secret
        self._for_clients = frozenset(method for method, rule in rules.items() if not rule.is_internal)
        self._stall_seconds = stall_seconds
        self._open = Entry()
        self._without_rules = Entry(self._open_gate)
        self._with_secret = Entry(lambda method: self._token_gate(method, _SERVICE))
        self._no_proof = Entry(lambda method: self._shut_gate(method, _NO_PROOF, "no internal secret"))
        self._wrong_proof = Entry(lambda method: self._shut_gate(method, _WRONG_PROOF, "another internal secret"))
        self._missing = Entry(lambda method: self._shut_gate(method, _NO_TOKEN, "no token"))
        self._unknown = Entry(lambda method: self._shut_gate(method, _BAD_TOKEN, "unknown token"))
        self._known: Mapping[bytes, Token] = {}
        self._entries: dict[bytes, Entry] = {}

    def entry(self, details: grpc.HandlerCallDetails) -> Entry:
        """Return the entry that a call takes."""
        if details.method in OPEN_METHODS:
            return self._open
        if self._tokens is None and details.method in self._for_clients:
            return self._without_rules
        bearer, proof = _shown_by(details.invocation_metadata or ())
        if self._secret is not None and proof is not None and self._secret.accepts(proof):
            return self._with_secret
        if self._tokens is None:
            return self._no_proof if proof is None else self._wrong_proof
        if bearer is None and proof is not None:
            return self._wrong_proof
        return self._token_entry(self._tokens, bearer)

    def _token_entry(self, tokens: TokenFile, secret: str | None) -> Entry:
        if tokens.tokens is not self._known:  # the file was read again
            self._known, self._entries = tokens.tokens, {}
        if secret is None:
            return self._missing
        digest = digest_of(secret)
        token = self._known.get(digest)
        if token is None:
            return self._unknown
        if token.is_expired():
            return Entry(lambda method: self._shut_gate(method, _BAD_TOKEN, "token has expired", token.name))
        entry = self._entries.get(digest)
        if entry is None:
            entry = self._entries[digest] = Entry(lambda method: self._token_gate(method, token))
        return entry

    def _open_gate(self, method: str) -> Gate | None:
        # Where everybody may do everything, clearing partitions is daily work.
        rule = self._rules.get(method)
        is_noted = rule is not None and rule.is_audited and rule.is_whole
        return Gate(method, self._audit, rule=rule) if is_noted else None

    def _shut_gate(self, method: str, message: str, reason: str, token_name: str = "") -> Gate:
        refusal = UnauthenticatedError(message)
        return Gate(method, self._audit, refusal=refusal, reason=reason, token_name=token_name)

    def _token_gate(self, method: str, token: Token) -> Gate:
        rule = self._rules.get(method)
        refusal: TqError | None = None
        reason = ""
        if rule is None:
            reason = "no rule for the method"
            refusal = PermissionDeniedError(f"{short_name(method)} has no rule that says who may call it")
        elif not token.roles & rule.allowed_roles:
            needed = ", ".join(sorted(rule.allowed_roles))
            reason = f"none of the roles {needed}"
            refusal = PermissionDeniedError(
                f"{short_name(method)} needs one of the roles {needed}; token {token.name!r} has "
                f"{', '.join(sorted(token.roles))}",
                metadata={"token": token.name, "needed_roles": needed},
            )
        elif rule.is_whole and ALL_PARTITIONS not in token.prefixes:
            reason = "not for all partitions"
            refusal = PermissionDeniedError(
                f"{short_name(method)} concerns all partitions and needs the prefix ''; token {token.name!r} is for "
                f"{listed(token.prefixes)}",
                metadata={"token": token.name, "needed_prefix": ALL_PARTITIONS},
            )
        return Gate(
            method,
            self._audit,
            rule=rule,
            token=token,
            refusal=refusal,
            reason=reason,
            token_name=token.name,
            stall_seconds=self._stall_seconds,
        )


class Entry:
    """The way in of one token, or of all calls without a valid one.

    Args:
        make_gate: returns what calls of a method must pass, None for nothing.

    Attributes:
        handlers: handlers that are ready for calls, by method; they are kept here to go with the token.
    """

    def __init__(self, make_gate: Callable[[str], Gate | None] = lambda _method: None) -> None:
        self._make_gate = make_gate
        self.handlers: dict[str, Handler] = {}

    def guard(self, handler: Handler, method: str) -> Handler:
        """Return a handler that is reached through the gate only."""
        gate = self._make_gate(method)
        return handler if gate is None else gate.guard(handler)


def _shown_by(metadata: Iterable[Any]) -> tuple[str | None, str | None]:
    """Return the bearer token and the proof of the internal secret that a call carries."""
    bearer = proof = None
    for key, value in metadata:
        if key == TOKEN_KEY and bearer is None:
            text = value if isinstance(value, str) else value.decode("utf-8", "replace")
            scheme, _, secret = text.partition(" ")
            bearer = secret if scheme.lower() == TOKEN_SCHEME.strip().lower() else None
        elif key == INTERNAL_KEY:
            proof = value if isinstance(value, str) else value.decode("utf-8", "replace")
    return bearer, proof
