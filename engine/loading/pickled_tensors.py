"""The tensors of files that torch.save has written (pytorch_model.bin), found without unpickling them.

    zip of stored entries  │ data.pkl                          │ data/0 │ data/1 │ ...
                           │ names, types, shapes and places ──┴──▶ numbers, mapped into memory

Unpickling calls the functions that a pickle names. Here nothing is called: only the opcodes with which torch.save
describes tensors are followed, and three names stand for what they would build. The file may be damaged or
hostile: all counts and places are checked against it.
"""

from __future__ import annotations

import math
import os
import pickletools
import struct
import zipfile
from collections.abc import Mapping, Sequence
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from engine.base.errors import ModelLoadError
from engine.base.files import open_fd
from engine.loading.mapped_tensors import MappedFile, MappedTensor

if TYPE_CHECKING:
    import torch

    from engine.loading.weight_streaming import Stored

_MAX_BYTES = 2**22
"""The most bytes of a pickle, and of the list of a file's entries. A tensor needs about 200 and 100."""
_MAX_OPCODES = 2**20
"""A tensor needs about 35. So a pickle can neither be followed for long nor build much."""
_OLD_FORMAT = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_MAX_AXES = 8
_TYPES: Mapping[str, tuple[str, str, int]] = {
    "torch FloatStorage": ("F32", "float32", 4),
    "torch HalfStorage": ("F16", "float16", 2),
    "torch BFloat16Storage": ("BF16", "bfloat16", 2),
    "torch DoubleStorage": ("F64", "float64", 8),
    "torch LongStorage": ("I64", "int64", 8),
    "torch IntStorage": ("I32", "int32", 4),
    "torch ShortStorage": ("I16", "int16", 2),
    "torch CharStorage": ("I8", "int8", 1),
    "torch ByteStorage": ("U8", "uint8", 1),
    "torch BoolStorage": ("BOOL", "bool", 1),
}
"""For each of torch's names for memory: safetensors' spelling of the type, torch's, and its bytes."""
_TO_SAFETENSORS = (
    "if you trust it, convert it to safetensors: safetensors.torch.save_file({name: tensor.clone().contiguous() "
    "for name, tensor in torch.load(FILE, weights_only=True).items()}, 'model.safetensors')"
)


class _Storage(NamedTuple):
    """The memory of tensors: an entry of the file."""

    type: str
    key: str


class _Tensor(NamedTuple):
    """A tensor as the pickle describes it, with nothing checked."""

    storage: _Storage
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Place(NamedTuple):
    """The place of a tensor in the file."""

    type: str
    offset: int
    num_bytes: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return cast("torch.dtype", getattr(torch, _TYPES[self.type][1]))


def are_pickled(files: Sequence[Path]) -> bool:
    """Whether a model's weight files are from torch.save."""
    return files[0].suffix == ".bin"


def open_pickled(paths: Sequence[Path]) -> dict[str, MappedTensor]:
    """Map files and return their tensors by name. Raises ModelLoadError."""
    found: dict[str, MappedTensor] = {}
    for path in paths:
        places, file = _places(path), MappedFile(path)
        for name, place in places.items():
            found[name] = MappedTensor(name, place.shape, _TYPES[place.type][0], _View(file, place))
    return found


def stored_pickled(paths: Sequence[Path]) -> dict[str, Stored]:
    """Return the places of the tensors in files, by name. Raises ModelLoadError."""
    from engine.loading.weight_streaming import Stored

    return {
        name: Stored(path, place.offset, place.num_bytes, place.dtype, place.shape)
        for path in paths
        for name, place in _places(path).items()
    }


class _View:
    """One tensor of a file, as the safetensors library offers it."""

    def __init__(self, file: MappedFile, place: _Place) -> None:
        self._file, self._place = file, place

    def get_tensor(self, _name: str) -> torch.Tensor:
        """Return the tensor, which is a view of the file. Raises ModelLoadError."""
        return self._file.view(self._place.offset, self._place.dtype, self._place.shape)


class _Reader(BufferedReader):
    """A file of which few bytes are read together, whatever the file says."""

    def read(self, size: int | None = -1, /) -> bytes:
        most = _MAX_BYTES + 1
        content = super().read(most if size is None or size < 0 else min(size, most))
        if len(content) == most:
            raise ValueError(f"it describes its tensors in more than {_MAX_BYTES} bytes")
        return content


def _places(path: Path) -> dict[str, _Place]:
    try:
        with _Reader(FileIO(open_fd(path))) as file:
            if file.peek(len(_OLD_FORMAT)).startswith(_OLD_FORMAT):
                raise ValueError("it has the format of torch before 1.6")
            with zipfile.ZipFile(file) as archive:
                entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
                read = partial(_small_entry, archive, entries)
                if "byteorder" in entries and read("byteorder") != b"little":
                    raise ValueError("its numbers are big-endian")
                tensors = _described(read("data.pkl"))
            size = os.fstat(file.fileno()).st_size
            return {name: _place(file, size, entries, name, tensor) for name, tensor in tensors.items()}
    except (
        OSError,
        EOFError,
        ArithmeticError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        struct.error,
        zipfile.BadZipFile,
        NotImplementedError,
        RuntimeError,
    ) as error:
        reason = (str(error) or type(error).__name__)[:200]
        raise ModelLoadError(
            f"{path} is not a file in which torch.save (1.6 or newer) has stored only tensors: {reason}; download "
            f"it again, or {_TO_SAFETENSORS}"
        ) from error


