"""Writes GGUF files byte by byte, so that tests can state what no writer would write."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_LAYOUTS = {4: "<I", 6: "<f", 7: "<?", 10: "<Q", 2: "<H", 5: "<i"}


def text(value: str | bytes) -> bytes:
    """Return a string as files have it."""
    encoded = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(encoded)) + encoded


def key(name: str, kind: int, *values: object) -> bytes:
    """Return a key with one value of a type; type 8 is a string."""
    return text(name) + struct.pack("<I", kind) + b"".join(_value(kind, value) for value in values)


def array(name: str, kind: int, values: Sequence[object], count: int | None = None) -> bytes:
    """Return a key with an array, which says that it has `count` values."""
    stated = len(values) if count is None else count
    return text(name) + struct.pack("<IIQ", 9, kind, stated) + b"".join(_value(kind, value) for value in values)


def _value(kind: int, value: object) -> bytes:
    if kind == 8:
        assert isinstance(value, str | bytes)
        return text(value)
    return struct.pack(_LAYOUTS[kind], value)


def entry(name: str | bytes, shape: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    """Return a tensor's entry; `shape` is in the file's order, the axis of neighbours first."""
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + axes + struct.pack("<IQ", kind, offset)


@dataclass
class FileOfBytes:
    """A GGUF file: a small sound one, but for what a test changes."""

    magic: bytes = b"GGUF"
    version: int = 3
    keys: list[bytes] = field(default_factory=lambda: [key("general.architecture", 8, "llama")])
    entries: list[bytes] = field(default_factory=lambda: [entry("a.weight", [4, 2])])
    num_keys: int | None = None
    num_tensors: int | None = None
    alignment: int = 32
    data: bytes = bytes(32)

    def content(self) -> bytes:
        """Return the file."""
        tensors = len(self.entries) if self.num_tensors is None else self.num_tensors
        keys = len(self.keys) if self.num_keys is None else self.num_keys
        header = self.magic + struct.pack("<IQQ", self.version, tensors, keys)
        header += b"".join(self.keys) + b"".join(self.entries)
        return header + bytes(-len(header) % self.alignment) + self.data

    def write(self, path: Path) -> Path:
        """Write the file and return its path."""
        path.write_bytes(self.content())
        return path
