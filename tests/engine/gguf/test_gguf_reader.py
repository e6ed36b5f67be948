"""Headers of GGUF files: what they say, and a clear error for each that is damaged or hostile."""

from __future__ import annotations

import os
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.errors import ModelLoadError
from engine.gguf import reader
from engine.gguf.files import first_files, read_model
from engine.gguf.reader import read_header
from tests.engine.support.gguf_files import FileOfBytes, array, entry, key, text
from tests.support.examples import examples

ARCHITECTURE = key("general.architecture", 8, "llama")


def test_a_header_gives_the_keys_and_the_places_of_tensors(tmp_path: Path) -> None:
    sound = FileOfBytes(
        keys=[
            ARCHITECTURE,
            key("llama.block_count", 4, 2),
            key("llama.rope.freq_base", 6, 0.5),
            key("flag", 7, True),
            array("tokens", 8, ["a", "ü"]),
            array("counts", 5, [-1, 7]),
            array("empty", 8, []),
        ],
        entries=[entry("a.weight", [4, 2]), entry("b.weight", [64, 3], kind=8, offset=32)],
        data=bytes(32 + 3 * 2 * 34),
    )
    path = sound.write(tmp_path / "m.gguf")
    header = read_header(path)
    assert header.metadata == {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.rope.freq_base": 0.5,
        "flag": True,
        "tokens": ["a", "ü"],
        "counts": [-1, 7],
        "empty": [],
    }
    a, b = header.tensors.values()
    assert (a.shape, a.type.name, a.num_bytes) == ((2, 4), "F32", 32)
    assert (b.shape, b.type.name, b.num_bytes) == ((3, 64), "Q8_0", 3 * 2 * 34)
    assert b.offset + b.num_bytes == path.stat().st_size
    assert b.offset - a.offset == 32


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (FileOfBytes(magic=b"GGML"), "begins with b'GGML'"),
        (FileOfBytes(version=1), "version 1"),
        (FileOfBytes(version=0x03000000), "big endian"),
        (FileOfBytes(num_keys=2**63), f"{2**63} keys follow, and its header has room for"),
        (FileOfBytes(num_tensors=2**63), f"{2**63} tensors follow, and its header has room for"),
        (FileOfBytes(keys=[ARCHITECTURE, ARCHITECTURE]), "general.architecture twice"),
        (FileOfBytes(keys=[text("") + struct.pack("<II", 4, 1)]), "name of a key is ''"),
        (FileOfBytes(keys=[text("a\x1bb") + struct.pack("<II", 4, 1)]), r"name of a key is 'a\\x1bb'"),
        (FileOfBytes(keys=[text(b"\xff") + struct.pack("<II", 4, 1)]), "not UTF-8"),
        (FileOfBytes(keys=[text("long") + struct.pack("<IQ", 8, 2**62)]), f"takes {2**62} bytes"),
        (FileOfBytes(keys=[struct.pack("<Q", 2**40) + bytes(20)]), f"has {2**40} bytes, and at most 65535"),
        (FileOfBytes(keys=[text("odd") + struct.pack("<II", 13, 0)]), "value of odd has type 13"),
        (FileOfBytes(keys=[array("deep", 9, [])]), "deep is an array of arrays"),
        (FileOfBytes(keys=[array("many", 4, [1], count=2**61)]), f"{2**61} numbers of the value of many"),
        (FileOfBytes(keys=[array("many", 10, [1], count=100)]), "value of many takes 800 bytes"),
        (FileOfBytes(keys=[array("many", 8, ["a"], count=2**61)]), f"{2**61} the value of many|{2**61} strings"),
        (FileOfBytes(keys=[array("bad", 8, [b"\xff"])]), "a string of the value of bad at byte .* is not UTF-8"),
        (FileOfBytes(keys=[text("cut") + struct.pack("<IIQQ", 9, 8, 1, 2**63)]), "a string of the value of cut"),
        (FileOfBytes(keys=[key("general.alignment", 4, 0)]), "alignment is 0, and a power of two"),
        (FileOfBytes(keys=[key("general.alignment", 4, 48)]), "alignment is 48"),
        (FileOfBytes(keys=[key("general.alignment", 8, "32")]), "alignment is 32, and a power"),
        (FileOfBytes(keys=[key("general.alignment", 4, 2**31)]), "the file has"),
        (FileOfBytes(entries=[entry("", [4, 2])]), "name of a tensor is ''"),
        (FileOfBytes(entries=[entry("x" * 64, [4, 2])]), "has 64 bytes, and at most 63"),
        (FileOfBytes(entries=[entry("a", [4]), entry("a", [4], offset=32)], data=bytes(64)), "called a"),
        (FileOfBytes(entries=[entry("a", [])]), "a has 0 axes"),
        (FileOfBytes(entries=[entry("a", [1] * 5)]), "a has 5 axes"),
        (FileOfBytes(entries=[entry("a", [4, 0])]), r"a has shape \[0, 4\]"),
        (FileOfBytes(entries=[entry("a", [2**63, 2**63])]), "a ends at byte"),
        (FileOfBytes(entries=[entry("a", [9])]), "a ends at byte"),
        (FileOfBytes(entries=[entry("a", [4], offset=2**63)]), "a ends at byte"),
        (FileOfBytes(entries=[entry("a", [4], offset=4)]), "offset 4, and a multiple of 32"),
        (FileOfBytes(entries=[entry("a", [4]), entry("b", [4])]), "begins at byte .*, and . ends at byte"),
        (FileOfBytes(entries=[entry("a", [33], kind=8)]), "rows of 33 numbers, and Q8_0 has whole blocks of 32"),
        (FileOfBytes(entries=[entry("a", [32], kind=20)]), "a is stored as IQ4_NL; supported are F32"),
        (FileOfBytes(entries=[entry("a", [32], kind=77)]), "a is stored as the unknown type 77"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, wrong: FileOfBytes, message: str) -> None:
    path = wrong.write(tmp_path / "m.gguf")
    with pytest.raises(ModelLoadError, match=f"m.gguf is not .*{message}"):
        read_header(path)


