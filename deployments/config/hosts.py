"""The names under which clients reach the API, and the sites whose pages may use it, as settings write them."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

LOCAL_HOSTS = ("localhost", "*.localhost", "127.0.0.0/8", "::1")
"""The names and addresses of a machine for itself."""
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*\.?")


def is_local(host: str) -> bool:
    """Whether only this machine can connect to a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_host(given: str) -> str:
    """Return a host as `ingresses.allowed_hosts` has it. Raises ValueError when it is none."""
    if given == "*" or _NAME.fullmatch(given):
        return given
    try:
        ipaddress.ip_network(given)
    except ValueError:
        raise ValueError(
            f'{given!r} is not a host: give a name such as "api.example.com", "*.example.com" for all names below '
            'it, an address or a network such as "10.0.0.0/8", or "*" for any host; without a scheme and a port'
        ) from None
    return given


def check_origin(given: str) -> str:
    """Return an origin as browsers write it, or "*". Raises ValueError when it is none."""
    url = urlsplit(given)
    if given != "*" and (url.scheme not in ("http", "https") or given != f"{url.scheme}://{url.netloc}".lower()):
        raise ValueError(
            f"{given!r} is not an origin: give scheme, host and port as browsers do, such as "
            '"https://app.example.com", without a path or a slash at the end; or "*" for any'
        )
    return given
