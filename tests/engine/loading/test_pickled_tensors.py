"""Tensors in files from torch.save: those that torch loads, and no call of anything that a file names."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.base.errors import ModelLoadError
from engine.loading.pickled_tensors import open_pickled, stored_pickled
from engine.loading.tensor_groups import Expected, TensorGroup
from engine.loading.weight_streaming import stream_groups


def saved(path: Path, content: object, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


def some_tensors() -> dict[str, torch.Tensor]:
    both = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1))
    return {
        "fc.weight": both[1],
        "norm.weight": both[0, 2],
        "half": both.half(),
        "lm_head.weight": both.bfloat16(),
        "d2t": torch.arange(7),
        "ids": torch.arange(3, dtype=torch.int32),
        "t2d": torch.tensor([True, False, True]),
        "one": torch.tensor(2.5),
        "parameter": torch.nn.Parameter(torch.ones(4)),
        "double": both.double(),
        "embeddings.position_ids": torch.arange(6).expand((1, -1)),
        "empty": torch.empty(3, 0),
        "tied.weight": both[1],
    }


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_tensors_are_those_that_torch_has_saved(tmp_path: Path, kind: type) -> None:
    """Two of them are parts of one."""
    tensors = some_tensors()
    path = saved(tmp_path / "pytorch_model.bin", kind(tensors))
    found, places = open_pickled([path]), stored_pickled([path])
    assert found.keys() == places.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].shape == tensor.shape
        read = found[name].read()
        assert read.dtype == places[name].dtype == tensor.dtype and torch.equal(read, tensor)
        into = torch.empty_like(tensor.detach())

        def store(stored: list[torch.Tensor], into: torch.Tensor = into) -> None:
            into.copy_(stored[0])

        group = TensorGroup((Expected(name, tuple(tensor.shape)),), store)
        stream_groups(places, [group], torch.device("cpu"))
        assert torch.equal(into, tensor)


def test_a_module_s_weights_are_found(tmp_path: Path) -> None:
    """They have attributes besides their names: the versions of modules."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    found = open_pickled([saved(tmp_path / "pytorch_model.bin", module.state_dict())])
    assert {name: tensor.shape for name, tensor in found.items()} == {
        "0.weight": (2, 3),
        "0.bias": (2,),
        "1.weight": (2,),
        "1.bias": (2,),
    }


# --- damaged and hostile files --------------------------------------------------------------------------------


class Calls:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._path,)


def with_pickle(path: Path, content: bytes, names: str = "data.pkl", kind: int = zipfile.ZIP_STORED) -> Path:
    """A file whose pickle is `content`."""
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr(f"archive/{names}", content)
        archive.writestr("archive/data/0", bytes(40))
    return path


def with_entries(path: Path, count: int) -> Path:
    """A file with that many entries without content."""
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(count):
            archive.writestr(zipfile.ZipInfo(str(number)), b"")
    return path


STORAGE = b"(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x0atQ".replace(b"U\x07", b"X\x07\0\0\0")
STORAGE = STORAGE.replace(b"U\x010", b"X\x01\0\0\x000").replace(b"U\x03", b"X\x03\0\0\0")


def of_tensor(start: int = 0, shape: bytes = b"K\x0a\x85", strides: bytes = b"K\x01\x85") -> bytes:
    """A pickle with one tensor in a file's 40 bytes of float32."""
    call = b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"K" + bytes([start]) + shape + strides + b"\x89}tR"
    return b"\x80\x02}X\x01\0\0\0a" + call + b"s."


NESTED = b")" + b"q\0h\0\x86" * 200
"""A pair of pairs of pairs, each twice the same, 200 deep: it would take 2^200 steps to hash or to print it."""


