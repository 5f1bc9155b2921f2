"""Draws requests that are almost right: each format by its own grammar, with hostile values in its places.

Tensors are drawn once and written for each protocol: as JSON, as binary data behind it, as messages of gRPC.
"""

from __future__ import annotations

import io
import json
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from boxcal.app.protocols.grpc import inference_pb2 as messages
from boxcal.models.digits_data import load_digits_split
from tools.hostile.cases import Case, path_of, request, seconds_of
from tools.hostile.seeds import FIT_SECONDS, JSON, NPY, Seed, of_document

CSV, PARQUET, ARROW = "text/csv", "application/vnd.apache.parquet", "application/vnd.apache.arrow.file"
K = 10
DATATYPES = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64",
    "BF16", "BYTES",
)  # fmt: skip
WIDTHS = {"BOOL": 1, "BYTES": 4, **{name: int(name.strip("UINTFPB")) // 8 for name in DATATYPES[1:-1]}}
CONTENTS = (
    "bool_contents", "int_contents", "int64_contents", "uint_contents", "uint64_contents", "fp32_contents",
    "fp64_contents", "bytes_contents",
)  # fmt: skip
MODELS = ("digits", "digits.calibrator")
TEXTS: tuple[str, ...] = (
    "", "\0", "a\0b", " ", "x" * 100_000, "é" * 300, "\ud800", "\x1b[31m", "../x", "active", "-1", "1e400",
    "9" * 10_000, "nan", "true", "[" * 1000, "\u202e", "logits", "\n", '"', "%00", "💥" * 50,
)  # fmt: skip
FRAGMENTS: tuple[bytes, ...] = (
    b"null", b"true", b"false", b"0", b"-1", b"-0.0", b"1e400", b"1e308", b"5e-324", b"NaN", b"-Infinity",
    b"9" * 10_000, b"0." + b"1" * 10_000, b"9223372036854775808", b"18446744073709551616",
    b"4611686018427387904", b"[" * 1000 + b"]" * 1000, b'{"a":' * 1000 + b"1" + b"}" * 1000, b'"\\u0000"',
    b'"\\ud800"', b'""', b'"\xff"', b'"' + b"x" * 100_000 + b'"', b"[]", b"{}", b"[[]]", b"[[1],[1,2]]",
    b'{"a":1,"a":2}', b'["a","bc",""]', b"[" + b"0," * 3000 + b"0]", b'{"":0}', b'{"\\u0000":0}',
)  # fmt: skip
"""Values in JSON, as they are written."""
SHAPES: tuple[tuple[Any, ...], ...] = (
    (), (0,), (1,), (K,), (0, K), (-1, K), (1, 0), (True, K), (False,), (0, 2**62, 2**62), (2**62, 2**62),
    (2**31, 2**33), (2**63 - 1,), (-(2**63),), (1,) * 33, (1,) * 64, (1, 1, 1, K), (K, 1), (10**9, K),
)  # fmt: skip
HEADER_SHAPES = (
    "()", "(0,)", "(4, 10)", "(4, 10, )", "(True, 10)", "(-4, 10)", "(0, 2**62, 2**62)", "(4.0, 10)", "4",
    "None", f"(0, {2**62}, {2**62})", f"({2**62}, {2**62})", f"({'9' * 10_000},)", f"({'9' * 10_000}, 0)",
    "(4, 10) * 9", "(" * 1000 + ")" * 1000, "(" + "1, " * 64 + ")", "(4, 10", "'\\x00'", "[4, 10]",
    "(4, 10), 'a': 1", "(1e400,)",
)  # fmt: skip
DESCRS = (
    "'<f8'", "'<f4'", "'>f8'", "'<f2'", "'|b1'", "'<i8'", "'<u8'", "'|i1'", "'<c16'", "'|O'", "'|S0'",
    "'<U7'", "'|V8'", "'<M8[s]'", "'<f16'", "[('a', '<f8')]", "[('a', '<f8'), ('a', '<f8')]", "'f8, f8'",
    "'(2,)f8'", "8", "'<f999999999999'", "'<U99999999999'", "''", "'\\x00'", "None", "[]", "{}",
    f"'<f{'9' * 5000}'", "(" * 500,
)  # fmt: skip
CELLS = (
    "", "0", "9", "cat", "0.5", "1e400", "nan", "-inf", "9" * 10_000, "\0", '"', '""', "'", ",", ";", "\n",
    "\r\n", "x" * 100_000, "[1,2,3,4,5,6,7,8,9,10]", "[1]", "[[1]]", "[NaN]", "[1e400]", "[" * 1000,
    "true", "\ufeff", "2147483648", "9223372036854775808", "1,2", "=1+1", "é" * 99,
    "[" + "0," * 20_000 + "0]", "[" + "9" * 10_000 + "]",
)  # fmt: skip
COLUMNS = ("id", "key", "label", "logits", "propensity", "source")
SCORE_COLUMNS = (*map(str, range(K)), "label", "logits", "probabilities", "group", "sample_weight", "text")
PART_NAMES = (
    "file",
    "options",
    "logits",
    "labels",
    "method",
    "activate",
    "label",
    "classes",
    "features",
    "note",
)


class Members(list[tuple[str, Any]]):
    """The members of a JSON object, which may repeat a name."""


class Fragment(bytes):
    """JSON that is written as it is."""


def written(value: Any) -> bytes:
    """Write a JSON document."""
    if isinstance(value, Fragment):
        return bytes(value)
    if isinstance(value, Members):
        return b"{" + b",".join(written(name) + b":" + written(one) for name, one in value) + b"}"
    if isinstance(value, Mapping):
        return written(Members(value.items()))
    if isinstance(value, list | tuple):
        return b"[" + b",".join(map(written, value)) + b"]"
    return json.dumps(value).encode()


@dataclass
class Tensor:
    """One input, before it is written for a protocol."""

    name: str
    datatype: str
    shape: list[Any]
    values: list[Any]


@dataclass(frozen=True)
class Call:
    """One call of gRPC."""

    name: str
    method: str
    data: bytes = field(repr=False)


class Structured:
    """Draws cases; each from the seed and its number alone.

    `document`: the OpenAPI document of the service.
    """

    def __init__(self, seed: int, document: Mapping[str, Any]) -> None:
        self._seed = seed
        self._document = document
        self._others = [one for one in of_document(document) if not one.target.startswith("/compare")]
        self._image = load_digits_split().test.png(0)
        self._kinds: tuple[tuple[float, str, Callable[[random.Random], Seed | Call]], ...] = (
            (0.20, "v2 json", self._v2_json), (0.12, "v2 binary", self._v2_binary),
            (0.18, "grpc", self._grpc), (0.10, "npy", self._npy), (0.10, "feedback table", self._feedback),
            (0.03, "fit", self._fit), (0.07, "form", self._form), (0.10, "options", self._options),
            (0.10, "other", self._other),
        )  # fmt: skip

    def draw(self, number: int) -> Case | Call:
        """Return the case with this number."""
        rng = random.Random(f"structured {self._seed} {number}")
        weights = [weight for weight, _, _ in self._kinds]
        _, kind, grammar = rng.choices(self._kinds, weights)[0]
        found = grammar(rng)
        if isinstance(found, Call):
            return Call(f"{number}: {kind} {found.name}", found.method, found.data)
        name, headers = f"{number}: {kind} {found.method} {found.target[:100]} {found.kind[:100]}", []
        if kind == "v2 binary":
            length = found.body.find(b"\n\0") + 1  # the end of the JSON part, as `_v2_binary` marks it
            sent = (
                str(length)
                if rng.random() < 0.9
                else rng.choice(("-1", "x", "9" * 5000, "0", str(length + 1)))
            )
            headers = [f"Inference-Header-Content-Length: {sent}"]
            found = Seed(found.method, found.target, found.kind, found.body.replace(b"\n\0", b"\n", 1))
        seconds = FIT_SECONDS if kind in ("fit", "feedback table") else seconds_of(found)
        return Case(name, request(found, headers), seconds=seconds, paths=(path_of(found),))

    def _tensors(self, rng: random.Random, model: str) -> list[Tensor]:
        rows = rng.choice((1, 1, 2, 5))
        if model == MODELS[0] and rng.random() < 0.5:
            tensors = [Tensor("image", "BYTES", [rows], [self._image] * rows)]
        elif model == MODELS[0]:
            tensors = [Tensor("tensor", "FP32", [rows, 1, 8, 8], [rng.random() for _ in range(rows * 64)])]
        else:
            scores = [rng.gauss(0, 3) for _ in range(rows * K)]
            tensors = [Tensor(rng.choice(("logits", "logits", "probabilities")), "FP64", [rows, K], scores)]
        for side in ("lower", "upper"):
            if rng.random() < 0.25:
                shape = rng.choice(([rows, K], [K], [1, K], [1], [rows], [rows, 1]))
                count = int(np.prod(shape))
                tensors.append(Tensor(side, "FP64", shape, [0.05 if side == "lower" else 0.9] * count))
        for _ in range(rng.choice((0, 1, 1, 2))):
            self._spoil(rng, tensors)
        return tensors

    def _spoil(self, rng: random.Random, tensors: list[Tensor]) -> None:
        one = rng.choice(tensors)
        action = rng.randrange(8)
        if action == 0:
            one.name = rng.choice((*TEXTS, "lower", "upper", "text", "image"))
        elif action == 1:
            one.datatype = rng.choice((*DATATYPES, *TEXTS, "FP99", "fp64"))
        elif action == 2:
            one.shape = list(rng.choice(SHAPES))
        elif action == 3:
            del one.values[rng.randrange(len(one.values) + 1) :]
        elif action == 4:
            one.values = one.values * rng.choice((2, 50))
        elif action == 5 and one.values:
            hostile = (
                Fragment(rng.choice(FRAGMENTS)),
                rng.choice(TEXTS),
                b"",
                b"\0",
                True,
                2**63,
                -1,
                float("nan"),
            )
            one.values[rng.randrange(len(one.values))] = rng.choice(hostile)
        elif action == 6:
            tensors.append(Tensor(one.name, one.datatype, list(one.shape), list(one.values)))
        else:
            one.values = [rng.choice((b"", b"a", b"x" * rng.randrange(3000))) for _ in one.values]

    def _described(self, rng: random.Random, one: Tensor) -> Members:
        members = Members([("name", one.name), ("shape", one.shape), ("datatype", one.datatype)])
        if rng.random() < 0.04:
            members.append(rng.choice(members))
        if rng.random() < 0.04:
            place = rng.randrange(len(members))
            members[place] = (members[place][0], Fragment(rng.choice(FRAGMENTS)))
        return members

    def _envelope(self, rng: random.Random, inputs: list[Members]) -> Members:
        names = ("probabilities", "label", "index", "bound", "logits")
        members = Members([("id", "a"), ("inputs", inputs)])
        if rng.random() < 0.6:
            outputs = []
            for name in rng.choices(names, k=rng.choice((1, 2, 3))):
                wanted = self._hostile(rng, rng.choice((0, 3, 10, 2**62)), 0.1)
                parameters = Members([("classification", wanted), ("binary_data", rng.random() < 0.3)])
                shown = self._hostile(rng, name, 0.05)
                outputs.append(
                    Members([("name", shown), ("parameters", self._hostile(rng, parameters, 0.04))])
                )
            members.append(("outputs", self._hostile(rng, outputs, 0.04)))
        if rng.random() < 0.5:
            members.append(("parameters", self._hostile(rng, self._parameters(rng), 0.05)))
        if rng.random() < 0.05:
            members.append(
                (rng.choice(("id", "inputs", "", "\0", "x" * 9999)), Fragment(rng.choice(FRAGMENTS)))
            )
        return members

    def _parameters(self, rng: random.Random) -> Members:
        good: dict[str, Any] = {
            "lower": 0.01, "upper": 0.9, "timeout_ms": 2000, "timeout": 2_000_000, "calibrator": 0,
            "binary_data_output": True, "priority": 1, "bounds": {"upper": {"3": 0.5}},
        }  # fmt: skip
        chosen = rng.sample(sorted(good), rng.choice((1, 2, 3)))
        members = Members([(name, self._hostile(rng, good[name], 0.25)) for name in chosen])
        if rng.random() < 0.05:
            members += [(f"p{number}", number) for number in range(rng.choice((60, 70, 2000)))]
        return members

    def _hostile(self, rng: random.Random, value: Any, chance: float) -> Any:
        return Fragment(rng.choice(FRAGMENTS)) if rng.random() < chance else value

    def _target(self, rng: random.Random) -> tuple[str, str]:
        model = rng.choice(MODELS)
        version = rng.choice(("", "", "/versions/0", "/versions/" + address(rng.choice(TEXTS))))
        shown = model if rng.random() < 0.96 else address(rng.choice(TEXTS))
        return model, f"/v2/models/{shown}{version}/infer"

    def _v2_json(self, rng: random.Random) -> Seed:
        model, target = self._target(rng)
        inputs = []
        for one in self._tensors(rng, model):
            values = [base64_or_text(value) for value in one.values]
            if len(one.shape) == 2 and values and rng.random() < 0.3:
                half = len(values) // 2
                values = [values[:half], values[half:]]
            inputs.append(Members([*self._described(rng, one), ("data", self._hostile(rng, values, 0.04))]))
        return Seed("POST", target, JSON, written(self._envelope(rng, inputs)))

    def _v2_binary(self, rng: random.Random) -> Seed:
        model, target = self._target(rng)
        inputs, content = [], []
        for one in self._tensors(rng, model):
            data = binary(one)
            size: Any = (
                len(data) if rng.random() < 0.85 else rng.choice((0, -1, len(data) + 1, True, 2**62, "4"))
            )
            parameters = Members([("binary_data_size", self._hostile(rng, size, 0.03))])
            inputs.append(Members([*self._described(rng, one), ("parameters", parameters)]))
            content.append(data)
        head = written(self._envelope(rng, inputs)).replace(b"\n", b" ").replace(b"\0", b" ")
        return Seed("POST", target, "application/octet-stream", head + b"\n\0" + b"".join(content))

    def _grpc(self, rng: random.Random) -> Call:
        method = "ModelInfer" if rng.random() < 0.85 else rng.choice(
            ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex", "ServerLive")
        )  # fmt: skip
        if method != "ModelInfer":
            sent = getattr(messages, f"{method}Request")()
            for name in ("name", "version", "repository_name"):
                if name in sent.DESCRIPTOR.fields_by_name:
                    setattr(sent, name, valid(rng.choice((*MODELS, *TEXTS[:-1], "0"))))
            return Call(method, method, self._damaged(rng, sent.SerializeToString()))
        model = rng.choice(MODELS)
        sent = messages.ModelInferRequest(model_name=model, id="a")
        if rng.random() < 0.1:
            sent.model_name = valid(rng.choice(TEXTS))
        if rng.random() < 0.3:
            sent.model_version = valid(rng.choice(("0", "1", *TEXTS)))
        is_raw = rng.random() < 0.5
        for one in self._tensors(rng, model):
            shape = [size if -(2**63) <= size < 2**63 else 0 for size in map(int, one.shape)]
            tensor = sent.inputs.add(name=valid(one.name), datatype=valid(one.datatype), shape=shape)
            if is_raw:
                sent.raw_input_contents.append(binary(one))
            else:
                fill(rng, tensor.contents, one)
        if rng.random() < 0.1:
            sent.raw_input_contents.append(b"\0" * rng.choice((0, 8, 80)))
        for _ in range(rng.choice((0, 0, 1, 3))):
            wanted = sent.outputs.add(name=valid(rng.choice(("probabilities", "label", "logits", *TEXTS))))
            choose(rng, wanted.parameters["classification"])
        for name in rng.sample(
            ("lower", "upper", "timeout_ms", "timeout", "calibrator", "bounds", "\0", ""), 2
        ):
            if rng.random() < 0.3:
                choose(rng, sent.parameters[name])
        return Call("ModelInfer", "ModelInfer", self._damaged(rng, sent.SerializeToString()))

    def _damaged(self, rng: random.Random, data: bytes) -> bytes:
        """Write some messages as no library does: groups in groups, long varints, texts not in UTF-8."""
        drawn = rng.random()
        if drawn < 0.02:
            return data + b"\x0b" * rng.choice((10, 1000, 100_000))
        if drawn < 0.04:
            return data + b"\x0a" + b"\xff" * 9 + b"\x01"
        if drawn < 0.06:
            return data.replace(b"digits", b"dig\xed\xa0\x80")
        return data[: rng.randrange(len(data) + 1)] if drawn < 0.08 else data

    def _npy(self, rng: random.Random) -> Seed:
        shown = {"descr": "'<f8'", "fortran_order": "False", "shape": "(4, 10)"}
        for _ in range(rng.choice((0, 1, 1, 2))):
            name, values = rng.choice(
                (("descr", DESCRS), ("shape", HEADER_SHAPES), ("fortran_order", DESCRS))
            )
            shown[name] = rng.choice(values)
        members = [f"'{name}': {value}" for name, value in shown.items()]
        if rng.random() < 0.1:
            members.append(rng.choice((members[0], "'': 0", "'x': " + "9" * 10_000, "'x': " + "[" * 1000)))
        text = ("{" + ", ".join(members) + ", }").encode("utf-8", "surrogatepass") + b"\n"
        version = rng.choice((b"\x01\x00",) * 8 + (b"\x02\x00", b"\x03\x00", b"\x09\x00"))
        announced = len(text) if rng.random() < 0.95 else rng.choice((0, 1, 0xFFFF))
        length = struct.pack("<H" if version == b"\x01\x00" else "<I", announced)
        numbers = np.random.default_rng(rng.randrange(2**32)).normal(size=40) * rng.choice((1, 1, 1e307))
        data = numbers.tobytes()[: rng.choice((320, 320, 320, 0, 1, 319))]
        target = rng.choice(("/calibrate", "/calibrate", "/predict", "/calibrate?scores=probabilities"))
        return Seed("POST", target, NPY, b"\x93NUMPY" + version + length + text + data)

    def _table(
        self, rng: random.Random, columns: Sequence[str], good: Mapping[str, Any]
    ) -> tuple[str, bytes]:
        """Draw a table of some columns, and write it in a format."""
        names = [name if rng.random() < 0.97 else rng.choice(TEXTS) for name in columns]
        if rng.random() < 0.06:
            names.append(rng.choice(names))
        rows = [
            [good[name] if name in good and rng.random() < 0.93 else rng.choice(CELLS) for name in names]
            for _ in range(rng.choice((0, 1, 2, 4, 30)))
        ]
        kind = rng.choice((CSV, CSV, CSV, PARQUET, ARROW, JSON))
        if kind == CSV:
            mark, end = rng.choice(",,,;\t|"), rng.choice(("\n", "\n", "\r\n", "\r"))
            lines = [mark.join(quoted(rng, str(cell), mark) for cell in line) for line in (names, *rows)]
            text = rng.choice(("", "", "\ufeff")) + end.join(lines) + rng.choice((end, ""))
            return kind, text.encode("utf-8", "surrogatepass")
        if kind == JSON:
            records = [Members(zip(names, line, strict=True)) for line in rows]
            return kind, written(records if rng.random() < 0.7 else {"items": records})
        arrays = [typed(rng, [line[place] for line in rows]) for place in range(len(names))]
        table = pa.Table.from_arrays(arrays, names=[valid(name) for name in names])
        file = io.BytesIO()
        if kind == PARQUET:
            pq.write_table(table, file, compression=rng.choice(("snappy", "zstd", "none")))
        else:
            with pa.ipc.new_file(file, table.schema) as out:
                out.write_table(table)
        return kind, file.getvalue()

    def _feedback(self, rng: random.Random) -> Seed:
        row = "[" + ",".join(f"{rng.gauss(0, 2):.3f}" for _ in range(K)) + "]"
        good = {"id": "0" * 32, "key": "k", "label": "3", "logits": row, "propensity": "0.5", "source": "a"}
        columns = rng.choice(
            (("id", "label"), ("key", "logits", "label"), ("id", "label", "propensity", "source"))
        )
        kind, body = self._table(rng, columns, good)
        return Seed("POST", "/feedback", kind, body)

    def _fit(self, rng: random.Random) -> Seed:
        good = {**{str(index): f"{rng.gauss(0, 2):.3f}" for index in range(K)}, "label": "3"}
        columns = SCORE_COLUMNS[: K + 1] if rng.random() < 0.7 else rng.sample(SCORE_COLUMNS, 4)
        _, table = self._table(rng, columns, good)
        # A method that needs what no table here has: the whole file is read, and nothing is fitted.
        parts = [("file", "v.csv", table), ("method", None, b"fc"), ("activate", None, b"never")]
        return self._parts(rng, "/fit", parts)

    def _form(self, rng: random.Random) -> Seed:
        options = written(self._hostile(rng, Members([("top_k", 2), ("bounds", {"upper": 0.9})]), 0.2))
        images: list[tuple[str, str | None, bytes]] = [("file", "a.png", self._image)] * rng.choice(
            (1, 2, 20)
        )
        return self._parts(rng, "/predict", [*images, ("options", None, options)])

    def _parts(self, rng: random.Random, target: str, parts: list[tuple[str, str | None, bytes]]) -> Seed:
        parts = list(parts)
        for _ in range(rng.choice((0, 1, 1, 2))):
            place = rng.randrange(len(parts))
            name, filename, content = parts[place]
            changed = (
                (rng.choice((*PART_NAMES, *TEXTS)), filename, content),
                (name, rng.choice((None, *TEXTS)), content),
                (
                    name,
                    filename,
                    rng.choice((b"", rng.choice(FRAGMENTS), content + content, b"\r\n--boundary")),
                ),
            )
            parts[place] = rng.choice(changed)
            if rng.random() < 0.2:
                parts += [parts[place]] * rng.choice((1, 3, 300))
        boundary = rng.choice(("boundary",) * 12 + ("b" * 70, "b" * 500, "", "a\0b", "--", "other"))
        pieces = []
        for name, filename, content in parts:
            shown = f'name="{name}"' + ("" if filename is None else f'; filename="{filename}"')
            extra = rng.choice(
                ("",) * 20 + ("X: " + "y" * 20_000 + "\r\n", "\0: \r\n", "Content-Type: \r\n" * 50)
            )
            head = f"--{boundary}\r\nContent-Disposition: form-data; {shown}\r\n{extra}\r\n"
            pieces.append(head.encode("utf-8", "surrogatepass") + content + b"\r\n")
        end = rng.choice((f"--{boundary}--\r\n",) * 12 + ("", f"--{boundary}", f"--{boundary}--")).encode()
        kind = f"multipart/form-data; boundary={boundary}" if boundary != "other" else "multipart/form-data"
        return Seed("POST", target, kind, b"".join(pieces) + end)

    def _options(self, rng: random.Random) -> Seed:
        """Requests of `/predict` and `/calibrate` in JSON."""
        bounds = self._hostile(rng, {"lower": {"3": 0.01}, "upper": [0.9] * K}, 0.2)
        good: dict[str, Any] = {
            "bounds": bounds, "top_k": 3, "probabilities": True, "logits": True, "explain": True,
            "calibrator": 0, "timeout_ms": 2000, "lower": 0.1, "note": "a",
        }  # fmt: skip
        chosen = rng.sample(sorted(good), rng.randrange(5))
        options = Members([(name, self._hostile(rng, good[name], 0.15)) for name in chosen])
        row = [self._hostile(rng, rng.gauss(0, 3), 0.01) for _ in range(K if rng.random() < 0.9 else 3)]
        if rng.random() < 0.5:
            rows = [self._hostile(rng, row, 0.03) for _ in range(rng.choice((1, 2, 40)))]
            members = Members([("logits", self._hostile(rng, rows, 0.03)), ("options", options)])
            return Seed("POST", "/calibrate", JSON, written(members))
        tensor = [[[rng.random() for _ in range(8)] for _ in range(8)]]
        one = Members([("tensor", self._hostile(rng, tensor, 0.1))])
        inputs = [self._hostile(rng, one, 0.05) for _ in range(rng.choice((1, 2)))]
        members = Members([("inputs", self._hostile(rng, inputs, 0.04)), ("options", options)])
        return Seed("POST", "/predict", JSON, written(members))

    def _other(self, rng: random.Random) -> Seed:
        """Any other operation of the document, with hostile values in its path, its query and its body."""
        seed = rng.choice(self._others)
        path = seed.target
        operation = self._document["paths"][path][seed.method.lower()]
        query = []
        for parameter in operation.get("parameters", ()):
            is_wait = parameter["name"] == "wait"
            if parameter["in"] == "path":
                text = rng.choice((*TEXTS, "0", "1", "2", "9223372036854775808"))
                path = path.replace("{" + parameter["name"] + "}", address(text) or "0")
            elif parameter["in"] == "query" and rng.random() < 0.5:
                text = "0" if is_wait else rng.choice((*TEXTS, "0", "1", "2", "0.5", "9223372036854775808"))
                query.append(f"{parameter['name']}={address(text)}")
        body = seed.body
        if body:
            body = written(self._spoiled(rng, json.loads(body)))
        target = path + ("?" + "&".join(query) if query else "")
        return Seed(seed.method, target, seed.kind, body)

    def _spoiled(self, rng: random.Random, node: Any) -> Any:
        if isinstance(node, dict) and node and rng.random() < 0.9:
            members = Members([(name, self._spoiled(rng, value)) for name, value in node.items()])
            if rng.random() < 0.1:
                members.append((rng.choice((*node, *TEXTS)), Fragment(rng.choice(FRAGMENTS))))
            return members
        if isinstance(node, list) and node and rng.random() < 0.9:
            return [self._spoiled(rng, value) for value in node] * rng.choice((1, 1, 1, 20))
        return self._hostile(rng, node, 0.4) if rng.random() < 0.8 else rng.choice(TEXTS)


def address(text: str) -> str:
    """Write a text as a part of an address, short enough for one."""
    return quote(text[:3000].encode("utf-8", "surrogatepass"), safe="")


def valid(text: str) -> str:
    """Return a text that can be written in UTF-8."""
    return text.encode("utf-8", "replace").decode()


def base64_or_text(value: Any) -> Any:
    """Return a value for JSON, which has no bytes."""
    return value.hex() if isinstance(value, bytes) else value


def quoted(rng: random.Random, cell: str, mark: str) -> str:
    """Quote a cell of CSV where it needs it, mostly."""
    needed = any(sign in cell for sign in (mark, '"', "\n", "\r"))
    return '"' + cell.replace('"', '""') + '"' if needed and rng.random() < 0.8 else cell


def typed(rng: random.Random, cells: list[Any]) -> Any:
    """Return a column of a table with types, as text or as what its cells say."""
    texts = [valid(str(cell)) for cell in cells]
    if rng.random() < 0.3:
        return pa.array(texts, pa.string()).dictionary_encode()
    try:
        read = [json.loads(text) for text in texts]
        return pa.array(read)
    except (ValueError, pa.ArrowException, RecursionError, OverflowError):
        return pa.array(texts, pa.string())


def binary(one: Tensor) -> bytes:
    """Write the values of a tensor as binary data; those that its type cannot hold become noise."""
    if one.datatype == "BYTES" or any(isinstance(value, bytes) for value in one.values):
        elements = [
            value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")
            for value in one.values
        ]
        return b"".join(struct.pack("<I", len(element)) + element for element in elements)
    width = WIDTHS.get(one.datatype, 8)
    numbers = [value if isinstance(value, int | float) else 0.0 for value in one.values]
    if one.datatype in ("FP64", "FP32", "FP16"):
        with np.errstate(over="ignore"):
            return np.array(numbers, np.float64).astype(f"<f{width}").tobytes()
    return b"".join(struct.pack("<d", float(number))[:width] for number in numbers)


def fill(rng: random.Random, contents: Any, one: Tensor) -> None:
    """Write values as typed contents, in the member of their type or in another one."""
    is_bytes = one.datatype == "BYTES" or any(isinstance(value, bytes) for value in one.values)
    own = "bytes_contents" if is_bytes else "fp32_contents" if one.datatype == "FP32" else "fp64_contents"
    member = own if rng.random() < 0.85 else rng.choice(CONTENTS)
    sent = getattr(contents, member)
    for value in one.values:
        if member == "bytes_contents":
            sent.append(value if isinstance(value, bytes) else str(value).encode("utf-8", "replace"))
        elif member.startswith("fp"):
            sent.append(float(value) if isinstance(value, int | float) else 0.0)
        else:
            sent.append(1 if member == "bool_contents" or not isinstance(value, int) else value & 1)


def choose(rng: random.Random, parameter: Any) -> None:
    """Give a parameter a value of one of its types."""
    name = rng.choice(("bool_param", "int64_param", "string_param", "double_param", "uint64_param"))
    values: dict[str, tuple[Any, ...]] = {
        "bool_param": (True, False),
        "int64_param": (0, 3, -1, 2**62, -(2**63)),
        "string_param": tuple(map(valid, TEXTS)) + tuple(one.decode("latin-1") for one in FRAGMENTS),
        "double_param": (0.5, float("nan"), float("inf"), 1e308, -0.0),
        "uint64_param": (0, 2**64 - 1),
    }
    setattr(parameter, name, rng.choice(values[name]))
