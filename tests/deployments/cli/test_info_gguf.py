"""`raydix info` of a model in GGUF: which types of numbers its tensors have, and what becomes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from deployments.cli import info
from deployments.cli.units import size_text
from tests.engine.support.gguf_models import write_gguf
from tests.engine.support.oracle import save_tiny


@pytest.mark.parametrize("by_directory", [False, True])
def test_types_of_numbers_and_what_becomes_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, by_directory: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "gguf").mkdir()
    path = write_gguf(
        save_tiny("llama2", tmp_path / "model"),
        tmp_path / "gguf" / "model.gguf",
        {"ffn": Kind.Q8_0, "attn_q": Kind.Q4_1},
        {"attention.clamp_kqv": 8.0},
    )
    info.run(str(path.parent if by_directory else path), page_size=16, dtype="auto", device="cpu")
    shown = " ".join(capsys.readouterr().out.split())
    assert "LlamaForCausalLM" in shown
    assert f"{size_text(path.stat().st_size)} in GGUF, 1 file(s)" in shown
    assert "of it Q8_0 │ 9 tensors, 86.1 KiB, widened to float32" in shown
    assert "of it Q4_1 │ 3 tensors, 33.8 KiB, widened to float32" in shown
    assert "of it F32 │ 18 tensors" in shown
    assert "keys of the file: llama.attention.clamp_kqv" in shown
    assert "the file has llama.attention.clamp_kqv, which Raydix does not know" in shown
