"""The kernels of each element type and instruction set that run here."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.kernels import native

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(params=itertools.product(_DTYPES, native.ISAS), ids="-".join)
def kernels(request: pytest.FixtureRequest) -> native.Kernels:
    name, isa = request.param
    try:
        found = native.kernels(_DTYPES[name], isa)
    except native.NativeUnavailable as error:
        pytest.skip(str(error))
    if found.isa != isa:
        pytest.skip(f"there are no kernels of {isa} for {name}")
    return found
