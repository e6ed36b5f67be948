"""Recorded traffic: when requests arrived, how long they were and which prompts shared prefixes.

Two formats, each plain or gzipped, distinguished by their first character (docs/routing.md has their fields):

- Mooncake JSONL (github.com/kvcache-ai/Mooncake): `timestamp` in ms, `input_length` and `output_length` in tokens,
  `hash_ids`: one number per block of the prompt, equal numbers for equal prefixes. The last block may be partial.
- Azure CSV (github.com/Azure/AzurePublicDataset): `TIMESTAMP,ContextTokens,GeneratedTokens`. It has no information
    about prefixes, so hit rates measured on it mean nothing.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 512
"""Tokens per block in the published Mooncake traces."""


class TraceError(ValueError):
    """An unreadable trace; the message names the file, the line and what was expected there."""


EXPECTED = (
    "a JSON object on each line with timestamp, input_length, output_length and hash_ids (Mooncake), or CSV with "
    "the header TIMESTAMP,ContextTokens,GeneratedTokens (Azure), plain or gzipped"
)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request."""

    time: float
    """Seconds since the trace's first request."""
    num_tokens: int
    """Prompt tokens."""
    num_output: int
    """Tokens generated."""
    blocks: tuple[int, ...]
    """One number per started block of the prompt; equal beginnings have equal numbers. Small ints."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests ordered by time."""

    name: str
    requests: tuple[TraceRequest, ...]
    block_tokens: int
    has_prefixes: bool
    """Whether `blocks` were recorded; if not, no two prompts share one."""

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.num_tokens for request in self.requests)

    def head(self, count: int) -> Trace:
        """Return a trace of the first `count` requests."""
        return Trace(self.name, self.requests[:count], self.block_tokens, self.has_prefixes)


def read_trace(path: Path, block_tokens: int = BLOCK_TOKENS) -> Trace:
    """Read and check a trace. Raises TraceError at the first invalid line, or when there is no request."""
    text = _text(path)
    if not text.strip():
        raise TraceError(f"{path} holds no requests: it is empty. Expected {EXPECTED}")
    records = _Records(path, block_tokens)
    if text.lstrip().startswith("{"):
        found, has_prefixes = [records.mooncake(number, line) for number, line in _lines(text)], True
    else:
        found, has_prefixes = list(records.azure(text)), False
    if not found:
        raise TraceError(f"{path} holds no requests: nothing follows its header. Expected {EXPECTED}")
    found.sort(key=lambda request: request.time)
    start = found[0].time
    requests = tuple(TraceRequest(r.time - start, r.num_tokens, r.num_output, r.blocks) for r in found)
    return Trace(path.name, requests, block_tokens, has_prefixes)


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        return content.decode()
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read as text, plain or gzipped: {error}") from None
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield number, line


class _Records:
    """Turns lines into requests. Block numbers are renumbered, so they are small for every file."""

    def __init__(self, path: Path, block_tokens: int) -> None:
        self._path = path
        self._block_tokens = block_tokens
        self._numbers: dict[Any, int] = {}

    def mooncake(self, line_number: int, line: str) -> TraceRequest:
        """Parse one JSON line."""
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise self._error(line_number, f"expected a JSON object: {error}") from None
        if not isinstance(record, dict):
            raise self._error(line_number, f"expected a JSON object, got {type(record).__name__}")
        time = self._number(line_number, record, "timestamp", "milliseconds, at least 0", int | float, 0)
        num_tokens = self._number(line_number, record, "input_length", "tokens, at least 1", int, 1)
        num_output = self._number(line_number, record, "output_length", "tokens, at least 0", int, 0)
        ids = self._field(line_number, record, "hash_ids")
        if not isinstance(ids, list) or not all(type(id_) is int for id_ in ids):
            raise self._error(line_number, f'"hash_ids" must be a list of integers, got {_short(ids)}')
        expected = -(-int(num_tokens) // self._block_tokens)
        if len(ids) != expected:
            raise self._error(
                line_number,
                f'expected {expected} "hash_ids" for {num_tokens} tokens in blocks of {self._block_tokens}, '
                f"got {len(ids)}",
            )
        blocks = tuple(self._numbers.setdefault(id_, len(self._numbers)) for id_ in ids)
        return TraceRequest(float(time) / 1000, int(num_tokens), int(num_output), blocks)

    def azure(self, text: str) -> Iterator[TraceRequest]:
        """Parse all rows of a CSV file with a header."""
        reader = csv.DictReader(io.StringIO(text))
        missing = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} - set(reader.fieldnames or ())
        if missing:
            lacking = ", ".join(sorted(missing))
            message = f"this is neither a JSON object nor a header with {lacking}. Expected {EXPECTED}"
            raise self._error(1, message)
        for row in reader:
            time = self._timestamp(reader.line_num, row["TIMESTAMP"])
            num_tokens = self._count(reader.line_num, "ContextTokens", row["ContextTokens"], 1)
            num_output = self._count(reader.line_num, "GeneratedTokens", row["GeneratedTokens"], 0)
            first = len(self._numbers)
            blocks = tuple(range(first, first - (-num_tokens // self._block_tokens)))
            self._numbers.update((block, block) for block in blocks)
            yield TraceRequest(time, num_tokens, num_output, blocks)

    def _field(self, line: int, record: dict[str, Any], name: str) -> Any:
        if name not in record:
            raise self._error(line, f'the field "{name}" is missing')
        return record[name]

    def _number(
        self, line: int, record: dict[str, Any], name: str, what: str, kind: Any, least: int
    ) -> int | float:
        value = self._field(line, record, name)
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < float("inf"):
            raise self._error(line, f'"{name}" must be {what}, got {_short(value)}')
        return value  # type: ignore[no-any-return]

    def _count(self, line: int, name: str, value: str | None, least: int) -> int:
        if value is None or not value.strip().isdecimal() or int(value) < least:
            raise self._error(line, f"{name} must be tokens, at least {least}, got {_short(value)}")
        return int(value)

    def _timestamp(self, line: int, value: str) -> float:
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            raise self._error(
                line, f"TIMESTAMP must be like 2023-11-16 18:15:46.680, got {_short(value)}"
            ) from None

    def _error(self, line: int, message: str) -> TraceError:
        return TraceError(f"{self._path}, line {line}: {message}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