def _small_entry(archive: zipfile.ZipFile, entries: Mapping[str, zipfile.ZipInfo], name: str) -> bytes:
    """Return the bytes of an entry that is not compressed and not large."""
    entry = _entry(entries, name)
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > _MAX_BYTES:
        raise ValueError(f"its {name} is compressed or has more than {_MAX_BYTES} bytes")
    return archive.read(entry)


def _entry(entries: Mapping[str, zipfile.ZipInfo], name: str) -> zipfile.ZipInfo:
    if name not in entries:
        raise ValueError(f"it has no {name}")
    return entries[name]


def _place(
    file: BufferedReader, size: int, entries: Mapping[str, zipfile.ZipInfo], name: str, tensor: _Tensor
) -> _Place:
    """Return the place of a tensor; raises ValueError if it is not within its entry and the file."""
    entry, item_bytes = _entry(entries, f"data/{tensor.storage.key}"), _TYPES[tensor.storage.type][2]
    numbers = (tensor.start, *tensor.shape)
    is_shape = isinstance(tensor.shape, tuple) and len(tensor.shape) <= _MAX_AXES
    if not is_shape or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{name} has an impossible shape")
    count = math.prod(tensor.shape)
    dense = [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
    for length, stride, expected in zip(tensor.shape, tensor.strides, dense, strict=True):
        if count and length > 1 and stride != expected:
            raise ValueError(f"the numbers of {name}, of shape {tensor.shape}, are not next to each other")
    file.seek(entry.header_offset)
    signature, name_bytes, extra_bytes = struct.unpack("<4s22xHH", file.read(30))
    offset = entry.header_offset + 30 + name_bytes + extra_bytes + tensor.start * item_bytes
    num_bytes = count * item_bytes
    is_within = tensor.start * item_bytes + num_bytes <= entry.file_size and offset + num_bytes <= size
    if signature != b"PK\3\4" or entry.compress_type != zipfile.ZIP_STORED or not is_within:
        raise ValueError(f"{entry.filename} does not hold {name}")
    return _Place(tensor.storage.type, offset, num_bytes, tensor.shape)


def _described(pickle: bytes) -> dict[str, _Tensor]:
    """Follow a pickle and return the tensors that it describes."""
    found = _followed(pickle)
    if not isinstance(found, dict):
        raise ValueError("it holds no tensors with names")
    for name, tensor in found.items():
        if not isinstance(tensor, _Tensor):
            raise ValueError(f"its {name!r} is no tensor")
    return found


def _followed(pickle: bytes) -> object:
    """Return what a pickle builds."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, object] = {}

    def popped(count: int) -> list[Any]:
        if count > len(stack):
            raise ValueError("its pickle is damaged")
        items = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        return items

    for num_opcodes, (opcode, argument, _) in enumerate(pickletools.genops(pickle)):
        if num_opcodes > _MAX_OPCODES:
            raise ValueError(f"its pickle has more than {_MAX_OPCODES} opcodes")
        match opcode.name:
            case "PROTO":
                continue
            case "MARK":
                marks.append(len(stack))
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append(opcode.name == "NEWTRUE")
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINUNICODE" | "GLOBAL":
                stack.append(argument)  # of a global, its module and name
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(popped(int(opcode.name[-1]))))
            case "TUPLE":
                stack.append(tuple(popped(len(stack) - marks.pop())))
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "SETITEM":
                _set(stack, popped(2))
            case "SETITEMS":
                _set(stack, popped(len(stack) - marks.pop()))
            case "BINPERSID":
                stack.append(_storage(*popped(1)[0]))
            case "REDUCE":
                stack.append(_stands_for(*popped(2)))
            case "BUILD":  # attributes of a dictionary, such as the versions of modules
                popped(1)
            case "STOP":
                return stack.pop()
            case name:
                raise ValueError(f"its pickle has {name}, with which tensors are not described")
    raise ValueError("its pickle has no end")


def _set(stack: list[Any], items: list[Any]) -> None:
    """Set keys, each before its value in `items`, of the dictionary on top of the stack."""
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) is not str or not isinstance(stack[-1], dict):
            raise ValueError("its pickle sets something else than names of a dictionary")
        stack[-1][key] = value


def _storage(kind: str, type_: str, key: str, _device: str, _count: int) -> _Storage:
    if kind != "storage" or type(type_) is not str or type_ not in _TYPES or type(key) is not str:
        what = type_ if type(type_) is str else "unknown type"
        raise ValueError(f"it holds numbers in a {what}; supported are {', '.join(_TYPES)}")
    return _Storage(type_, key)


def _stands_for(function: object, arguments: tuple[Any, ...]) -> object:
    """Return what a call describes, if it is one with which torch.save describes tensors."""
    match function:
        case "collections OrderedDict":
            return {}
        case "torch._utils _rebuild_tensor_v2":
            storage, start, shape, strides, *_ = arguments
            if isinstance(storage, _Storage):
                return _Tensor(storage, start, shape, strides)
        case "torch._utils _rebuild_parameter":
            return arguments[0]
    what = function.replace(" ", ".") if isinstance(function, str) else "something"
    raise ValueError(f"unpickling it would call {what}, which describes no tensor")
