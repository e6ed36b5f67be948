"""The tensors of a file that torch.save has written (pytorch_model.bin), found without unpickling it.

    zip of stored entries  │ data.pkl                          │ data/0 │ data/1 │ ...
                           │ names, types, shapes and places ──┴──▶ numbers, mapped into memory

Unpickling calls the functions that a pickle names. Here nothing is called: only the opcodes with which torch.save
describes tensors are followed, and three names stand for what they would build. The file may be damaged or
hostile: all counts and places are checked against it. Only layers that draft are read from such files, because
many are published in no other form.
"""

from __future__ import annotations

import math
import mmap
import os
import pickletools
import struct
import warnings
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.base.errors import ModelLoadError
from engine.base.files import open_regular
from engine.loading.mapped_tensors import MappedTensor

if TYPE_CHECKING:
    import torch

    from engine.loading.weight_streaming import Stored

_MAX_PICKLE_BYTES = 2**20
"""A thousand times what a layer's tensors need."""
_MAX_AXES = 8
_TYPES: Mapping[str, tuple[str, str, int]] = {
    "torch FloatStorage": ("F32", "float32", 4),
    "torch HalfStorage": ("F16", "float16", 2),
    "torch BFloat16Storage": ("BF16", "bfloat16", 2),
    "torch LongStorage": ("I64", "int64", 8),
    "torch IntStorage": ("I32", "int32", 4),
    "torch BoolStorage": ("BOOL", "bool", 1),
}
"""For each of torch's names for memory: safetensors' spelling of the type, torch's, and its bytes."""
_TO_SAFETENSORS = (
    "if you trust it, convert it to safetensors: "
    "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
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


def is_pickled(model: Path) -> bool:
    """Whether the path of a layer's weights is that of a file from torch.save."""
    return model.suffix == ".bin"


def open_pickled(path: Path) -> dict[str, MappedTensor]:
    """Map a file and return its tensors by name. Raises ModelLoadError."""
    return {
        name: MappedTensor(name, place.shape, _TYPES[place.type][0], _View(path, place))
        for name, place in _places(path).items()
    }


def stored_pickled(path: Path) -> dict[str, Stored]:
    """Return the places of a file's tensors, by name. Raises ModelLoadError."""
    import torch

    from engine.loading.weight_streaming import Stored

    return {
        name: Stored(path, place.offset, place.num_bytes, getattr(torch, _TYPES[place.type][1]), place.shape)
        for name, place in _places(path).items()
    }


class _View:
    """One tensor of a file, as the safetensors library offers it."""

    def __init__(self, path: Path, place: _Place) -> None:
        self._path, self._place = path, place

    def get_tensor(self, _name: str) -> torch.Tensor:
        """Return the tensor, which is a view of the file."""
        import torch

        place, dtype = self._place, getattr(torch, _TYPES[self._place.type][1])
        try:
            with open_regular(self._path) as file, warnings.catch_warnings():
                # It is never written.
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                count = math.prod(place.shape)
                return torch.frombuffer(content, dtype=dtype, count=count, offset=place.offset).view(place.shape)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{self._path} cannot be read: {error}; download it again") from error


def _places(path: Path) -> dict[str, _Place]:
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            read = partial(_small_entry, archive, entries)
            if "byteorder" in entries and read("byteorder") != b"little":
                raise ValueError("its numbers are big-endian")
            tensors, size = _described(read("data.pkl")), os.fstat(file.fileno()).st_size
            return {name: _place(file, size, entries, tensor) for name, tensor in tensors.items()}
    except (
        OSError,
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
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > _MAX_PICKLE_BYTES:
        raise ValueError(f"its {name} is compressed or has more than {_MAX_PICKLE_BYTES} bytes")
    return archive.read(entry)


def _entry(entries: Mapping[str, zipfile.ZipInfo], name: str) -> zipfile.ZipInfo:
    if name not in entries:
        raise ValueError(f"it has no {name}")
    return entries[name]


def _place(file: Any, size: int, entries: Mapping[str, zipfile.ZipInfo], tensor: _Tensor) -> _Place:
    """Return the place of a tensor; raises ValueError if it is not within its entry and the file."""
    entry, item_bytes = _entry(entries, f"data/{tensor.storage.key}"), _TYPES[tensor.storage.type][2]
    numbers = (tensor.start, *tensor.shape)
    if len(tensor.shape) > _MAX_AXES or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("a tensor has an impossible shape")
    expected = [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
    for count, stride, dense in zip(tensor.shape, tensor.strides, expected, strict=True):
        if count > 1 and stride != dense:
            raise ValueError(f"the numbers of a tensor of shape {tensor.shape} are not next to each other")
    file.seek(entry.header_offset)
    signature, name_bytes, extra_bytes = struct.unpack("<4s22xHH", file.read(30))
    offset = entry.header_offset + 30 + name_bytes + extra_bytes + tensor.start * item_bytes
    num_bytes = math.prod(tensor.shape) * item_bytes
    is_within = tensor.start * item_bytes + num_bytes <= entry.file_size and offset + num_bytes <= size
    if signature != b"PK\3\4" or entry.compress_type != zipfile.ZIP_STORED or not is_within:
        raise ValueError(f"{entry.filename} does not hold the tensors that it should")
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

    for opcode, argument, _ in pickletools.genops(pickle):
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
