"""Tokens of texts: what a text classifier reads, one or several rows of integers of any length.

Texts become tokens by the model's own `tokenizer.json`. A batch is padded to its longest sample, with values
that the model's attention mask excludes.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcal.models import BackboneError, UnusableInput
from boxcal.models.inputs.base import Kind, Samples
from boxcal.models.inputs.saved_configs import read_if_there

logger = logging.getLogger("boxcal")
MASK = "attention_mask"
IDS = "input_ids"
TYPES = "token_type_ids"
PAIR = (3, 12)
"""Tokens of two samples, the shorter of which is padded in a batch of both."""
TEXT_PACKAGE = "texts need the package tokenizers: pip install 'boxcal[text]'"


class Tokens(tuple[NDArray[np.int64], ...]):
    """One sample: arrays of one length, in the order of the inputs, and whether its text was truncated."""

    truncated = False


class TextInputs:
    """Samples are `Tokens`.

    `dtypes`: the type of each input by its name, in the order of the model.
    `fixed_length`: length to which every batch is padded; None for the longest sample of the batch.
    `tokenizer`: the `tokenizer.json` of the model; None to read tokens only.
    `sizes`: the number of values that an input may have, where it is known.
    """

    kind: Kind = "texts"
    shape: tuple[int, ...] = ()

    def __init__(
        self,
        dtypes: Mapping[str, str],
        *,
        pad: Mapping[str, int],
        max_length: int,
        fixed_length: int | None,
        tokenizer: Path | None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        self.names = tuple(dtypes)
        self._ids = IDS if IDS in dtypes else self.names[0]
        self._dtypes = tuple(dtypes.values())
        self.pad = {name: pad.get(name, 0) for name in dtypes}
        self.max_length = min(max_length, fixed_length or max_length)
        self._fixed_length = fixed_length
        self._tokenizer = None if tokenizer is None else open_tokenizer(tokenizer, self.max_length)
        self._sizes = dict(sizes or {})
        self.end: int | None = None  # The token that ends a sample, where the model looks for it
        if self._tokenizer is not None and not self._sizes:
            self._sizes[self._ids] = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        self.members = ("tokens",) if tokenizer is None else ("text", "tokens")

    def refusal(self, member: str) -> str:
        """Say why this input cannot be read."""
        if member == "text":
            return "The model takes tokens: no tokenizer.json is declared for it."
        return f"The model takes {' or '.join(f'`{name}`' for name in self.members)}, not {member}."

    def example(self) -> dict[str, Any]:
        """Give a text, or one token without a tokenizer."""
        if self._tokenizer is None:
            return {"tokens": {name: [1] for name in self.names}}
        return {"text": "This is an example."}

    def blank(self, count: int) -> Samples:
        """Give samples of one token."""
        return self._samples([self.example_of(1)] * count)

    def decode(self, member: str, value: Any, max_pixels: int) -> Samples:
        """Turn a text, or an object of rows of integers, into one sample."""
        rows = self._tokenized(value) if member == "text" else self._given(value)
        (sample,) = self._samples([rows])
        return sample  # type: ignore[no-any-return] # an object array has items of any type

    def check(self, values: NDArray[Any]) -> Samples:
        """Turn `input_ids` (N, L) into samples; only for models whose other inputs follow from them."""
        if values.ndim != 2 or values.dtype.kind not in "iu" or not values.size:
            raise UnusableInput(
                f"The array has the shape {values.shape} and the type {values.dtype}; the model takes "
                "integers (N, L), tokens."
            )
        return self._samples([self._given({self.names[0]: row.tolist()}) for row in values])

    def batch(self, samples: Samples) -> dict[str, NDArray[Any]]:
        """Give each input of the model, padded to (N, L)."""
        length = self._fixed_length or max(len(sample[0]) for sample in samples)
        given = {}
        for index, (name, dtype) in enumerate(zip(self.names, self._dtypes, strict=True)):
            padded = np.full((len(samples), length), self.pad[name], dtype)
            for row, sample in enumerate(samples):
                padded[row, : len(sample[index])] = sample[index]
            given[name] = padded
        return given

    def example_of(self, length: int) -> Tokens:
        """Give a sample in which no token is padding: some models count the positions of the others only."""
        token = next(token for token in (2, 3, 4) if token not in (self.pad[self._ids], self.end))
        values = {self._ids: token, TYPES: 0}
        tokens = Tokens(np.full(length, values.get(name, 1), np.int64) for name in self.names)
        if self.end is not None:
            tokens[self.names.index(self._ids)][-1] = self.end
        return tokens

    def depends_on_padding(self, run: Callable[[dict[str, NDArray[Any]]], Any], error: float) -> bool:
        """Whether a short sample has other logits beside a long one than alone, by `error` of the largest."""
        short, long = map(self.example_of, PAIR)
        try:
            alone, beside = (run(self.batch(self._samples(rows)))[0] for rows in ([short], [short, long]))
        except Exception:  # those of torch have no common base class
            return True
        return bool(abs(alone - beside).max() > error * abs(alone).max())

    def truncated(self, samples: Samples) -> list[bool]:
        """Say for each sample whether its text was longer than `max_length`."""
        return [sample.truncated for sample in samples]

    def limit_length(self, name: str, run: Callable[[dict[str, NDArray[Any]]], object]) -> None:
        """Run the longest sample once; where it fails, lower `max_length` to the longest that does not."""

        def error_of(length: int) -> Exception | None:
            try:
                run(self.batch(self._samples([self.example_of(length)])))
            except Exception as error:  # those of torch and onnxruntime have no common base class
                return error
            return None

        if (error := error_of(longest := self.max_length)) is None:
            return
        usable = bisect_left(range(1, longest), True, key=lambda length: error_of(length) is not None)
        if not usable:
            message = f"{name} fails on a sample of {longest} tokens, and on shorter ones: {error}"
            raise BackboneError(message[:1000]) from error
        logger.warning(
            "%s reads at most %d tokens, not %d; longer texts are truncated", name, usable, longest
        )
        self.max_length = usable
        if self._tokenizer is not None:
            self._tokenizer.enable_truncation(usable, direction=self._tokenizer.truncation["direction"])

    def of_texts(self, texts: Sequence[str], first: int = 0) -> Samples:
        """Turn texts into samples; faster than one after the other."""
        if self._tokenizer is None:
            raise UnusableInput(self.refusal("text"))
        encoded = self._tokenizer.encode_batch(list(texts))
        for row, one in enumerate(encoded):
            if not one.ids:
                raise UnusableInput(f"texts[{first + row}]: The text has no tokens.")
        return self._samples([self._rows_of(one) for one in encoded])

    def _tokenized(self, text: str) -> Tokens:
        if not isinstance(text, str) or self._tokenizer is None:
            raise UnusableInput(f"The text is {text!r:.100}; it must be a string.")
        encoded = self._tokenizer.encode(text)
        if not encoded.ids:
            raise UnusableInput("The text has no tokens.")
        return self._rows_of(encoded)

    def _rows_of(self, encoded: Any) -> Tokens:
        rows = {IDS: encoded.ids, MASK: encoded.attention_mask, TYPES: encoded.type_ids}
        rows[self._ids] = encoded.ids
        tokens = Tokens(np.array(rows[name], np.int64) for name in self.names)
        tokens.truncated = bool(encoded.overflowing)
        return tokens

    def _given(self, value: Any) -> Tokens:
        if not isinstance(value, dict) or not value:
            raise UnusableInput(f"tokens must be an object with {', '.join(self.names)}.")
        if unknown := next((name for name in value if name not in self.names), None):
            raise UnusableInput(f"The model has no input {unknown!r:.100}; it has {', '.join(self.names)}.")
        first = next(iter(value.values()))
        length = len(first) if isinstance(first, list) else 0
        if not 0 < length <= self.max_length:
            raise UnusableInput(f"The sample has {length} tokens; it must have 1 to {self.max_length}.")
        rows = []
        for name in self.names:
            row = value.get(name)
            if row is None:
                if name not in (MASK, TYPES):
                    raise UnusableInput(f"tokens.{name} is missing.")
                row = [1 if name == MASK else 0] * length
            if not isinstance(row, list) or len(row) != length:
                raise UnusableInput(f"tokens.{name} must be a list of {length} integers.")
            if not all(type(token) is int and 0 <= token < 2**31 for token in row):
                raise UnusableInput(f"tokens.{name} must hold integers from 0.")
            if (largest := max(row)) >= (size := self._sizes.get(name, 2**31)):
                raise UnusableInput(f"tokens.{name} holds {largest}; the model reads 0 to {size - 1}.")
            rows.append(np.array(row, np.int64))
        return Tokens(rows)

    def _samples(self, rows: Sequence[Tokens]) -> Samples:
        samples = np.empty(len(rows), object)
        for index, row in enumerate(rows):
            samples[index] = row
        return samples


def open_tokenizer(path: Path, max_length: int) -> Any:
    """Open a `tokenizer.json`, without its padding and cut to `max_length` at the end that it is cut at."""
    try:
        import tokenizers  # noqa: PLC0415 - an optional package
    except ImportError as error:
        raise BackboneError(f"{path}: {TEXT_PACKAGE}.") from error
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # its errors have no common class
        raise BackboneError(f"{path} is no readable tokenizer.json: {error}") from error
    declared = read_if_there(path.with_name("tokenizer_config.json")).get("truncation_side")
    side = declared or (tokenizer.truncation or {}).get("direction", "right")
    if side not in ("left", "right"):
        raise BackboneError(f"{path.parent}: truncation_side is {side!r:.100}; it may be 'left' or 'right'.")
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length, direction=side)
    return tokenizer
