"""`raydix info` of a model in GGUF: which types of numbers its tensors have, and what becomes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from deployments.cli import info
from deployments.cli.units import size_text
from engine.loading.weights import kept_blocks
from engine.model_config.config import ModelConfig
from engine.parallel.division import divided
from tests.engine.support.gguf_models import write_gguf
from tests.engine.support.oracle import save_tiny


@pytest.mark.parametrize("by_directory", [False, True])
def test_info_shows_the_types_of_numbers_and_how_they_are_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, by_directory: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "gguf").mkdir()
    path = write_gguf(
        save_tiny("llama2", tmp_path / "model"),
        tmp_path / "gguf" / "model.gguf",
        {"ffn": Kind.Q8_0, "attn_q": Kind.Q4_1, "attn_output": Kind.Q4_1},
        {"attention.clamp_kqv": 8.0},
    )
    info.run(str(path.parent if by_directory else path), page_size=16, dtype="auto", device="cpu")
    shown = " ".join(capsys.readouterr().out.split())
    assert "LlamaForCausalLM" in shown
    assert f"{size_text(path.stat().st_size)} in GGUF, 1 file(s)" in shown
    assert "of it Q8_0 │ 9 tensors, 86.1 KiB, stay as they are" in shown
    assert "of it Q4_1 │ 3 tensors, 33.8 KiB, stay as they are" in shown
    widened = "3 tensors, 33.8 KiB, widened to float32: a projection that is multiplied with them is plain numbers"
    assert widened in shown
    assert "of it F32 │ 15 tensors" in shown
    assert "as float32 and the file's codes" in shown
    assert "keys of the file: llama.attention.clamp_kqv" in shown
    assert "the file has llama.attention.clamp_kqv, which Raydix does not know" in shown


def test_kept_blocks_count_in_the_stage_that_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    model = save_tiny("llama2", tmp_path / "model")
    plain = ModelConfig.from_directory(model)
    path = write_gguf(model, tmp_path / "model.gguf", {"ffn": Kind.Q8_0})
    info.run(str(path), page_size=16, dtype="float32", device="cpu", pipeline_parallel=3)
    shown = capsys.readouterr().out
    for stage in divided(plain, 3):
        kept, matrices = kept_blocks(path, plain, stage), 3 * len(stage.layers(plain.num_layers))
        assert kept.num_numbers == matrices * plain.hidden_size * plain.intermediate_size
        in_memory = stage.weight_bytes(plain, 4) - 4 * kept.num_numbers + kept.num_bytes
        assert f": {size_text(in_memory)} of weights" in shown


def test_without_native_kernels_blocks_are_widened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    path = write_gguf(save_tiny("llama2", tmp_path), tmp_path / "model.gguf", {"ffn": Kind.Q8_0})
    info.run(str(path), page_size=16, dtype="float16", device="cpu")
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "9 tensors, 86.1 KiB, widened to float16: there are native kernels for float32 and bfloat16, not" in shown
    )
    assert "as float16 KV per token" in shown.replace("│ ", "").replace(" │", "")
