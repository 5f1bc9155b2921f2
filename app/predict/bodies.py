"""Reads the body of a request, of each content type of the contract, and its options."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from boxcal.app.http.dependencies import MODEL, check_repeats
from boxcal.app.http.forms import MAX_HEADER_BYTES, delimiter_of, parts
from boxcal.app.http.limits import UNCOUNTED_BYTES
from boxcal.app.http.problems import (
    BadRequest,
    BodyTooLarge,
    BoxcalError,
    InvalidParameter,
    MalformedBody,
    UnsupportedMediaType,
)
from boxcal.app.predict import options as request_options
from boxcal.app.predict.options import Options
from boxcal.app.settings import limits
from boxcal.calibrators.scores import KINDS

IMAGES = ("image/jpeg", "image/png", "image/webp")
JSON = "application/json"
FORM = "multipart/form-data"
NPY = "application/x-npy"
CSV = "text/csv"
TEXT = "text/plain"
PREDICT_TYPES = (*IMAGES, FORM, JSON, NPY, CSV, TEXT)
CALIBRATE_TYPES = (JSON, NPY)
JSON_ALTERNATIVES = {
    PREDICT_TYPES: (*IMAGES, FORM, NPY, "binary tensors to /v2"),
    CALIBRATE_TYPES: (NPY, "binary tensors to /v2"),
}
"""In which forms a route takes more than a JSON body may have."""
QUICK_BYTES = 64 * 1024
"""Parsed on the event loop, in a millisecond."""
MAX_CONTAINERS = 250_000
"""Lists and objects of a JSON body: an empty one has 2 bytes, and takes 70."""
MAX_NAMED = 300_000
"""Lists, objects and members of a JSON body, by brackets and colons: a member with a new name takes .2 us."""
MAX_STRINGS = 750_000
"""Of a JSON body, counted by their quotation marks: one takes 60 ns."""
LIST_BYTES, OBJECT_BYTES, MEMBER_BYTES = 144, 200, 56
"""Of memory that each of a JSON body takes, at most, a list with its first number. More numbers take 8 times
their text, a string 14 times."""
NEW_NAME_BYTES = 144
"""More, for each member beyond 16 of an object: names that differ are not shared."""
SHORT_LIST, SHORT_STRING = 11, 5
"""Bytes of a body for each of its lists, and for each string that is no name. Where there are fewer, a parser
reads it that takes no memory for a tree of its own, 16 bytes or more a value, and up to twice the time."""
MOST_GROWTH = 20
"""Times its size may a JSON body or a message of gRPC take, also while it is parsed."""
NAN_LIMIT = 2**20
"""Bodies up to this size that are JSON except for NaN are parsed again to name the number."""
MAX_PARTS = 1001
"""Of a form: its files and the options."""
ALIGNMENT = 8
"""Bytes of the largest number in an array; the compiled loops read aligned numbers without a copy."""
COPIED = 2**20
"""Up to this many bytes are copied on the event loop: a tenth of a millisecond."""
SCORES = KINDS
"""What `/calibrate` takes: a member of a JSON body, or the query parameter `scores` with an array."""
WRITTEN = {
    "image": '{"image": "<base64>"}',
    "tensor": '{"tensor": [...]}',
    "features": '{"features": [...]}',
    "text": '{"text": "..."}',
    "tokens": '{"tokens": {...}}',
}
"""One input of a JSON body, of each kind."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class RequestBody:
    kind: str
    # The body's bytes; of JSON and forms, its inputs: the member that the route names, or the files
    content: Any
    member: str  # The member of a JSON body that holds the inputs, or its equivalent for other bodies
    options: Options
    size: int  # Bytes of the body