def test_a_tensor_within_its_memory_is_found(tmp_path: Path) -> None:
    """So that the next test refuses what differs from it."""
    [tensor] = open_pickled([with_pickle(tmp_path / "a.bin", of_tensor())]).values()
    assert tensor.shape == (10,) and tensor.dtype == "F32" and not tensor.read().any()


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda path: saved(path, {"a": Calls(path.with_name("made"))}), r"would call posix\.mkdir"),
        (
            lambda path: saved(path, {"a": torch.ones(3)}, _use_new_zipfile_serialization=False),
            "format of torch before 1.6",
        ),
        (lambda path: saved(path, {"a": torch.ones(3, 4).t()}), "numbers of a, of shape .4, 3., are not next to"),
        (lambda path: saved(path, {"a": torch.ones(1).expand(3)}), "numbers of a, of shape .3,., are not next to"),
        (lambda path: saved(path, {"a": torch.ones(3, dtype=torch.complex64)}), "numbers in a torch ComplexFloat"),
        (lambda path: saved(path, {"a": {"b": torch.ones(3)}}), "its 'a' is no tensor"),
        (lambda path: saved(path, {"a": 1}), "its 'a' is no tensor"),
        (lambda path: saved(path, {1: torch.ones(3)}), "something else than names"),
        (lambda path: saved(path, torch.ones(3)), "holds no tensors with names"),
        (lambda path: saved(path, [torch.ones(3)]), "has EMPTY_LIST, with which tensors are not described"),
        (lambda path: path.write_bytes(b"PK"), "not a zip file"),
        (lambda path: path.write_bytes(b""), "not a zip file"),
        (lambda path: os.mkfifo(path), "is a FIFO"),
        (lambda path: with_pickle(path, of_tensor(), "other.pkl"), "it has no data.pkl"),
        (lambda path: with_pickle(path, of_tensor(), kind=zipfile.ZIP_DEFLATED), "its data.pkl is compressed"),
        (lambda path: with_pickle(path, b"." * (2**22 + 1)), "more than 4194304 bytes"),
        (lambda path: with_pickle(path, of_tensor(start=1)), "data/0 does not hold a"),
        (lambda path: with_pickle(path, of_tensor(shape=b"K\x0b\x85")), "data/0 does not hold a"),
        (lambda path: with_pickle(path, of_tensor(shape=b"J\xff\xff\xff\xff\x85")), "an impossible shape"),
        (lambda path: with_pickle(path, of_tensor(shape=b"(" + b"K\1" * 9 + b"t")), "an impossible shape"),
        (lambda path: with_pickle(path, of_tensor(shape=NESTED)), "an impossible shape"),
        (lambda path: with_pickle(path, of_tensor(shape=b"}", strides=b")")), "an impossible shape"),
        (lambda path: with_pickle(path, of_tensor(strides=b"K\x02\x85")), "are not next to each other"),
        (lambda path: with_pickle(path, of_tensor(strides=b")")), r"zip\(\) argument"),
        (
            lambda path: with_pickle(path, of_tensor().replace(b"FloatS", b"QuintS")),
            "numbers in a torch QuintStorage",
        ),
        (lambda path: with_pickle(path, of_tensor().replace(b"X\1\0\0\x000", b"X\1\0\0\x001")), "no data/1"),
        (lambda path: with_pickle(path, b"\x80\2}" + NESTED + b"K\1s."), "something else than names"),
        (lambda path: with_pickle(path, b"\x80\2}" + NESTED + b")R."), "would call something"),
        (
            lambda path: with_pickle(path, b"\x80\2}X\1\0\0\0a(X\7\0\0\0storage" + NESTED + b"NNNtQs."),
            "numbers in a",
        ),
        (lambda path: with_pickle(path, b"\x80\2\x86."), "its pickle is damaged"),
        (lambda path: with_pickle(path, b"\x80\2}"), "pickle exhausted"),
        (lambda path: with_pickle(path, b"\x80\2}r\xff\xff\xff\x7fj\1\0\0\0."), "1"),
        (lambda path: with_pickle(path, b"\x80\2" + b"}" * 2**21), "has more than 1048576 opcodes"),
        (lambda path: with_pickle(path, b"\x80\2)" + b"\x85" * 2**21), "has more than 1048576 opcodes"),
        (lambda path: with_entries(path, 90_000), "describes its tensors in more than 4194304 bytes"),
        (lambda path: with_pickle(path, b"\x80\2}q\0X\1\0\0\0ah\0s."), "its 'a' is no tensor"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, write: Callable[[Path], object], said: str) -> None:
    path = tmp_path / "pytorch_model.bin"
    write(path)
    with pytest.raises(ModelLoadError, match=rf"(?s)pytorch_model\.bin is not a file in which .*{said}"):
        open_pickled([path])
    assert not (tmp_path / "made").exists()


