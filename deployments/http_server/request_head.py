"""Checks the head of a request before any other code reads it (RFC 9112). Proxies read heads too, so a head that
can be read in two ways is refused: which host it is for (3.2), and where its body ends (6.1, 6.3). The parser has
checked the grammar, and refuses Content-Length twice or with Transfer-Encoding.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from functools import lru_cache

from deployments.api.base.errors import ApiError, invalid, quoted

_VERSIONS = ("1.0", "1.1")
_HOST = re.compile(
    rb"(?P<name>\[[0-9A-Fa-f:.]+\]|(?:[A-Za-z0-9_.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+)(?::(?P<port>\d{0,5}))?"
)
_MAX_HOST_BYTES = 300
_ABSOLUTE = re.compile(rb"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<host>[^/?#]*)(?P<rest>.*)", re.DOTALL)
_PORTS = {b"http": b"80", b"https": b"443"}
Headers = Sequence[tuple[bytes, bytes]]


def check_framing(version: str, headers: Headers) -> None:
    """Raise `ApiError` 400 or 501 when the version or the coding of the body is not ours."""
    if version not in _VERSIONS:
        raise invalid(f"This server speaks HTTP/1.1, and the request is of HTTP/{version}: use HTTP/1.1.")
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if not codings:
        return
    if version == "1.0":
        raise invalid("HTTP/1.0 has no Transfer-Encoding: send Content-Length, or use HTTP/1.1.")
    names = [name.strip().lower() for name in b",".join(codings).split(b",")]
    if names.count(b"chunked") > 1:
        raise invalid("The body is chunked twice: send Transfer-Encoding: chunked once.")
    if names != [b"chunked"]:
        given = quoted(b", ".join(codings).decode("latin-1"))
        raise ApiError(501, f"The Transfer-Encoding {given} is not known here: send chunked, or Content-Length.")


def origin_form(version: str, target: bytes, headers: Headers) -> bytes:
    """Return the target as path and query. Raises `ApiError` 400 unless it is clear which host it is for."""
    hosts = [value.strip(b" \t") for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version != "1.0"):
        raise invalid(f"The request has {len(hosts)} Host headers: send one, with the host that the URL has.")
    host = _authority(hosts[0], b"http") if hosts else None
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None:
        return target
    scheme, rest = absolute["scheme"].lower(), absolute["rest"]
    if scheme not in _PORTS:
        raise invalid(f"The request's URL has the scheme {quoted(scheme.decode())}: use http.")
    meant = _authority(absolute["host"], scheme)
    if host is not None and meant != _authority(hosts[0], scheme):
        raise invalid("The request's URL and its Host header name different hosts: send the URL's host in Host.")
    return rest if rest.startswith(b"/") else b"/" + rest


@lru_cache(256)
def _authority(given: bytes, scheme: bytes) -> tuple[bytes, bytes]:
    """Return the host and the port that a Host header or a URL names. Raises `ApiError` 400."""
    match = _HOST.fullmatch(given) if len(given) <= _MAX_HOST_BYTES else None
    port = (match["port"] or _PORTS[scheme]) if match else b"65536"
    if match is None or int(port) > 65535 or (given.startswith(b"[") and not _is_address(match["name"])):
        raise invalid(f"{quoted(given.decode('latin-1'))} is not a host: send a name or an address, or HOST:PORT.")
    return match["name"].lower(), port.lstrip(b"0")


def _is_address(name: bytes) -> bool:
    try:
        ipaddress.IPv6Address(name[1:-1].decode())
    except ValueError:
        return False
    return True