async def read(
    request: Request,
    kinds: tuple[str, ...],
    members: tuple[str, ...],
    check_room: Callable[[Options], None] | None = None,
) -> RequestBody:
    """Read a body and the options, which JSON and forms hold and other bodies have in the query string.

    `check_room`: called before any byte of the body is read, with the options as far as they are known; may
    refuse.
    """
    kind = header(request, b"content-type").partition(";")[0].strip().lower()
    if kind not in kinds:
        sent = f"{kind!r:.100}" if kind else "missing"
        raise UnsupportedMediaType(f"The content type is {sent}; this route accepts {', '.join(kinds)}.")
    holds_options = kind in (JSON, FORM)
    if holds_options and request.scope["query_string"]:
        _check_defaults(request, members)
    options, member = request_options.DEFAULT, members[0]
    if not holds_options and request.scope["query_string"]:
        query = _options_in_query(request)
        if len(members) > 1:
            member = query.pop("scores", member)
            if member not in members:
                raise InvalidParameter(f"scores is {member!r:.100}; it must be {' or '.join(members)}.")
        options = request_options.from_query(query)
    if check_room is not None:
        with request_options.timeout_of(options):
            check_room(options)
    if kind == FORM:
        files, document = await _read_form(request)
        options = request_options.from_json(document)
        return RequestBody(kind, files, member, options, sum(map(len, files)))
    if kind != JSON:
        body = await read_body(request)
        return RequestBody(kind, body, member, options, len(body))
    body = await read_json(request, JSON_ALTERNATIVES[kinds])
    parsed = await unblocked(len(body), json_object, body, (*members, "options"))
    options = request_options.from_json(parsed.get("options"))
    given = [name for name in members if name in parsed]
    if len(given) > 1:
        raise InvalidParameter(f"The body has {' and '.join(map(repr, given))}; give one of them.")
    member = given[0] if given else member
    return RequestBody(kind, parsed.get(member), member, options, len(body))


def _check_defaults(request: Request, members: tuple[str, ...]) -> None:
    """Refuse options in the query beside a body that holds them; generated clients send the defaults."""
    query = _options_in_query(request)
    if query.get("scores") == members[0]:
        del query["scores"]
    if request_options.from_query(query) != request_options.DEFAULT:
        raise InvalidParameter(
            "Options of a JSON or multipart body belong in its `options`, not in the query string."
        )


def _options_in_query(request: Request) -> dict[str, str]:
    """Return the query string without the name of the model, which has chosen who reads it."""
    check_repeats(request)
    query = dict(request.query_params)
    query.pop(MODEL, None)
    return query


async def unblocked(size: int, work: Callable[..., T], *arguments: Any, copied: int = 0) -> T:
    """Call `work` directly for up to `QUICK_BYTES` bytes, and `COPIED` only copied; in a thread for more."""
    if size <= QUICK_BYTES and copied <= COPIED:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)


def header(request: Request, name: bytes) -> str:
    """Return a header by its name in lower case, or an empty string."""
    for key, value in request.scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return ""


async def read_json(request: Request, others: Sequence[str]) -> bytes:
    announced = header(request, b"content-length")
    if announced.isdecimal() and int(announced[:20]) > limits.MAX_JSON_BYTES:
        raise _too_large(others)
    chunks = await _chunks(request, limits.MAX_JSON_BYTES)
    if sum(map(len, chunks)) > limits.MAX_JSON_BYTES:
        raise _too_large(others)
    return chunks[0] if len(chunks) == 1 else await _joined(chunks)


def _too_large(others: Sequence[str]) -> BoxcalError:
    most = f"{limits.MAX_JSON_BYTES:,}"
    return BodyTooLarge(f"A JSON body has at most {most} bytes; send more as {' or '.join(others)}.")


async def read_body(request: Request) -> bytes:
    chunks = await _chunks(request)
    return chunks[0] if len(chunks) == 1 else await _joined(chunks)


async def read_tensors(request: Request, start: int) -> memoryview:
    """Receive a whole body, in which binary numbers begin at `start`: aligned if it is a long one."""
    chunks = await _chunks(request)
    if len(chunks) == 1:
        return memoryview(chunks[0])
    padding = -start % ALIGNMENT
    return memoryview(await _joined([bytes(padding), *chunks]))[padding:]


async def _joined(chunks: list[bytes]) -> bytes:
    join = b"".join
    return join(chunks) if sum(map(len, chunks)) <= COPIED else await asyncio.to_thread(join, chunks)


async def _chunks(request: Request, limit: float = math.inf) -> list[bytes]:
    """Receive a body that is not empty, or what comes until it is larger than a limit."""
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        if chunk := message.get("body", b""):
            chunks.append(chunk)
            size += len(chunk)
        more = message.get("more_body", False) and size <= limit
    if not chunks:
        raise MalformedBody("The body is empty.")
    return chunks


