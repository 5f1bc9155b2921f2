"""API keys: how they are written, and how they are checked.

A key is ``boxcal_``, an id of 16 hexadecimal digits, ``_`` and a secret of 256 random bits in base64url. The
registry stores the id, a salt and SHA-256(salt + secret). A slow hash such as Argon2 protects secrets that
people choose, because these can be guessed. A secret of 256 random bits cannot be guessed at any speed, so
one SHA-256 is enough, and every request can afford it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from dataclasses import dataclass
from datetime import datetime

from boxcal.app.http.scopes import Scope

PREFIX = b"boxcal_"
ID_DIGITS = 16
SECRET_BYTES = 32
SALT_BYTES = 16
SECRET_STARTS = len(PREFIX) + ID_DIGITS + 1
KEY_LENGTH = SECRET_STARTS + 43
"""Of a whole key: 32 bytes are 43 characters of base64url without padding."""


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """An API key as the registry stores it; the secret is in no record."""

    id: str
    name: str
    salt: bytes
    digest: bytes  # SHA-256 of salt and secret
    scopes: frozenset[Scope]
    per_minute: int | None  # Limits of requests, for each replica; None for no limit
    concurrency: int | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None


def new_id() -> str:
    """Draw the id of a new key."""
    return secrets.token_hex(ID_DIGITS // 2)


def new_secret() -> str:
    """Draw a secret of 256 random bits."""
    return base64.urlsafe_b64encode(secrets.token_bytes(SECRET_BYTES)).rstrip(b"=").decode()


def written(key_id: str, secret: str) -> str:
    return f"{PREFIX.decode()}{key_id}_{secret}"


def digest_of(salt: bytes, secret: bytes) -> bytes:
    """Return SHA-256(salt + secret)."""
    return hashlib.sha256(salt + secret).digest()


def parts(key: bytes) -> tuple[bytes, bytes]:
    """Split a whole key into its id and secret; both are meaningless if it is not one."""
    return key[len(PREFIX) : SECRET_STARTS - 1], key[SECRET_STARTS:]


def matches(salt: bytes, digest: bytes, secret: bytes) -> bool:
    """Compare a secret with a stored digest, in a time that does not depend on where they differ."""
    return hmac.compare_digest(digest_of(salt, secret), digest)


def key_of(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the key of `Authorization: Bearer KEY` or `X-API-Key: KEY`; empty if there is none."""
    key = b""
    for name, value in headers:
        if name == b"authorization":
            if value[:7].lower() == b"bearer ":
                return value[7:].strip()
        elif name == b"x-api-key":
            key = value.strip()
    return key
