"""Reads the header of a GGUF file: its metadata and its tensors' places. The file may be damaged or hostile.

    "GGUF", version | numbers of tensors and keys | keys, values | tensors: name, shape, type, offset | pad | data

Every count, length and offset is checked against the file before memory is allocated for it: time and memory
depend on the real size of a file, not on its claims. Layout: ggml's docs/gguf.md, versions 2 and 3, little endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.base.errors import ModelLoadError
from engine.base.files import open_regular
from engine.gguf.types import SUPPORTED, TYPES, UNSUPPORTED, BlockType

MAX_HEADER_BYTES = 2**26
"""Four times the largest header of any model, one with 262,144 tokens and their merges."""
_MAX_KEY_BYTES, _MAX_NAME_BYTES, _MAX_AXES = 2**16 - 1, 63, 4
"""Limits of the format: a key's length, a tensor's name's length, a tensor's axes."""
_VERSIONS, _ALIGNMENT, _FEWEST_BYTES = (2, 3), 32, 24
_SHORTEST_KEY, _SHORTEST_TENSOR = 8 + 1 + 4 + 1, 8 + 1 + 4 + 8 + 4 + 8
"""The fewest bytes of a key with its value, and of a tensor's entry."""
_NUMBERS: Mapping[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""The numpy type of each numeric type of values."""
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """The type, shape and place of one tensor."""

    name: str
    shape: tuple[int, ...]
    """In torch's order, [outputs, inputs]: the last axis has adjacent numbers."""
    type: BlockType
    path: Path
    offset: int
    """Offset of its first byte in the file."""

    @property
    def num_numbers(self) -> int:
        """Number of its numbers."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Number of its bytes in the file."""
        return self.num_numbers // self.type.block * self.type.block_bytes


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The content of one file's header."""

    metadata: Mapping[str, Any]
    """Keys of the file; values are int, float, bool, str, or lists of one of these."""
    tensors: Mapping[str, GGUFTensor]


def read_header(path: Path) -> GGUFHeader:
    """Read the header of one file. Raises ModelLoadError."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            if size < _FEWEST_BYTES:
                raise _Wrong(f"it has {size} bytes, and a header has at least {_FEWEST_BYTES}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _header(_Cursor(content, size), path)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
    except _Wrong as error:
        raise ModelLoadError(f"{path} is not a usable GGUF file: {error}; download the model again") from None
    except _Unsupported as error:
        raise ModelLoadError(f"{path} is not supported: {error}") from None


class _Wrong(Exception):
    """The file is damaged. The message says what was found and what was expected."""


class _Unsupported(Exception):
    """The file is valid but not supported. The message says what was found and what was expected."""


class _Cursor:
    """The position up to which a file has been read."""

    def __init__(self, content: mmap.mmap, size: int) -> None:
        self.content, self.size, self.at = content, size, 0
        self._end = min(size, MAX_HEADER_BYTES)

    def take(self, count: int, what: str) -> int:
        """Advance by `count` bytes and return where they begin."""
        start = self.at
        if count > self._end - start:
            limit = "the end of the file" if self._end == self.size else f"{self._end} bytes, the most of a header"
            raise _Wrong(f"{what} takes {count} bytes at byte {start}, and was expected to end before {limit}")
        self.at += count
        return start

    @property
    def left(self) -> int:
        """Number of bytes that the header may still have."""
        return self._end - self.at

    def number(self, layout: str, what: str) -> int:
        """Read an integer."""
        value: int = struct.unpack_from(layout, self.content, self.take(struct.calcsize(layout), what))[0]
        return value

    def text(self, what: str, most: int | None = None) -> str:
        """Read a string of at most so many bytes."""
        length = self.number("<Q", f"the length of {what}")
        if most is not None and length > most:
            raise _Wrong(f"{what} has {length} bytes, and at most {most} were expected")
        start = self.take(length, what)
        try:
            return self.content[start : start + length].decode()
        except UnicodeDecodeError:
            raise _Wrong(f"{what} at byte {start} is not UTF-8") from None

    def texts(self, what: str) -> list[str]:
        """Read an array of strings. A vocabulary has hundreds of thousands, so speed matters here."""
        found: list[str] = []
        length_of, content, end, at = struct.Struct("<Q").unpack_from, self.content, self._end, self.at
        try:
            for _ in range(self.count(what, 8)):
                at = self.at
                start = at + 8
                self.at = start + length_of(content, at)[0] if start <= end else end + 1
                if self.at > end:
                    raise _Wrong(f"a string of {what} begins at byte {at} and ends after the header's last, {end}")
                found.append(content[start : self.at].decode())
        except UnicodeDecodeError:
            raise _Wrong(f"a string of {what} at byte {at} is not UTF-8") from None
        return found

    def count(self, what: str, fewest_bytes: int) -> int:
        """Read the number of following entries; each takes at least so many bytes."""
        count = self.number("<Q", f"the number of {what}")
        if count > self.left // fewest_bytes:
            raise _Wrong(
                f"it says that {count} {what} follow, and its header has room for {self.left // fewest_bytes}"
            )
        return count


def _header(cursor: _Cursor, path: Path) -> GGUFHeader:
    if cursor.content[:4] != b"GGUF":
        raise _Wrong(f"it begins with {cursor.content[:4]!r}, and b'GGUF' was expected")
    cursor.at = 4
    version = cursor.number("<I", "the version")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in range(1, 2**16):
            raise _Unsupported("it is big endian, and a little-endian file was expected: convert the model again")
        raise _Unsupported(f"it has version {version} of GGUF, and 2 or 3 was expected: convert the model again")
    num_tensors = cursor.number("<Q", "the number of tensors")
    num_keys = cursor.count("keys", _SHORTEST_KEY)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = _name(cursor, "a key", _MAX_KEY_BYTES)
        if key in metadata:
            raise _Wrong(f"it has the key {key} twice")
        metadata[key] = _value(cursor, f"the value of {key}")
    if num_tensors > cursor.left // _SHORTEST_TENSOR:
        room = cursor.left // _SHORTEST_TENSOR
        raise _Wrong(f"it says that {num_tensors} tensors follow, and its header has room for {room}")
    entries = [_tensor(cursor, path) for _ in range(num_tensors)]
    alignment = _alignment(metadata)
    start = -(-cursor.at // alignment) * alignment
    return GGUFHeader(metadata, _placed(entries, start, alignment, cursor.size))


def _name(cursor: _Cursor, what: str, most: int) -> str:
    name = cursor.text(f"the name of {what}", most)
    if not name or not name.isprintable():
        raise _Wrong(f"the name of {what} is {name[:80]!r}, and printable characters were expected")
    return name


def _value(cursor: _Cursor, what: str) -> Any:
    kind = cursor.number("<I", f"the type of {what}")
    if kind == _STRING:
        return cursor.text(what)
    if kind != _ARRAY:
        return _numbers(cursor, kind, 1, what)[0]
    kind = cursor.number("<I", f"the type of {what}")
    if kind == _ARRAY:
        raise _Wrong(f"{what} is an array of arrays, and one of numbers or strings was expected")
    if kind == _STRING:
        return cursor.texts(what)
    return _numbers(cursor, kind, cursor.count(f"numbers of {what}", 1), what)


def _numbers(cursor: _Cursor, kind: int, count: int, what: str) -> list[Any]:
    if kind not in _NUMBERS:
        raise _Wrong(f"{what} has type {kind}, and 0 to 12 was expected")
    dtype = np.dtype(_NUMBERS[kind])
    start = cursor.take(count * dtype.itemsize, what)
    stored = np.frombuffer(cursor.content[start : start + count * dtype.itemsize], dtype)
    return list(stored.tolist())


def _alignment(metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise _Wrong(f"general.alignment is {str(alignment)[:40]}, and a power of two was expected")
    return alignment


def _tensor(cursor: _Cursor, path: Path) -> GGUFTensor:
    """Read a tensor's entry; its offset counts from the beginning of the data."""
    name = _name(cursor, "a tensor", _MAX_NAME_BYTES)
    axes = cursor.number("<I", f"the number of axes of {name}")
    if not 1 <= axes <= _MAX_AXES:
        raise _Wrong(f"{name} has {axes} axes, and 1 to {_MAX_AXES} were expected")
    shape = tuple(cursor.number("<Q", f"the shape of {name}") for _ in range(axes))[::-1]
    number = cursor.number("<I", f"the type of {name}")
    offset = cursor.number("<Q", f"the offset of {name}")
    if number not in TYPES:
        found = UNSUPPORTED.get(number, f"the unknown type {number}")
        raise _Unsupported(
            f"{name} is stored as {found}; supported are {SUPPORTED}. Use a file with another quantization"
        )
    kind = TYPES[number]
    if 0 in shape:
        raise _Wrong(f"{name} has shape {list(shape)}, and at least one number was expected")
    if shape[-1] % kind.block:
        raise _Wrong(f"{name} has rows of {shape[-1]} numbers, and {kind.name} has whole blocks of {kind.block}")
    return GGUFTensor(name, shape, kind, path, offset)


def _placed(entries: list[GGUFTensor], start: int, alignment: int, size: int) -> dict[str, GGUFTensor]:
    """Return the tensors with their offsets in the file, by name."""
    tensors: dict[str, GGUFTensor] = {}
    end, before = start, "the header"
    for entry in sorted(entries, key=lambda entry: entry.offset):
        first = start + entry.offset
        if entry.name in tensors:
            raise _Wrong(f"it has two tensors that are called {entry.name}")
        if entry.offset % alignment:
            raise _Wrong(f"{entry.name} has offset {entry.offset}, and a multiple of {alignment} was expected")
        if first < end:
            raise _Wrong(f"{entry.name} begins at byte {first}, and {before} ends at byte {end}")
        if entry.num_bytes > size - first:
            raise _Wrong(f"{entry.name} ends at byte {first + entry.num_bytes}, and the file has {size} bytes")
        tensors[entry.name] = GGUFTensor(entry.name, entry.shape, entry.type, entry.path, first)
        end, before = first + entry.num_bytes, entry.name
    return tensors
