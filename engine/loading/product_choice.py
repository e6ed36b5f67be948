"""Chooses the kernel that multiplies few rows with each of a model's matrices on a GPU: the library's or our own.

Which is faster depends on the GPU, the library and the shape. So both are timed at an engine's start, on the
model's own layers, which together are larger than the GPU's cache. The winners are kept in a file next to Triton's
compiled kernels, from which later starts read them.
"""

from __future__ import annotations

import json
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from engine.base.files import make_folder
from engine.kernels.float8 import multiplies_fp8
from engine.layers.linear import FP8, Fp8Linear, PlainLinear
from engine.model_files.json_files import parse_json
from engine.models.decoder import Decoder
from engine.models.experts import Experts

logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8)
"""Numbers of rows that are timed; others use the result of the next larger one."""
_REPLAYS = 5
Work = Callable[[], object]
Pair = Callable[[int], tuple[Work, Work]]
"""Maps a number of rows to their product by the library's kernel, and by ours."""
Timer = Callable[[Sequence[Work]], float]
"""Returns the total seconds of several pieces of work in turn."""


class Shape(NamedTuple):
    """The properties that decide which kernel is faster."""

    dtype: torch.dtype
    outputs: int
    inputs: int


def choose_products(decoder: Decoder, device: torch.device) -> None:
    """Let the faster kernels compute a model's products of few rows, on a GPU if Triton imports."""
    if device.type != "cuda":
        return
    try:
        import triton
    except ImportError:  # The code that uses Triton has logged a warning.
        return
    directory = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    place = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, triton {triton.__version__}"
    with torch.cuda.device(device):
        ours = choose(decoder, device, Path(directory) / "raydix_products.json", place, recorded_seconds)
        for work in ours:  # Kernels measured at an earlier start compile now, not while requests wait.
            work()


def choose(decoder: Decoder, device: torch.device, path: Path, place: str, timer: Timer) -> list[Work]:
    """Choose for all layers by the results in the file `path`; time those that it lacks for this `place`.

    Returns a product by our kernel for each shape with one.
    """
    shapes: dict[Shape, list[nn.Linear | Fp8Linear]] = defaultdict(list)
    mixtures = [module for module in decoder.modules() if isinstance(module, Experts)]
    together = {id(layer) for mixture in mixtures for layers in mixture.matrices_apart for layer in layers}
    for module in decoder.modules():
        if id(module) in together:
            continue  # One launch multiplies all experts of a layer.
        is_fp8 = isinstance(module, Fp8Linear) and device.type == "cuda" and multiplies_fp8(device)
        if is_fp8 or (isinstance(module, nn.Linear) and module is not decoder.lm_head):
            assert isinstance(module, nn.Linear | Fp8Linear)
            shapes[_shape(module.weight)].append(module)
    head = decoder.embed.weight if decoder.lm_head is None else decoder.lm_head.weight
    pairs: dict[Shape, list[Pair]] = {_shape(head): [partial(_plain_pair, head, None, device)]}
    pairs |= {shape: [_pair(layer, device) for layer in layers] for shape, layers in shapes.items()}
    stored = _read(path)
    known = stored.setdefault(place, {})
    num_known = len(known)
    for shape, each in pairs.items():
        if _name(shape) not in known:
            known[_name(shape)] = _winners(each, timer)
    if len(known) > num_known:
        _write(path, stored)
    names = {id(module): name for name, module in decoder.named_modules()}
    for shape, layers in shapes.items():
        few_rows = _few_rows(known[_name(shape)])
        for layer in layers:
            if isinstance(layer, Fp8Linear):
                layer.few_rows = few_rows
            elif few_rows:
                decoder.set_submodule(names[id(layer)], PlainLinear(layer, few_rows))
    decoder.head_few_rows = _few_rows(known[_name(_shape(head))])
    logger.info("products of few rows by our own kernels: %s", known)
    return [each[0](known[_name(shape)][0])[1] for shape, each in pairs.items() if known[_name(shape)]]


def _winners(pairs: Sequence[Pair], timer: Timer) -> list[int]:
    """Return the numbers of rows for which our kernel is faster."""
    found = []
    for rows in ROWS:
        theirs, ours = zip(*(pair(rows) for pair in pairs), strict=True)
        if timer(ours) < timer(theirs):
            found.append(rows)
    return found


def _pair(layer: nn.Linear | Fp8Linear, device: torch.device) -> Pair:
    if isinstance(layer, Fp8Linear):
        return partial(_fp8_pair, layer, device)
    return partial(_plain_pair, layer.weight, layer.bias, device)


def _plain_pair(
    weight: torch.Tensor, bias: torch.Tensor | None, device: torch.device, rows: int
) -> tuple[Work, Work]:
    from engine.kernels.triton.few_rows import plain_few_rows

    x = torch.zeros(rows, weight.shape[1], dtype=weight.dtype, device=device)
    return partial(F.linear, x, weight, bias), partial(plain_few_rows, x, weight, bias)


def _fp8_pair(layer: Fp8Linear, device: torch.device, rows: int) -> tuple[Work, Work]:
    from engine.kernels.triton.few_rows import fp8_few_rows
    from engine.layers.linear import Rounded

    x = torch.zeros(rows, layer.in_features, device=device).to(FP8)
    rounded = Rounded(x, torch.ones(rows, device=device), torch.bfloat16)
    weights = layer.weight, layer.scale, layer.bias
    return partial(layer, rounded), partial(fp8_few_rows, x, rounded.scale, *weights, torch.bfloat16)


def recorded_seconds(works: Sequence[Work]) -> float:
    """Return the least time of some replays of a CUDA graph of the work, which runs once beforehand."""
    for work in works:
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    times: list[float] = []
    for _ in range(1 + _REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3)
    return min(times)


def _few_rows(winners: Sequence[int]) -> frozenset[int]:
    """Return all numbers of rows whose next larger timed number is a winner."""
    return frozenset(n for n in range(1, ROWS[-1] + 1) if min(rows for rows in ROWS if rows >= n) in winners)


def _shape(weight: torch.Tensor) -> Shape:
    return Shape(weight.dtype, *weight.shape)


def _name(shape: Shape) -> str:
    return f"{str(shape.dtype).removeprefix('torch.')} {shape.outputs} x {shape.inputs}"


def _read(path: Path) -> dict[str, dict[str, list[int]]]:
    """Return the file's results, by place and shape; none if it is missing or damaged."""
    try:
        stored: Any = parse_json(path)
    except (OSError, ValueError):
        return {}
    is_ours = isinstance(stored, dict) and all(
        isinstance(known, dict) and all(isinstance(rows, list) for rows in known.values())
        for known in stored.values()
    )
    return stored if is_ours else {}


def _write(path: Path, stored: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
    """Replace the file atomically, because several processes may start together."""
    try:
        make_folder(path.parent)
        with NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(stored, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning(
            "the next start has to measure again which kernels are faster: %s cannot be written: %s", path, error
        )
