"""Keeps web pages of other sites from using the service through the browser of a visitor.

A page can send requests to any address that the browser reaches, 127.0.0.1 included. Two checks are made:
`Host` must be a name of the service (with DNS rebinding, another name leads here), and a request that may
change something must not come from a page of another origin.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import Final

from boxcal.app.http.problems import CrossOrigin, MisdirectedRequest
from boxcal.app.settings.service import Settings

LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
ANY: Final = "*"


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class BrowserRules:
    """Which `Host` and which origins a request may have."""

    def __init__(self, settings: Settings) -> None:
        hosts = settings.allowed_host_names
        if not hosts:
            hosts = (*LOOPBACK_NAMES, settings.address) if is_loopback(settings.address) else (ANY,)
        self._hosts = frozenset(name.lower() for name in hosts)
        # Probes and scrapes send the address of the pod. A page that comes from an address was not rebound:
        # that takes a name.
        self._any_address = bool(settings.allowed_host_names)
        self._origins = frozenset(origin.encode() for origin in settings.cors_origin_list)
        # Clients send the same few values, which are checked once; the number of those kept is bounded.
        self.check = lru_cache(maxsize=256)(self._check)

    def _check(self, method: str, host: bytes, origin: bytes, site: bytes) -> None:
        """Refuse a request with a foreign name or origin.

        `host`, `origin`, `site`: the headers `Host`, `Origin` and `Sec-Fetch-Site`; empty where there is
        none.
        """
        if not self._is_own_name(host):
            raise MisdirectedRequest(
                f"{host.decode('latin-1')!r:.200} is not a name of this service; "
                f"BOXCAL_ALLOWED_HOSTS allows {', '.join(sorted(self._hosts))}."
            )
        if (origin or site) and method not in SAFE_METHODS:
            self._check_origin(method, host, origin, site)

    def _check_origin(self, method: str, host: bytes, origin: bytes, site: bytes) -> None:
        """Browsers send `Sec-Fetch-Site` to trustworthy addresses, and `Origin` with every unsafe method."""
        if origin in self._origins or site in (b"same-origin", b"none"):
            return
        if not site and origin.partition(b"://")[2] == host:
            return
        raise CrossOrigin(
            f"A web page of {origin.decode('latin-1') or 'another origin'!r:.200} may not send {method} "
            "requests; BOXCAL_CORS_ORIGINS allows origins."
        )

    def _is_own_name(self, host: bytes) -> bool:
        if ANY in self._hosts or not host:  # only HTTP/1.0, which no browser speaks, may have no `Host`
            return True
        name = host.decode("latin-1").lower()
        start, colon, port = name.rpartition(":")
        bare = start if colon and port.isdigit() else name
        return bare in self._hosts or (self._any_address and _is_address(bare))


def _is_address(name: str) -> bool:
    """Whether a `Host` without its port is an IP address; one of version 6 stands in brackets."""
    bracketed = name.startswith("[") and name.endswith("]")
    try:
        return ipaddress.ip_address(name[1:-1] if bracketed else name).version == (6 if bracketed else 4)
    except ValueError:
        return False