def test_a_file_whose_directory_promises_more_than_there_is_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "pytorch_model.bin", some_tensors())
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        [name] = (each for each in archive.namelist() if each.endswith("data.pkl"))
    at = content.index(name.encode(), content.index(b"PK\1\2")) - 46
    content[at + 20 : at + 28] = struct.pack("<LL", len(content) + 1000, len(content) + 1000)
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match="is not a file in which torch"):
        open_pickled([path])


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    path = with_pickle(tmp_path / "a.bin", of_tensor())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/byteorder", b"big")
    with pytest.raises(ModelLoadError, match="its numbers are big-endian"):
        open_pickled([path])


def test_a_damaged_file_is_an_error_or_has_tensors_within_it(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(some_tensors(), buffer)
    whole, chance, num_refused = buffer.getvalue(), random.Random(1), 0
    path = tmp_path / "pytorch_model.bin"
    for _ in range(600):
        damaged = bytearray(whole[: chance.choice((len(whole), chance.randrange(len(whole))))])
        for _ in range(chance.randrange(1, 4)):
            if damaged:
                damaged[chance.randrange(min(len(damaged), 1500))] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            for tensor in open_pickled([path]).values():
                tensor.read().sum()
        except ModelLoadError:
            num_refused += 1
    assert 100 < num_refused < 600


PIECES = [
    b"(", b")", b"}", b"t", b"\x85", b"\x86", b"\x87", b"q\0", b"h\0", b"s", b"u", b"R", b"b", b"Q", b"N", b"\x88",
    b"K\x02", b"J\xff\xff\xff\xff", b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f", b"X\1\0\0\0a",
    b"X\7\0\0\0storage", b"ctorch\nFloatStorage\n", b"ccollections\nOrderedDict\n", b"X\1\0\0\x000",
    b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch._utils\n_rebuild_parameter\n", b"cposix\nmkdir\n", STORAGE,
    of_tensor()[3:-2],
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=30), st.integers(2, len(of_tensor())))
def test_any_pickle_is_an_error_or_describes_tensors_within_the_file(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], place: int
) -> None:
    """Opcodes in any order, by themselves and within a valid pickle."""
    path, valid = tmp_path_factory.mktemp("any") / "pytorch_model.bin", of_tensor()
    for content in (b"\x80\2" + b"".join(pieces) + b".", valid[:place] + b"".join(pieces) + valid[place:]):
        try:
            found = open_pickled([with_pickle(path, content)])
        except ModelLoadError:
            continue
        for tensor in found.values():
            assert tensor.read().nbytes <= 40 and not tensor.read().any()


@given(st.data())
def test_any_file_is_an_error_or_has_tensors_within_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Bytes of a valid file changed, moved or left out."""
    path = saved(tmp_path_factory.mktemp("any") / "pytorch_model.bin", {"a": torch.ones(3), "b": torch.ones(2, 2)})
    content = bytearray(path.read_bytes())
    places = st.integers(0, len(content) - 1)
    for _ in range(data.draw(st.integers(1, 4))):
        start, length, to = data.draw(places), data.draw(st.integers(1, 40)), data.draw(places)
        change = data.draw(st.sampled_from(("set", "copy", "cut", "truncate")))
        if change == "set":
            content[start : start + length] = data.draw(st.binary(min_size=1, max_size=8))
        elif change == "copy":
            content[to : to + length] = content[start : start + length]
        elif change == "cut":
            del content[start : start + length]
        else:
            del content[max(start, 1) :]
    path.write_bytes(content)
    try:
        for tensor in open_pickled([path]).values():
            assert tensor.read().nbytes <= len(content)
            tensor.read().sum()
    except ModelLoadError:
        pass


def test_nothing_is_unpickled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = saved(tmp_path / "pytorch_model.bin", some_tensors())
    for owner, name in ((pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("unpickled"))
    assert open_pickled([path]).keys() == some_tensors().keys()
