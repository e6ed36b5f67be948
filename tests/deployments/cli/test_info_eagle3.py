"""`raydix info` of an EAGLE-3 checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.cli import info
from tests.engine.support.eagle3_models import save_eagle3
from tests.engine.support.oracle import save_tiny


def test_it_says_for_which_models_it_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layer = save_eagle3(tmp_path / "layer", save_tiny("llama2", tmp_path / "model"), drafted=[1, 5])
    info.run(str(layer), page_size=16, dtype="auto", device="cpu")
    shown = " ".join(capsys.readouterr().out.split())
    assert "with hidden size 96 and 101 tokens" in shown
    assert "states of 3 of the model's layers" in shown
    assert "2 of the tokens" in shown and "512 tokens; longer requests get no drafts" in shown
    assert "method: eagle3" in shown
