"""Serves the web page and `/docs`; the assets lie under a path that holds their digest.

The index is never cached and names the digest; so the assets are cached for ever and a new release is seen at
once. No other origin is contacted, and no string is parsed as HTML or script.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from boxcal.app.http.problem_documents import problems
from boxcal.app.http.problems import RouteNotFound

router = APIRouter(include_in_schema=False)

MEDIA_TYPES: Final = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
DOCS_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Swagger UI writes styles into its elements and draws icons from data URLs."""

HEADERS: Final = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
SWAGGER: Final = ("swagger-ui-bundle.js", "swagger-ui.css")
DOCS: Final = """<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8" />
    <meta name="viewport" content="width=device-width, initial-scale=1" />
    <title>boxcal API</title>
    <link rel="icon" href="ui/{assets}/icon.svg" type="image/svg+xml" />
    <link rel="stylesheet" href="ui/{assets}/swagger-ui.css" />
    <script src="ui/{assets}/swagger-ui-bundle.js"></script>
    <script src="ui/{assets}/docs.js"></script>
  </head>
  <body><div id="swagger-ui"></div></body>
</html>
"""


COMMENT: Final = re.compile(rb"^ *(//|/\*\*).*$", re.MULTILINE)


@cache
def assets() -> tuple[str, dict[str, bytes]]:
    """Read the assets once: a digest of all of them, and each by its name; comments become empty lines."""
    found = {
        entry.name: COMMENT.sub(b"", entry.read_bytes())
        for entry in sorted(files(__package__).iterdir(), key=lambda entry: entry.name)
        if any(entry.name.endswith(suffix) for suffix in MEDIA_TYPES)
    }
    for name in SWAGGER:
        found[name] = files("fastapi_offline").joinpath("static", name).read_bytes()
    digest = hashlib.sha256()
    for name, content in found.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16], found


@cache
def index() -> bytes:
    """Return the index, which names the path of the assets."""
    page = files(__package__).joinpath("index.html").read_text(encoding="utf-8")
    return page.replace("{assets}", assets()[0]).encode()


@router.get("/", status_code=307)
async def root(request: Request) -> Response:
    """Redirect to the page; relative, so that it works behind a gateway prefix that nobody has declared."""
    declared = request.app.state.settings.root_path
    return RedirectResponse(f"{declared}/ui/" if declared else "ui/", status_code=307)


@router.get("/ui", status_code=307)
async def without_slash() -> Response:
    """Redirect to the page: relative links need the slash."""
    return RedirectResponse("ui/", status_code=307)


@router.get("/ui/")
async def page() -> Response:
    """Return the index."""
    return _document(index(), CONTENT_SECURITY_POLICY)


@router.get("/docs/", status_code=307)
async def docs_with_slash() -> Response:
    """Redirect to the API documentation: its relative links need a path without the slash."""
    return RedirectResponse("../docs", status_code=307)


@router.get("/docs")
async def docs() -> Response:
    """Return the API documentation: Swagger UI from this service, not from a content delivery network."""
    return _document(DOCS.replace("{assets}", assets()[0]).encode(), DOCS_POLICY)


def _document(content: bytes, policy: str) -> Response:
    headers = {**HEADERS, "Content-Security-Policy": policy, "Cache-Control": "no-cache"}
    return Response(content, media_type="text/html", headers=headers)


@router.get("/ui/{digest}/{name}", responses=problems(RouteNotFound))
async def asset(digest: str, name: str) -> Response:
    """Return an asset; its path changes with its content."""
    current, found = assets()
    if digest != current or name not in found:
        raise RouteNotFound(f"There is no asset {name!r:.100} in the release {digest!r:.100} of the page.")
    suffix = name[name.rindex(".") :]
    headers = {**HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}
    return Response(found[name], media_type=MEDIA_TYPES[suffix], headers=headers)
