"""Reads files of requests in OpenAI's batch format: a JSON object on each line."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from deployments.batch.errors import BatchFileError
from engine.base.files import open_regular

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
)
"""Endpoints whose requests can be in a batch."""
MAX_LINE_BYTES = 64 * 2**20
"""Longest line that is read, in bytes, by default; a server refuses bodies that are much smaller."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_EXPECTED = 'expected {"custom_id": "...", "method": "POST", "url": "/v1/chat/completions", "body": {...}}'


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request of a batch."""

    custom_id: str
    """Names the request in its file and in the output."""
    url: str
    body: bytes
    """A JSON object."""

    def with_fields(self, fields: Mapping[str, Any]) -> bytes:
        """Return the body with those of the fields that it lacks."""
        if not fields:
            return self.body
        given = msgspec.json.decode(self.body, type=_holder_of(tuple(fields)))
        lacking = {name: value for name, value in fields.items() if getattr(given, name) is msgspec.UNSET}
        rest = self.body.lstrip()[1:].lstrip()
        if not lacking:
            return self.body
        head = msgspec.json.encode(lacking)[:-1]
        return head + rest if rest.startswith(b"}") else head + b"," + rest


@dataclass(frozen=True, slots=True)
class InvalidLine:
    """A line that is no request, and the reason."""

    custom_id: str | None
    """None if the line has none that can be read."""
    message: str
    code: str = "invalid_request"
    param: str | None = None
    """The field at fault, if there is one."""


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Named(msgspec.Struct):
    custom_id: str


class _Body(msgspec.Struct):
    """The fields of a body that are read. The rest is for the endpoint, and large, so it is not decoded here."""

    stream: msgspec.Raw = msgspec.Raw(b"null")
    background: msgspec.Raw = msgspec.Raw(b"null")


_line_decoder = msgspec.json.Decoder(_Line)
_name_decoder = msgspec.json.Decoder(_Named)
_body_decoder = msgspec.json.Decoder(_Body)
_OFF = (b"null", b"false")


@cache
def _holder_of(names: tuple[str, ...]) -> type[msgspec.Struct]:
    return msgspec.defstruct("Given", [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in names])


def parse_line(data: bytes) -> BatchRequest | InvalidLine:
    """Return a line's request, or the line's error."""
    try:
        line = _line_decoder.decode(data)
    except msgspec.ValidationError as error:
        return InvalidLine(_custom_id(data), f"This line is no request of a batch: {error}; {_EXPECTED}.")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _not_json(error)
    if line.method != "POST":
        message = f"method is {line.method[:64]!r}; only POST can be in a batch."
        return InvalidLine(line.custom_id, message, "invalid_method", "method")
    if line.url not in URLS:
        message = f"url is {line.url[:64]!r}; it must be {' or '.join(URLS)}."
        return InvalidLine(line.custom_id, message, "invalid_url", "url")
    try:
        body = _body_decoder.decode(line.body)
    except msgspec.ValidationError as error:
        message = f"This line is no request of a batch: {error} - at `$.body`; {_EXPECTED}."
        return InvalidLine(line.custom_id, message, param="body")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _not_json(error)
    for name in _Body.__struct_fields__:
        if bytes(getattr(body, name)) not in _OFF:
            message = f"body.{name} is set; an answer in a batch is whole. Leave it out."
            return InvalidLine(line.custom_id, message, "unsupported_field", f"body.{name}")
    return BatchRequest(line.custom_id, line.url, bytes(line.body))


def _not_json(error: Exception) -> InvalidLine:
    return InvalidLine(None, f"This line is not valid JSON ({error}); {_EXPECTED}.", "invalid_json_line")


def _custom_id(data: bytes) -> str | None:
    try:
        return _name_decoder.decode(data).custom_id
    except msgspec.DecodeError:
        return None


class BatchFile:
    """A file of requests. It is read line by line, twice: to check it, and to send its requests.

    Lines are counted from 0, without blank ones; messages give the numbers that editors show. Only each line's
    custom_id stays in memory.
    """

    def __init__(self, path: Path, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        """Check the file. Raises BatchFileError when it has no request, or when two have the same custom_id."""
        self.path, self._max_line_bytes = path, max_line_bytes
        self.num_invalid = 0
        self._index: dict[str, int] = {}
        """The number of the line with each custom_id."""
        try:
            with open_regular(path) as file:
                self.fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
                """SHA-256 of the content."""
                file.seek(0)
                self.num_lines = self._check(file)
        except OSError as error:
            raise BatchFileError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None

    def __iter__(self) -> Iterator[BatchRequest | InvalidLine]:
        """Yield every line. Raises BatchFileError when the file has changed since the check."""
        with open_regular(self.path) as file:
            count = 0
            for count, (_, line) in enumerate(self._parsed(file), 1):
                if line.custom_id is not None and self._index.get(line.custom_id) != count - 1:
                    break
                yield line
            else:
                if count == self.num_lines:
                    return
        raise BatchFileError(f"{self.path} was changed while it was read; start again")

    def index(self, custom_id: str) -> int | None:
        """Return the number of the line with this custom_id; None when there is none."""
        return self._index.get(custom_id)

    def _check(self, file: BinaryIO) -> int:
        """Note the custom_ids, and return the number of lines."""
        numbers: list[int] = []
        first_problem = f"it is empty; {_EXPECTED} on each line"
        for number, line in self._parsed(file):
            if isinstance(line, InvalidLine):
                self.num_invalid += 1
                first_problem = first_problem if self.num_invalid > 1 else f"line {number}: {line.message}"
            if line.custom_id is not None:
                before = self._index.setdefault(line.custom_id, len(numbers))
                if before != len(numbers):
                    raise BatchFileError(
                        f"{self.path} has the custom_id {line.custom_id[:128]!r} twice, in lines "
                        f"{numbers[before]} and {number}: their answers could not be told apart. Make them differ"
                    )
            numbers.append(number)
        if self.num_invalid == len(numbers):
            raise BatchFileError(f"{self.path} has no request; {first_problem}")
        return len(numbers)

    def _parsed(self, file: BinaryIO) -> Iterator[tuple[int, BatchRequest | InvalidLine]]:
        return read_lines(file, self._max_line_bytes)


def read_lines(file: BinaryIO, max_line_bytes: int) -> Iterator[tuple[int, BatchRequest | InvalidLine]]:
    """Yield the lines that are not blank, with their numbers in the file from 1."""
    for number, data in _bounded_lines(file, max_line_bytes):
        if data is None:
            message = f"This line is longer than {max_line_bytes} bytes."
            yield number, InvalidLine(None, message, "line_too_long")
        elif data.strip():
            yield number, parse_line(data)


def _bounded_lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield each line with its number from 1; None for a longer one, which is skipped and never in memory."""
    number = 0
    while data := file.readline(max_bytes + 1):
        number += 1
        if number == 1:
            data = data.removeprefix(_BYTE_ORDER_MARK)
        if len(data) <= max_bytes or data.endswith(b"\n"):
            yield number, data
            continue
        while data and not data.endswith(b"\n"):
            data = file.readline(max_bytes)
        yield number, None