@pytest.mark.parametrize("size", [0, 3, 23, 24, 40, 80])
def test_a_file_that_was_cut_is_refused(tmp_path: Path, size: int) -> None:
    (tmp_path / "m.gguf").write_bytes(FileOfBytes().content()[:size])
    with pytest.raises(ModelLoadError, match=r"m\.gguf is not a usable GGUF file"):
        read_header(tmp_path / "m.gguf")


def test_a_header_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_HEADER_BYTES", 64)
    path = FileOfBytes(keys=[key("long", 8, "x" * 100)]).write(tmp_path / "m.gguf")
    with pytest.raises(ModelLoadError, match="64 bytes, the most of a header"):
        read_header(path)


@pytest.mark.parametrize("kind", ["FIFO", "directory", "character device"])
def test_anything_but_a_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.gguf"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(ModelLoadError, match=f"m.gguf cannot be read: is a {kind}"):
        read_header(path)


@settings(max_examples=examples(400), deadline=None)
@given(st.data())
def test_any_mutation_is_read_or_refused(data: st.DataObject) -> None:
    """Whatever a few bytes of a sound file become, there is a header or our error, and no other exception."""
    sound = FileOfBytes(
        keys=[ARCHITECTURE, array("tokens", 8, ["a", "b"]), array("n", 4, [1]), key("general.alignment", 4, 32)],
        entries=[entry("a.weight", [4, 2]), entry("b.weight", [32], kind=2, offset=32)],
        data=bytes(64),
    ).content()
    mutated = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutated) - 1))
        width = data.draw(st.sampled_from([1, 1, 4, 8]))
        value = data.draw(st.integers(0, 2 ** (8 * width) - 1))
        mutated[at : at + width] = value.to_bytes(width, "little")
    cut = data.draw(st.sampled_from([len(mutated), len(mutated), data.draw(st.integers(0, len(mutated)))]))
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(mutated[:cut])
        file.flush()
        try:
            header = read_header(Path(file.name))
        except ModelLoadError as error:
            assert file.name in str(error)
        else:
            assert all(each.offset + each.num_bytes <= cut for each in header.tensors.values())


def _part(number: int, count: int, name: str, total: int = 2) -> FileOfBytes:
    keys = [key("split.no", 2, number), key("split.count", 2, count), key("split.tensors.count", 5, total)]
    return FileOfBytes(keys=[*keys, *([ARCHITECTURE] if number == 0 else [])], entries=[entry(name, [4])])


def test_a_split_model_is_read_as_one(tmp_path: Path) -> None:
    _part(0, 2, "a").write(tmp_path / "m-00001-of-00002.gguf")
    _part(1, 2, "b").write(tmp_path / "m-00002-of-00002.gguf")
    FileOfBytes().write(tmp_path / "mmproj-m.gguf")
    [first] = first_files(tmp_path)
    model = read_model(first)
    assert [path.name for path in model.paths] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert {name: tensor.path.name for name, tensor in model.tensors.items()} == {
        "a": "m-00001-of-00002.gguf",
        "b": "m-00002-of-00002.gguf",
    }
    assert model.metadata["general.architecture"] == "llama"
    with pytest.raises(ModelLoadError, match=r"part 2 of a model; name the first one instead: .*00001-of-00002"):
        read_model(tmp_path / "m-00002-of-00002.gguf")


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (None, r"1 of the 2 parts .* \(m-00002-of-00002.gguf\)"),
        (_part(1, 2, "a"), "both have a"),
        (_part(0, 2, "b"), "says that it is part 0 of 2 .* part 1 of 2"),
        (_part(1, 3, "b"), "says that it is part 1 of 3"),
        (FileOfBytes(), "says that it is part 0 of 1"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    tmp_path: Path, second: FileOfBytes | None, message: str
) -> None:
    _part(0, 2, "a").write(tmp_path / "m-00001-of-00002.gguf")
    if second is not None:
        second.write(tmp_path / "m-00002-of-00002.gguf")
    with pytest.raises(ModelLoadError, match=message):
        read_model(tmp_path / "m-00001-of-00002.gguf")


def test_a_part_under_another_name_and_a_wrong_total_are_refused(tmp_path: Path) -> None:
    path = _part(0, 2, "a").write(tmp_path / "m.gguf")
    with pytest.raises(ModelLoadError, match=r"part 0 of 2 .* by its name it is part 0 of 1"):
        read_model(path)
    path = _part(0, 1, "a", total=7).write(tmp_path / "n.gguf")
    with pytest.raises(ModelLoadError, match=r"7 tensors together .*, and they have 1"):
        read_model(path)
