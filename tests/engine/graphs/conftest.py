"""The model whose steps are recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.support.oracle import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen2_sliding", tmp_path_factory.mktemp("graphs"), eos_token_id=7)
