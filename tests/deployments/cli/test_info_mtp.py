"""`raydix info` of a model with a layer for multi-token prediction."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.cli import info
from deployments.cli.units import size_text
from engine.loading.load_mtp import load_mtp
from engine.loading.mtp_targets import mtp_bytes
from engine.model_config.config import ModelConfig
from tests.engine.support.mtp_models import save_with_mtp


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "qwen3_next"])
def test_it_says_how_much_memory_the_layer_takes(
    tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    directory = save_with_mtp(family, tmp_path / "model")
    model = ModelConfig.from_directory(directory)
    layer, tables = mtp_bytes(model, 4)
    decoder = load_mtp(directory, model, torch.float32, torch.device("cpu"))
    # Norms of heads are repeated in memory, and experts have biases that nothing counts.
    assert layer == pytest.approx(sum(weight.nbytes for weight in decoder.parameters()), rel=2e-3)
    assert tables == 2 * 101 * 96 * 4
    info.run(str(directory), page_size=16, dtype="float32", device="cpu")
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"drafts with it. It takes {size_text(layer)}, and {size_text(tables)} more on the" in shown
