"""What the fuzzer sends: each case is drawn from the seed and its number alone, so any can be sent again."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, quote

from tests.app.fitting.files import LOGITS
from tools.hostile import seeds
from tools.hostile.bodies import npy
from tools.hostile.mutations import VALUES, WORDS, mutate
from tools.hostile.seeds import DEFAULT_SECONDS, FIT_SECONDS, Seed

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW")
PATHS = (
    "/",
    "/docs",
    "/openapi.json",
    "/static/x",
    "//",
    "/..%2f..%2fetc/passwd",
    "/%00",
    "/predict/",
    "/x" * 500,
)
PARAMETERS = (
    "0",
    "1",
    "2",
    "-1",
    "99",
    "x",
    "%00",
    "..%2F",
    "1e9",
    "2147483648",
    "9" * 30,
    "%ED%A0%80",
    "rollback",
)
QUERY = ("limit", "before_version", "before_fit", "wait", "timeout_ms", "top_k", "upper", "options", "x")
STRANGE_HEADERS = (
    "X-Request-Id: \x1b[31m", "X-Request-Id: " + "i" * 500, "X-Request-Id: fuzz", "Accept: application/x-npy",
    "Accept: */*;q=nonsense", "Expect: 100-continue", "Content-Encoding: gzip", "Connection: close, upgrade",
    "Upgrade: websocket", "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "traceparent: 00-zz", "Range: bytes=0-", "If-None-Match: *", "Authorization: Bearer " + "x" * 300,
    "Cookie: " + "a=b; " * 100, "Origin: http://127.0.0.1:1", "Content-Type: text/plain",
    "X-Forwarded-For: 1.2.3.4",
)  # fmt: skip
LIES = (
    "length, too small", "length, too large", "length, none", "length, twice", "length, no number", "chunked",
    "chunked, damaged", "chunked and length", "no host", "head, damaged", "version", "endless header",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One connection: what is sent on it, and what must come back.

    Attributes
    ----------
    answers
        How many complete answers must come; 0 if the request is so broken that the service may close instead.
    seconds
        In which time they must come, without the second of grace.
    leaves
        Whether the client closes the connection at once.
    paths
        Paths of its requests, templates as in the OpenAPI document where they have parameters.
    """

    name: str
    data: bytes = field(repr=False)
    answers: int = 1
    seconds: float = DEFAULT_SECONDS
    leaves: bool = False
    paths: tuple[str, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether the service may wait for more before it answers or closes."""
        return not self.answers and not self.leaves


class Cases:
    """Draws cases.

    Parameters
    ----------
    document
        The OpenAPI document of the service.
    """

    def __init__(self, seed: int, document: Mapping[str, Any]) -> None:
        self._seed = seed
        self._predictions = seeds.predictions()
        # Whatever calibrator is active by then.
        self._valid = [
            s for s in self._predictions if path_of(s) == "/predict" or b'"calibrator": 0' in s.body
        ]
        self._valid.append(Seed("POST", "/calibrate?calibrator=0", seeds.NPY, npy(LOGITS[:4])))
        # Refused only after the whole file has been read: the file has no `features` of this model.
        self._uploads = [*seeds.uploads("fc")] * 8 + seeds.uploads()
        self._others = seeds.of_document(document)

    def valid(self, number: int) -> Case:
        """A prediction as it should be."""
        seed = self._valid[number % len(self._valid)]
        return Case(f"{number}: valid {seed.kind}", request(seed), paths=(path_of(seed),))

    def draw(self, number: int) -> Case:
        """Return the case with this number."""
        rng = random.Random(f"{self._seed} {number}")
        drawn = rng.random()
        if drawn < 0.66:
            seed = self._mutated(rng, rng.choice(self._predictions))
        elif drawn < 0.70:
            seed = self._mutated(rng, rng.choice(self._uploads))
        elif drawn < 0.82:
            seed = self._other(rng)
        elif drawn < 0.90:
            return lie(rng, number, rng.choice(self._predictions))
        elif drawn < 0.95:
            return self._pipelined(rng, number)
        else:
            return half_open(rng, number, rng.choice((*self._predictions, *self._others)))
        strange = rng.choices(STRANGE_HEADERS, k=rng.choice((0, 0, 0, 1, 2)))
        data = request(seed, strange)
        name = f"{number}: {seed.method} {seed.target[:100]} {seed.kind} {strange}"
        return Case(name, data, seconds=seconds_of(seed), paths=(path_of(seed),))

    def _mutated(self, rng: random.Random, seed: Seed) -> Seed:
        other = rng.choice(self._predictions).body
        body = mutate(rng, seed.kind, seed.body, other) if rng.random() < 0.9 else seed.body
        kind, target = seed.kind, seed.target
        if rng.random() < 0.05:
            kind = rng.choice((rng.choice(self._predictions).kind, "", "x/y", kind + ";", kind[:-9], '="'))
        if rng.random() < 0.1 and seed.kind != seeds.JSON:
            target = path_of(seed) + _query(rng)
        return Seed(seed.method, target, kind, body)

    def _other(self, rng: random.Random) -> Seed:
        seed = rng.choice(self._others)
        if rng.random() < 0.15:
            return Seed(rng.choice(METHODS[:7]), rng.choice((*PATHS, seed.target)))
        path = seed.target
        while "{" in path:
            path = path[: path.index("{")] + rng.choice(PARAMETERS) + path[path.index("}") + 1 :]
        body = mutate(rng, seed.kind, seed.body, b"") if seed.body and rng.random() < 0.8 else seed.body
        return Seed(seed.method, path + (_query(rng) if rng.random() < 0.5 else ""), seed.kind, body)

    def _pipelined(self, rng: random.Random, number: int) -> Case:
        chosen = [rng.choice(self._predictions) for _ in range(rng.randrange(2, 6))]
        chosen = [self._mutated(rng, seed) if rng.random() < 0.5 else seed for seed in chosen]
        data = b"".join(map(request, chosen))
        seconds = sum(map(seconds_of, chosen))
        return Case(
            f"{number}: {len(chosen)} pipelined",
            data,
            len(chosen),
            seconds,
            paths=tuple(map(path_of, chosen)),
        )


def request(seed: Seed, headers: Sequence[str] = ()) -> bytes:
    """Write a request as HTTP/1.1, with the length that its body has."""
    lines = [f"{seed.method} {seed.target} HTTP/1.1", "Host: 127.0.0.1", *headers]
    if seed.kind:
        lines.append(f"Content-Type: {seed.kind}")
    if seed.body or seed.method == "POST":
        lines.append(f"Content-Length: {len(seed.body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + seed.body


def path_of(seed: Seed) -> str:
    """Return the path without the query."""
    return seed.target.partition("?")[0]


def seconds_of(seed: Seed) -> float:
    """Return the timeout that a request sets, or the default; a check of an upload has a longer one."""
    path, _, query = seed.target.partition("?")
    if path == "/fit":
        return FIT_SECONDS
    texts = parse_qs(query)
    try:
        document = json.loads(texts["options"][0] if "options" in texts else seed.body)
        options = document if "options" in texts else document["options"]
        seconds = float(texts.get("timeout_ms", [""])[0] or options["timeout_ms"]) / 1e3
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        seconds = DEFAULT_SECONDS
    return seconds if 0 < seconds < FIT_SECONDS else DEFAULT_SECONDS


def lie(rng: random.Random, number: int, seed: Seed) -> Case:
    """A request whose head does not say what follows."""
    kind = rng.choice(LIES)
    whole, size = request(seed), len(seed.body)
    head = whole[: len(whole) - size]
    length = f"Content-Length: {size}".encode()
    chunked = length, b"Transfer-Encoding: chunked"
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (size, seed.body)
    if kind == "length, too small":
        head = head.replace(length, b"Content-Length: %d" % rng.randrange(size))
    elif kind == "length, too large":
        head = head.replace(
            length, b"Content-Length: %d" % (size + rng.choice((1, 1000, 10**7, 10**12, 10**30)))
        )
    elif kind == "length, none":
        head = head.replace(length + b"\r\n", b"")
    elif kind == "length, twice":
        head = head.replace(length, length + b"\r\nContent-Length: %d" % rng.randrange(2 * size))
    elif kind == "length, no number":
        head = head.replace(
            length, b"Content-Length: " + rng.choice((b"-1", b"0x10", b"+5", b"1e3", b"", b"5, 5"))
        )
    elif kind == "chunked":
        return Case(f"{number}: {kind}", head.replace(*chunked) + chunks, paths=(path_of(seed),))
    elif kind == "chunked, damaged":
        place = rng.randrange(len(chunks))
        chunks = chunks[:place] + rng.choice(WORDS) + chunks[place + rng.randrange(3) :]
        head, size = head.replace(*chunked), 0
        whole = head + chunks
    elif kind == "chunked and length":
        head = head.replace(length, length + b"\r\nTransfer-Encoding: chunked")
    elif kind == "no host":
        head = head.replace(
            b"Host: 127.0.0.1\r\n", rng.choice((b"", b"Host: a\r\nHost: b\r\n", b"Host: \r\n"))
        )
    elif kind == "head, damaged":
        place = rng.randrange(len(head))
        head = head[:place] + rng.choice(WORDS) + head[place + rng.randrange(4) :]
    elif kind == "version":
        head = head.replace(
            b"HTTP/1.1", rng.choice((b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"HTTX/1.1", b""))
        )
    elif kind == "endless header":
        head = head[:-2] + b"X: " + b"y" * rng.choice((60_000, 66_000, 300_000)) + b"\r\n\r\n"
    data = whole if kind == "chunked, damaged" else head + seed.body
    return Case(f"{number}: {kind}", data, answers=0, leaves=rng.random() < 0.7, paths=(path_of(seed),))


def half_open(rng: random.Random, number: int, seed: Seed) -> Case:
    """A request of which a part is sent, by a client that leaves or waits."""
    whole = request(seed)
    data = whole[: rng.randrange(1, len(whole))]
    return Case(f"{number}: half open", data, answers=0, leaves=rng.random() < 0.7, paths=(path_of(seed),))


def _query(rng: random.Random) -> str:
    pairs = []
    for name in rng.choices(QUERY, k=rng.choice((1, 1, 2))):
        value = rng.choice(VALUES)
        if name == "wait":  # a wait for a fit is no late answer
            value = rng.choice((0, 1, -1, "x"))
        text = value if isinstance(value, str) else json.dumps(value)
        pairs.append(f"{name}={quote(text[:4000].encode('utf-8', 'surrogatepass'))}")
    return "?" + "&".join(pairs)
