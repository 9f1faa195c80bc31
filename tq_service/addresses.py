"""Parse service addresses, and explain connection failures in plain language."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from tq_service.errors import InvalidArgumentError

DEFAULT_PORT: Final = 50051
DEFAULT_ADDRESS: Final = f"localhost:{DEFAULT_PORT}"

_EXPECTED: Final = f"expected 'host:port', such as '{DEFAULT_ADDRESS}'"
_HOST: Final = re.compile(r"[\w.-]+")
# Prefixes of targets in gRPC's own notation. These targets are passed to gRPC unchanged.
_LOCAL_SCHEMES: Final = ("unix:", "unix-abstract:", "vsock:", "xds:")
# gRPC targets that contain hosts and ports. An ipv4 or ipv6 target may contain several pairs of host and port.
_DNS: Final = re.compile(r"(dns:(?://[^/]*/)?)(.*)", re.DOTALL)
_LIST: Final = re.compile(r"(ipv[46]:)(.*)", re.DOTALL)

# Patterns for gRPC error messages, each with the cause that it indicates. The first matching pattern is used.
_CAUSES: Final = (
    ("connection refused", "connection refused"),
    ("misformatted domain name|domain name not found|errors resolving|dns resolution|lookup|c-ares", "name not found"),
    ("certificate has expired", "the certificate of the service has expired"),
    ("certificate_verify_failed|certificate verify failed", "the certificate of the service is not trusted"),
    ("hostname verification check failed|not in peer certificate", "the certificate of the service names another host"),
    ("handshake|ssl_error", "TLS handshake failed"),
    ("http1|http/2|settings frame as the first", "the server at this address does not speak gRPC"),
    ("timed out|timeout|deadline exceeded", "timed out"),
    ("network is unreachable|no route to host", "no route to the host"),
    ("no such file or directory", "the socket does not exist"),
    ("socket closed|reset by peer|broken pipe|connection closed|end of tcp|goaway|stream removed", "closed by peer"),
)


def parse_address(address: str, name: str = "address", default_port: int = DEFAULT_PORT) -> str:
    """Normalize an address to the form "host:port", using the default port if the port is missing.

    To specify several controllers of a cluster, separate their addresses with commas.

    A host is a name, an IPv4 address, or an IPv6 address in brackets. The brackets are optional in an address without a
    port. gRPC target URIs are also accepted: "dns:...", "ipv4:...", "ipv6:...", "unix:...", "unix-abstract:...",
    "vsock:...", "xds:...".

    Args:
        address: address as the user entered it, or several addresses separated by commas.
        name: name of the argument or setting, for error messages.
        default_port: port to use if the address does not specify one.

    Raises:
        InvalidArgumentError: the address is not valid.
    """
    try:
        return normal_addresses(address, default_port)
    except ValueError as error:
        raise InvalidArgumentError(f"{name}: got {address!r}, {error}", field=name) from None


def normal_address(address: str, default_port: int = DEFAULT_PORT) -> str:
    """Normalize a single address as `parse_address` does, but do not repeat the address in error messages.

    Raises:
        ValueError: the address is not valid.
    """
    if not isinstance(address, str):
        raise ValueError(f"{_EXPECTED}, given as a string")
    if not address:
        raise ValueError(f"{_EXPECTED}; omit it or pass None for the default")
    if address.startswith(_LOCAL_SCHEMES) and not address.endswith(":"):
        return address
    if any(each.isspace() or not each.isprintable() for each in address):
        raise ValueError(f"{_EXPECTED}; remove spaces and control characters")
    if match := _DNS.fullmatch(address):
        return match[1] + _host_and_port(match[2], default_port)
    if match := _LIST.fullmatch(address):
        return match[1] + ",".join(_host_and_port(each, default_port) for each in match[2].split(","))
    return _host_and_port(address, default_port)


def normal_addresses(addresses: str, default_port: int = DEFAULT_PORT) -> str:
    """Normalize an address or a comma-separated list of addresses, as `normal_address` does.

    Raises:
        ValueError: an address is not valid.
    """
    several = split_addresses(addresses) if isinstance(addresses, str) else []
    if len(several) < 2:
        return normal_address(addresses, default_port)
    return ",".join(dict.fromkeys(normal_address(each.strip(), default_port) for each in several))


def split_addresses(addresses: str) -> list[str]:
    """Split a comma-separated list of addresses. gRPC targets that contain commas are not split."""
    if addresses.startswith((*_LOCAL_SCHEMES, "ipv4:", "ipv6:")):
        return [addresses]
    return addresses.split(",")


def hosts_and_ports(address: str) -> list[tuple[str, int]]:
    """Return the (host, port) pairs in a gRPC address.

    The list is empty for Unix sockets and for other targets that only gRPC can resolve.
    """
    if address.startswith(_LOCAL_SCHEMES):
        return []
    if match := _DNS.fullmatch(address) or _LIST.fullmatch(address):
        address = match[2]
    pairs = []
    for each in address.split(","):
        host, _, port = each.rpartition(":")
        if port.isascii() and port.isdecimal():
            pairs.append((host.strip("[]"), int(port)))
    return pairs


def _host_and_port(text: str, default_port: int) -> str:
    scheme, separator, rest = text.partition("://")
    if separator:
        tls = "; enable TLS with tls= or TQ_TLS_CA" if scheme.lower() in {"https", "grpcs"} else ""
        raise ValueError(f"{_EXPECTED}; omit '{scheme}://'{' and the path' if '/' in rest else ''}{tls}")
    if "/" in text:
        raise ValueError(f"{_EXPECTED}; omit the path '/{text.partition('/')[2]}'")
    if _is_ip(text, 6):
        return f"[{text}]:{default_port}"
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]")
        if not bracket or not _is_ip(host, 6) or (port and not port.startswith(":")):
            raise ValueError(f"{_EXPECTED}, or '[::1]:{DEFAULT_PORT}' for an IPv6 address")
        return f"[{host}]:{_port(port[1:]) if port else default_port}"
    host, colon, port = text.partition(":")
    if ":" in port:
        raise ValueError(f"{_EXPECTED}; an IPv6 address with a port needs brackets, such as '[::1]:{DEFAULT_PORT}'")
    if not host:
        raise ValueError(f"{_EXPECTED}; the host is missing")
    if host.isdecimal():
        raise ValueError(
            f"{_EXPECTED}; a host cannot be just a number" + ("" if colon else f"; did you mean 'localhost:{host}'?")
        )
    if not _HOST.fullmatch(host) or (host.replace(".", "").isdecimal() and not _is_ip(host, 4)):
        raise ValueError(f"{_EXPECTED}; {host!r} is neither a valid host name nor an IP address")
    return f"{host}:{_port(port) if colon else default_port}"


def _port(text: str) -> int:
    port = int(text) if text.isascii() and text.isdecimal() and len(text) <= 5 else 0
    if not 1 <= port <= 65535:
        raise ValueError(f"{_EXPECTED}; {text!r} is not a port number from 1 to 65535")
    return port


def _is_ip(text: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False


def cause_of(details: str) -> str:
    """Return the cause of a failed connection in plain words, or gRPC's own message if the cause is unknown."""
    text = details.lower()
    return next((cause for pattern, cause in _CAUSES if re.search(pattern, text)), details)


def redacted(url: str) -> str:
    """Return a URL without its user, password and query, for use in messages and logs."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "(no URL)"
    place = rest.partition("?")[0].partition("#")[0]
    host, slash, path = place.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"
