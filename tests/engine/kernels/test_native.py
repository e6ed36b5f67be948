"""Loading the library, and the messages when it cannot be loaded and `reference` computes attention instead."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.attention.base import AttentionShape, choose_backend
from engine.attention.reference import ReferenceAttention
from engine.kernels import native
from engine.loading.load_model import load_model
from engine.settings.config import EngineConfig
from tests.engine.support.oracle import save_tiny

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 64, 16, frozenset({None}))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget libraries that other tests loaded, and settings of the environment."""
    monkeypatch.delenv("RAYDIX_ISA", raising=False)
    native.forget()
    yield
    native.forget()


def is_built() -> bool:
    """Whether there is a library of this version."""
    try:
        native.kernels(torch.float32)
    except native.NativeUnavailable:
        return False
    return True


built = pytest.mark.skipif(not is_built(), reason="the native kernels are not built here")


@pytest.mark.skipif(not any(map(shutil.which, ("gcc", "cc", "clang"))), reason="there is no compiler here")
def test_where_there_is_a_compiler_there_are_kernels() -> None:
    """The build leaves out kernels that do not compile, and tests skip them; this test notices that."""
    assert is_built(), native.build_log() or "run `make native`"


def test_a_missing_library_is_an_error_with_the_reason_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "libraydix.so")
    monkeypatch.delenv("RAYDIX_NATIVE_LIBRARY", raising=False)
    with pytest.raises(native.NativeUnavailable, match=r"it was not built.*engine\.kernels\.build"):
        native.kernels(torch.float32)
    (tmp_path / "libraydix.log").write_text("not built: no C compiler\n", encoding="utf-8")
    with pytest.raises(native.NativeUnavailable, match="no C compiler"):
        native.kernels(torch.float32)


def test_a_file_that_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.so").write_text("not ELF", encoding="ascii")
    monkeypatch.setenv("RAYDIX_NATIVE_LIBRARY", str(tmp_path / "broken.so"))
    with pytest.raises(native.NativeUnavailable, match=r"broken\.so cannot be loaded \(.*\): .*build"):
        native.kernels(torch.bfloat16)


@built
def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_ABI", native._ABI + 1)
    with pytest.raises(
        native.NativeUnavailable, match=rf"another version of Raydix \({native._ABI - 1}, not {native._ABI}"
    ):
        native.kernels(torch.float32)


@built
def test_nonsense_and_too_much_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYDIX_ISA", "sse9")
    with pytest.raises(native.NativeUnavailable, match=r"'sse9'.*generic, avx2"):
        native.kernels(torch.float32)
    monkeypatch.delenv("RAYDIX_ISA")
    monkeypatch.setattr(native, "ISAS", (*native.ISAS, "avx1024"))
    monkeypatch.setenv("RAYDIX_ISA", "avx1024")
    with pytest.raises(native.NativeUnavailable, match="is avx1024, but this processor has"):
        native.kernels(torch.float32)
    with pytest.raises(native.NativeUnavailable, match="not for float16"):
        native.kernels(torch.float16)


@built
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="there is no /proc here")
@pytest.mark.parametrize("first", ["torch", "engine.kernels.native"])
def test_there_is_one_pool_of_threads(first: str) -> None:
    """The library's OpenMP is torch's, whichever is imported first."""
    if b"libomp.so" in Path(os.environ.get("RAYDIX_NATIVE_LIBRARY", native.LIBRARY)).read_bytes():
        pytest.skip("built with clang, which has an OpenMP of its own")
    script = (
        f"import {first}, re, torch\n"
        "from engine.kernels import native\n"
        "native.kernels(torch.float32)\n"
        "print(*set(re.findall(r'lib(?:gomp|iomp5|omp)[-.][^/\\n]*$', open('/proc/self/maps').read(), re.M)))\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.split()) == 1, ran.stdout


@pytest.fixture
def missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYDIX_NATIVE_LIBRARY", str(tmp_path / "none.so"))


def test_without_the_library_reference_is_used_and_the_log_gives_the_reason(
    missing: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(choose_backend("auto", SHAPE, torch.float32, CPU), ReferenceAttention)
    assert re.search(r"not native: none\.so is missing .*engine\.kernels\.build", caplog.text)


def test_asked_for_where_it_cannot_run_it_is_an_error_in_one_line(missing: None, tmp_path: Path) -> None:
    """Replicas raise it at their start, and `raydix serve` shows the line with the exception."""
    config = EngineConfig(model=str(save_tiny("qwen3", tmp_path, head_dim=32)), attention="native", kv_pages=8)
    with pytest.raises(ValueError, match=r'attention: native cannot run.*none\.so.*"auto"') as raised:
        load_model(config)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="head_dim must be a multiple of 32; the model's is 24"):
        choose_backend("native", AttentionShape(4, 2, 24, 16, frozenset({None})), torch.float32, CPU)
    with pytest.raises(ValueError, match="it runs on CPUs, not on cuda"):
        choose_backend("native", SHAPE, torch.float32, torch.device("cuda"))
