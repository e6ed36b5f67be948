"""The GPU backends on a real GPU, if there is one, with the packages that are installed."""

from __future__ import annotations

import pytest
import torch

from engine.attention import cudnn
from engine.attention.base import AttentionBackend, consider
from engine.attention.expanded import ExpandedStep, ExpandingAttention, HeadsQuery
from engine.attention.kv_pages import UNSCALED, store_kv
from engine.attention.pinned import to_device
from engine.attention.reference import ReferenceAttention
from tests.engine.support.absorbed import absorbing
from tests.engine.support.attention_on_devices import attend_on
from tests.engine.support.paged_kv import Heads, Paged

CUDA = torch.device("cuda")
BF16 = torch.bfloat16


def backend_for(name: str, case: Paged) -> AttentionBackend:
    """Return the backend, or skip the test and say why it cannot run."""
    if not torch.cuda.is_available():
        pytest.skip(f"{name}: there is no CUDA device here")
    [(_, found)] = consider(case.shape, BF16, CUDA, name)
    if isinstance(found, str):
        pytest.skip(f"{name}: {found}")
    return found(case.shape)


def test_packages_come_after_our_own_kernels() -> None:
    names = [name for name, _ in consider(Paged([(0, 1)], Heads(1, 1, 8), 16, None, BF16).shape, BF16, CUDA)]
    assert names == ["native", "triton", "flash_attn", "flashinfer", "cudnn", "reference"]


@pytest.mark.parametrize("name", ["triton", "flash_attn", "flashinfer", "cudnn"])
@pytest.mark.parametrize("page_size", [16, 256])
def test_many_tokens_after_many(name: str, page_size: int) -> None:
    """Lengths are multiples of what cuDNN's parts are padded to and cut at, and are not."""
    case = Paged([(5000, 1), (3000, 70), (2048, 2048), (4500, 2060)], Heads(4, 2, 128), page_size, None, BF16)
    attended = attend_on(CUDA, case, backend_for(name, case))
    assert (attended.double() - case.expected()).abs().max() < 0.04


@pytest.mark.parametrize("name", ["triton", "flash_attn", "flashinfer", "cudnn"])
@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("heads", [Heads(1, 2, 64), Heads(4, 8, 128)], ids=str)
def test_a_mixed_batch(
    monkeypatch: pytest.MonkeyPatch, name: str, page_size: int, window: int | None, heads: Heads
) -> None:
    monkeypatch.setattr(cudnn, "SHORTEST", 256)
    rows = [(700, 1), (15, 1), (0, 1), (0, 300), (1000, 33), (16, 16)]
    case = Paged(rows, heads, page_size, window, BF16)
    backend = backend_for(name, case)
    for rows_alone in (case, case.alone(0), case.alone(3)):
        attended = attend_on(CUDA, rows_alone, backend)
        torch.testing.assert_close(attended.double(), rows_alone.expected(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("num_heads", [16, 128])
def test_a_mixed_batch_of_latent_kv(num_heads: int) -> None:
    rows = [(700, 1), (15, 1), (0, 1), (0, 300), (1000, 33), (16, 16)]
    case = Paged(rows, Heads(num_heads, 1, 576, 512), 64, None, BF16)
    backend = backend_for("triton", case)
    attended = attend_on(CUDA, case, backend)
    torch.testing.assert_close(attended.double(), case.expected(), atol=0.02, rtol=0.02)


def test_long_prompts_expand_latent_kv_without_their_scores_in_memory() -> None:
    """The scores of one row's 2,096 tokens for 6,096 positions and all heads would take 390 MiB."""
    plain_dim, value_dim, rank, rope_dim, num_heads = 128, 128, 512, 64, 16
    rows = [(5000, 1), (700, 40), (0, 2048), (4000, 2096)]
    case = Paged(rows, Heads(num_heads, 1, rank + rope_dim, rank), 64, None, BF16)
    backend = ExpandingAttention(backend_for("triton", case), case.shape)
    generator = torch.Generator(CUDA).manual_seed(0)
    sizes = (
        (num_heads, plain_dim + value_dim, rank),
        *((len(case.query()), num_heads, size) for size in (plain_dim, rope_dim)),
    )
    expansion, *parts = (torch.randn(size, generator=generator, device=CUDA) for size in sizes)
    expansion *= rank**-0.5
    pages, batch = case.pages.layer(0).to(CUDA), to_device(case.batch, CUDA)
    store_kv(pages, batch.slot_mapping, case.new()[0].to(CUDA), None)
    narrow, query = expansion.to(BF16), HeadsQuery(*(part.to(BF16) for part in parts))
    step = backend.prepare(batch, case.pages.null_page)
    assert isinstance(step, ExpandedStep)
    torch.cuda.reset_peak_memory_stats(CUDA)
    before = torch.cuda.memory_allocated(CUDA)
    found = step.values(pages, query, narrow, UNSCALED, absorbing(pages, narrow, plain_dim, UNSCALED))
    assert torch.cuda.max_memory_allocated(CUDA) - before < 300 * 2**20

    wide = HeadsQuery(*(part.float() for part in query))
    reference = ReferenceAttention(case.shape).prepare(batch, case.pages.null_page)
    expected = absorbing(pages.float(), narrow.float(), plain_dim, UNSCALED)(reference, wide)
    torch.testing.assert_close(found.float(), expected, atol=0.05, rtol=0.05)