class CollectionPause:
    """Keeps the garbage collector from running inside of blocks, in any thread.

    It would look at each list of a document up to three times while the document is read: 60 of 110 ms for
    100,000 lists, of which none is garbage.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._was_enabled:
                gc.enable()


COLLECTION_PAUSE = CollectionPause()


def parse_json(body: bytes | memoryview) -> Any:
    """Parse JSON; what is large is counted first, because no other thread runs while it is parsed."""
    if len(body) <= QUICK_BYTES:
        return orjson.loads(body)
    whole = bytes(body) if isinstance(body, memoryview) else body
    has_short_values = len(whole) > UNCOUNTED_BYTES and _count(whole)
    with COLLECTION_PAUSE:
        return from_json(whole, allow_inf_nan=False) if has_short_values else orjson.loads(whole)


def _count(whole: bytes) -> bool:
    """Refuse JSON that holds too much; return whether its lists or strings are short."""
    lists, objects, members = whole.count(b"["), whole.count(b"{"), whole.count(b":")
    strings = whole.count(b'"') // 2
    taken = LIST_BYTES * lists + OBJECT_BYTES * objects + MEMBER_BYTES * members
    taken += NEW_NAME_BYTES * max(members - 16 * objects, 0)
    most_taken = MOST_GROWTH * len(whole)
    for what, found, most in (
        ("lists and objects", lists + objects, MAX_CONTAINERS),
        ("lists, objects and members", lists + objects + members, MAX_NAMED),
        ("strings", strings, MAX_STRINGS),
        ("bytes of memory for its lists, objects and members", taken, most_taken),
    ):
        if found > most:
            raise BodyTooLarge(f"The JSON body has about {found:,} {what}; the limit is {most:,}.")
    return len(whole) < max(SHORT_LIST * lists, SHORT_STRING * (strings - members))


def json_object(body: bytes, members: tuple[str, ...], shape: str = "") -> Mapping[str, Any]:
    """Parse a JSON object that has these members and no others; errors about them end with its `shape`."""
    try:
        document = parse_json(body)
    except ValueError as error:
        document = _with_nan(body)
        if document is None:
            raise MalformedBody(f"The body is not JSON: {error}.") from error
    if not isinstance(document, dict):
        raise InvalidParameter(
            f"The body must be a JSON object with {' and '.join(map(repr, members))}.{shape}"
        )
    for name in document:
        if name not in members:
            place = _place_of(name, document[name], members) if "options" in members else ""
            raise InvalidParameter(
                f"The body has a member {name!r:.100}{place}; it may have {', '.join(members)}.{shape}"
            )
    return document


def _place_of(name: str, value: Any, members: tuple[str, ...]) -> str:
    """Say where a member of a request belongs that is not one of its body's `members`."""
    if name in WRITTEN and "inputs" in members:
        return f'; write {{"inputs": [{WRITTEN[name]}]}}'
    if name in SCORES and isinstance(value, list):
        return f"; POST /calibrate takes {name}"
    if name == "model":
        return "; the query string names the model, as in ?model=digits"
    place = request_options.place_of(name)
    return f"; {name} belongs in `{place}`" if place else ""


def _with_nan(body: bytes) -> Any:
    """Parse JSON that contains NaN or Infinity, so that the check of the values can name the place."""
    if len(body) > NAN_LIMIT:
        return None
    try:
        document = json.loads(body)
        json.dumps(document, ensure_ascii=False).encode()  # fails on text that is not Unicode
    except (ValueError, RecursionError):
        return None
    return document


def _parse_options(data: bytes) -> Any:
    if len(data) > limits.MAX_JSON_BYTES:
        raise BodyTooLarge(
            f"The options have {len(data):,} bytes; the limit of JSON is {limits.MAX_JSON_BYTES:,}."
        )
    try:
        return parse_json(data)
    except ValueError:
        return request_options.parse("options", data)  # which says what is wrong


async def _read_form(request: Request) -> tuple[list[bytes], Any]:
    """Return the `file` parts and the `options` document of a form."""
    delimiter = delimiter_of(header(request, b"content-type"))
    body = await read_body(request)
    parsed = min(len(body), MAX_HEADER_BYTES * body.count(delimiter))
    files, options = await unblocked(parsed, _split_form, body, delimiter, copied=len(body))
    if not files:
        raise InvalidParameter("The form has no `file` part.")
    if not all(files):
        raise BadRequest("A `file` part is empty.")
    if options is None:
        return files, None
    return files, await unblocked(len(options), _parse_options, options)


def _split_form(body: bytes, delimiter: bytes) -> tuple[list[bytes], bytes | None]:
    files: list[bytes] = []
    options: bytes | None = None
    for name, is_file, start, end in parts(body, delimiter, MAX_PARTS):
        if name == "file" and is_file:
            files.append(body[start:end])
        elif name == "options" and options is None:
            options = body[start:end]
        else:
            raise InvalidParameter(
                f"The form has an unexpected part {name!r:.100}; it takes `file` parts, sent as files, "
                "and one `options` part."
            )
    return files, options
