"""Reading with several threads through a few buffers: the same bytes as by mapping, every fault as an error."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.base.errors import ModelLoadError
from engine.loading import weight_streaming, weights
from engine.loading.tensor_groups import TensorGroup
from engine.loading.weights import load_decoder
from engine.model_config.config import ModelConfig
from engine.model_files.weight_files import weight_files
from engine.models.decoder import Decoder
from tests.engine.support.checkpoints import AWQ, awq, fp8_channels, fp8_config, gptq, gptq_config, make, rewrite
from tests.engine.support.oracle import oracle_model, save_tiny

CPU = torch.device("cpu")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    model = save_tiny("qwen3", tmp_path / "one")
    oracle_model(model).save_pretrained(tmp_path / "many", max_shard_size="40KB")
    return tmp_path / "many"


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Make `load_decoder` stream weights with these settings; `reads` and `stores` are called with the bytes of
    each tensor when it is to be read, and of each group when it is stored from memory between.
    """
    settings: dict[str, Any] = {"num_threads": 3, "chunk_bytes": 1000, "ahead_bytes": 50_000}

    class Noted(dict[str, weight_streaming.Stored]):
        def __getitem__(self, name: str) -> weight_streaming.Stored:
            found = super().__getitem__(name)
            settings.get("reads", lambda _: None)(found.num_bytes)
            return found

    def noting(group: TensorGroup) -> TensorGroup:
        def store(tensors: list[torch.Tensor]) -> None:
            settings.get("stores", lambda _: None)(sum(tensor.nbytes for tensor in tensors))
            group.store(tensors)

        return replace(group, store=store)

    def copy(tensors: dict[str, Any], groups: list[TensorGroup]) -> None:
        weight_streaming.stream_groups(
            Noted(weight_streaming.stored_tensors(settings["paths"])),
            [noting(group) for group in groups],
            CPU,
            **{name: settings[name] for name in ("num_threads", "chunk_bytes", "ahead_bytes")},
        )

    monkeypatch.setattr(weights, "copy_groups", copy)
    return settings


def load(directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    return load_decoder(directory, ModelConfig.from_directory(directory), dtype, CPU, **options)


def numbers(decoder: Decoder) -> list[torch.Tensor]:
    return [tensor.float() for tensor in (*decoder.parameters(), *decoder.buffers())]


def assert_same(one: Decoder, other: Decoder) -> None:
    for a, b in zip(numbers(one), numbers(other), strict=True):
        assert torch.equal(a, b)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("raydix-weights")]


CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "as they are": (torch.float32, {}),
    "converted": (torch.bfloat16, {}),
    "rounded": (torch.bfloat16, {"fp8": True}),
    "turned": (torch.float32, {"input_major": True}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sizes", [(3, 1000, 50_000), (1, 2**20, 1), (8, 77, 10_000)])
def test_the_same_bytes_as_by_mapping(
    sharded: Path,
    streamed: dict[str, Any],
    case: str,
    sizes: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks are smaller than a row or larger than all, threads one or more than a file has tensors."""
    dtype, options = CASES[case]
    streamed |= dict(zip(("num_threads", "chunk_bytes", "ahead_bytes"), sizes, strict=True))
    streamed["paths"] = weight_files(sharded)
    found = load(sharded, dtype, **options)
    assert not threads()
    monkeypatch.undo()
    assert_same(found, load(sharded, dtype, **options))


@pytest.mark.parametrize("kind", ["fp8", "gptq", "awq"])
def test_quantized_checkpoints_are_read_too(
    tmp_path: Path, streamed: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {
        "fp8": lambda: make(tmp_path, fp8_channels, fp8_config()),
        "gptq": lambda: make(tmp_path, gptq(True, 1), gptq_config()),
        "awq": lambda: make(tmp_path, awq, AWQ),
    }[kind]().quantized
    streamed["paths"] = weight_files(made)
    found = load(made)
    monkeypatch.undo()
    assert_same(found, load(made))


def test_weights_that_the_model_holds_as_the_file_does_are_copied_once(
    sharded: Path, streamed: dict[str, Any]
) -> None:
    """Tensors go straight into their rows: only norms that are repeated for each head are staged."""
    streamed["paths"] = weight_files(sharded)
    stored: list[int] = []
    streamed["stores"] = stored.append
    load(sharded)
    assert set(stored) == {64 * 4}


def test_memory_ahead_of_the_work_is_bounded(sharded: Path, streamed: dict[str, Any]) -> None:
    """All tensors are converted; those read and not yet stored never exceed the limit, or one tensor."""
    streamed["paths"] = weight_files(sharded)
    streamed["ahead_bytes"] = 200_000
    waiting, most = [0], [0]

    def reads(num_bytes: int) -> None:
        waiting[0] += num_bytes
        most[0] = max(most[0], waiting[0])

    def stores(num_bytes: int) -> None:
        waiting[0] -= num_bytes

    streamed |= {"reads": reads, "stores": stores}
    load(sharded, torch.bfloat16)
    largest = 2 * 384 * 96 * 4
    assert waiting == [0]
    assert 200_000 // 2 < most[0] <= 200_000 + largest


# --- faults --------------------------------------------------------------------------------------------------


def test_a_file_that_ends_early_is_named(
    sharded: Path, streamed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file ends early after it was opened, as when it is being written."""
    paths = streamed["paths"] = weight_files(sharded)
    stored = weight_streaming.stored_tensors

    def then_cut(files: list[Path]) -> dict[str, weight_streaming.Stored]:
        found = stored(files)
        with paths[2].open("r+b") as file:
            file.truncate(paths[2].stat().st_size - 1000)
        return found

    monkeypatch.setattr(weight_streaming, "stored_tensors", then_cut)
    with pytest.raises(ModelLoadError, match=rf"{paths[2].name} ends at byte \d+.*download the model again"):
        load(sharded)
    assert not threads()


def test_a_read_error_is_reported(
    sharded: Path, streamed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed["paths"] = weight_files(sharded)
    calls, preadv = [0], os.preadv

    def failing(file: int, buffers: list[memoryview], offset: int) -> int:
        calls[0] += 1
        if calls[0] > 20:
            raise OSError(5, "Input/output error")
        return preadv(file, [buffers[0][:100]], offset)  # and short reads, which are no fault

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(
        ModelLoadError, match=r"cannot be read at byte \d+: .*Input/output error; check its storage"
    ):
        load(sharded)
    assert not threads()


def test_short_reads_are_no_fault(
    sharded: Path, streamed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed["paths"] = weight_files(sharded)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:333]], offset))
    found = load(sharded)
    monkeypatch.undo()
    assert_same(found, load(sharded))


def test_a_file_that_is_gone_is_named(
    sharded: Path, streamed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = streamed["paths"] = weight_files(sharded)
    stored = weight_streaming.stored_tensors

    def then_gone(files: list[Path]) -> dict[str, weight_streaming.Stored]:
        found = stored(files)
        paths[1].unlink()
        return found

    monkeypatch.setattr(weight_streaming, "stored_tensors", then_gone)
    with pytest.raises(ModelLoadError, match=rf"{paths[1].name} cannot be opened"):
        load(sharded)
    assert not threads()


def test_a_piece_that_cannot_be_stored_ends_the_threads(tmp_path: Path, streamed: dict[str, Any]) -> None:
    made = make(tmp_path, gptq(True, 1), gptq_config()).quantized
    name = "model.layers.1.mlp.up_proj.g_idx"
    rewrite(made, lambda tensors: tensors.update({name: tensors[name].flip(0)}))
    streamed["paths"] = weight_files(made)
    with pytest.raises(ModelLoadError, match="activation order"):
        load(made)
    assert not threads()


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 100, (10).to_bytes(8, "little") + b"[1, 2, 3] ", b"\x02" + bytes(7) + b"{"]
)
def test_no_header_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model.safetensors is not a complete safetensors file"):
        weight_streaming.stored_tensors([path])
