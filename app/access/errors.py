"""Errors of access, as leaves of the service's error tree.

BoxcalError
  + Unauthorized          401
  |   - ApiKeyRequired    401  the request has no key
  |   - InvalidApiKey     401  no such key, or it was revoked
  |   - ApiKeyExpired     401  the key has expired
  + Forbidden             403
  |   - InsufficientScope 403  the key does not have the scope of the route
  |   - CrossOrigin       403  a page of another origin sent a request that changes something
  + MisdirectedRequest    421  the header `Host` is none of the names of the service
  + TooManyRequests       429
  |   - RateLimited       429  the key has used its requests of this minute
  |   - ConcurrencyLimited 429 the key has too many requests in progress
  + KeyNotFound           404  no key has this id
  - NoApiKey              500  the service cannot start: it would be open to everyone
"""

from __future__ import annotations

from boxcal.app.http.problems import BoxcalError, NotFound

CHALLENGE = {"WWW-Authenticate": 'Bearer realm="boxcal"'}


class Unauthorized(BoxcalError):
    """The request has no valid API key."""

    status = 401
    type = "unauthorized"
    title = "Unauthorized"

    def __init__(self, detail: str) -> None:
        super().__init__(detail, headers=CHALLENGE)


class ApiKeyRequired(Unauthorized):
    """The request has no API key."""

    type = "api-key-required"
    title = "API key required"


class InvalidApiKey(Unauthorized):
    """No valid key has this value, or it was revoked."""

    type = "invalid-api-key"
    title = "Invalid API key"


class ApiKeyExpired(Unauthorized):
    """The API key has expired."""

    type = "api-key-expired"
    title = "API key expired"


class Forbidden(BoxcalError):
    """The request is not permitted."""

    status = 403
    type = "forbidden"
    title = "Forbidden"


class InsufficientScope(Forbidden):
    """The API key does not have the scope that the route requires."""

    type = "insufficient-scope"
    title = "Insufficient scope"


class CrossOrigin(Forbidden):
    """A web page of another origin may not send this request."""

    type = "cross-origin"
    title = "Cross-origin request"


class MisdirectedRequest(BoxcalError):
    """The `Host` header is not a name of this service (`BOXCAL_ALLOWED_HOSTS`)."""

    status = 421
    type = "misdirected-request"
    title = "Misdirected request"


class TooManyRequests(BoxcalError):
    """The key has reached a limit; `Retry-After` says when to retry."""

    status = 429
    type = "too-many-requests"
    title = "Too many requests"


class RateLimited(TooManyRequests):
    """The API key has used its requests per minute."""

    type = "rate-limited"
    title = "Rate limit exceeded"


class ConcurrencyLimited(TooManyRequests):
    """The API key has its maximum number of requests in progress."""

    type = "concurrency-limited"
    title = "Concurrency limit exceeded"


class NoApiKey(BoxcalError):
    """The service would be open to everyone who can reach its address."""

    type = "no-api-key"
    title = "No API key"


class KeyNotFound(NotFound):
    """No API key has this id."""

    type = "key-not-found"
    title = "API key not found"
