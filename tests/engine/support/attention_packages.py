"""Doubles of the packages with kernels for GPUs: their documented signatures and rules, computed in plain torch.

Arguments are checked as the packages' documentation and sources require; the result is
computed query by query from the pages.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

HALF = (torch.bfloat16, torch.float16)

_KVCACHE = (
    "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None "
    "{leftpad}block_table=None softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False"
)
_VARLEN = (
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 softmax_scale=None causal=False "
    "window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False "
    "block_table=None"
)
_HOPPER_KVCACHE = (
    "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None cache_seqlens=None "
    "cache_batch_idx=None cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None "
    "max_seqlen_q=None rotary_seqlens=None q_descale=None k_descale=None v_descale=None softmax_scale=None "
    "causal=False window_size=(-1,-1) attention_chunk=0 softcap=0.0 rotary_interleaved=True "
    "scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0 return_softmax_lse=False"
)
_HOPPER_VARLEN = (
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q=None seqused_k=None softmax_scale=None "
    "causal=False qv=None q_descale=None k_descale=None v_descale=None window_size=(-1,-1) attention_chunk=0 "
    "softcap=0.0 num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False"
)
_VLLM_VARLEN = (
    "q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k=None seqused_k=None q_v=None dropout_p=0.0 "
    "softmax_scale=None causal=False window_size=None softcap=0.0 alibi_slopes=None deterministic=False "
    "return_attn_probs=False block_table=None return_softmax_lse=False out=None scheduler_metadata=None "
    "q_descale=None k_descale=None v_descale=None num_splits=0 fa_version=2 s_aux=None cp_world_size=1 cp_rank=0 "
    "cp_tot_seqused_k=None"
)

_KNOWN = {"softmax_scale", "causal", "window_size", "max_seqlen_q", "max_seqlen_k", "fa_version"}
"""What may be said beside tensors; all else is to stay as it is by default."""


def signature(text: str) -> inspect.Signature:
    """Parse a signature from "name name=default ... * name=default"."""
    kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = []
    for word in text.split():
        name, equals, default = word.partition("=")
        if name == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
            continue
        value = eval(default) if equals else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name, kind, default=value))
    return inspect.Signature(parameters)


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    left: int,
    scale: float,
) -> torch.Tensor:
    """[N, H, D]: causal from the bottom right corner; queries see `left` positions before theirs, -1: all."""
    group, page_size = query.shape[1] // keys.shape[2], keys.shape[1]
    out = torch.full_like(query, torch.nan, memory_format=torch.contiguous_format)
    token = 0
    for row, num_queries in enumerate(query_lens):
        for position in range(kv_lens[row] - num_queries, kv_lens[row]):
            seen = range(0 if left < 0 else max(0, position - left), position + 1)
            slots = ([pages[row][p // page_size] for p in seen], [p % page_size for p in seen])
            k, v = (part[slots].double().repeat_interleave(group, 1) for part in (keys, values))
            weights = (torch.einsum("hd,phd->hp", query[token].double(), k) * scale).softmax(-1)
            out[token] = torch.einsum("hp,phd->hd", weights, v).to(query.dtype)
            token += 1
    assert token == len(query)
    return out


class FlashFunction:
    """One function of one package."""

    def __init__(self, parameters: str, page_multiple: int) -> None:
        self.__signature__ = signature(parameters)
        self._page_multiple = page_multiple
        self.calls: list[dict[str, Any]] = []
        """The arguments of each call."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        passed = dict(self.__signature__.bind(*args, **kwargs).arguments)
        self.calls.append(dict(passed))
        query, keys, values = (passed.pop(name) for name in list(self.__signature__.parameters)[:3])
        out = passed.pop("out", None)
        table = passed.pop("page_table", None) if "page_table" in passed else passed.pop("block_table", None)
        cumulated = passed.pop("cu_seqlens_q", None)
        is_ragged = cumulated is not None
        flat = query if is_ragged else query.flatten(0, 1)
        num_rows = len(cumulated) - 1 if is_ragged else len(query)
        kv_lens = self._kv_lens(passed, num_rows)
        assert passed.keys() <= _KNOWN, passed.keys()
        assert passed["causal"] is True and type(passed["softmax_scale"]) is float
        left, right = passed["window_size"]
        assert (left, right) == (-1, -1) or (left >= 0 and right == 0)

        query_lens = [1] * num_rows
        if is_ragged:
            check_cumulated(cumulated, num_rows, len(query))
            query_lens = cumulated.diff().tolist()
            assert passed["max_seqlen_q"] == max(query_lens)
        else:
            assert query.shape[1] == 1
        if "max_seqlen_k" in self.__signature__.parameters:
            assert passed["max_seqlen_k"] >= max(kv_lens)
        self._check_tensors(flat, keys, values)
        check_table(table, num_rows, keys, kv_lens)
        result = paged_attention(
            flat, keys, values, table.tolist(), query_lens, kv_lens, left, passed["softmax_scale"]
        ).view(query.shape)
        if out is None:
            return result
        assert out.shape == query.shape and out.dtype == query.dtype and out.stride(-1) == 1
        out.copy_(result)
        returned: torch.Tensor = out
        return returned

    def _kv_lens(self, passed: dict[str, Any], num_rows: int) -> list[int]:
        given = [name for name in ("cache_seqlens", "seqused_k", "cu_seqlens_k") if name in passed]
        assert len(given) == 1
        lens = passed.pop(given[0])
        if given[0] == "cu_seqlens_k":
            check_cumulated(lens, num_rows, int(lens[-1]))
            lens = lens.diff()
        assert lens.dtype == torch.int32 and lens.shape == (num_rows,) and lens.is_contiguous()
        numbers: list[int] = lens.tolist()
        return numbers

    def _check_tensors(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        assert query.dtype in HALF and query.dtype == keys.dtype == values.dtype
        assert query.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
        assert keys.dim() == 4 and keys.shape == values.shape
        assert keys.shape[1] % self._page_multiple == 0, "Paged KV cache block size"
        assert query.shape[2] == keys.shape[3] and query.shape[2] % 8 == 0 and query.shape[2] <= 256
        assert query.shape[1] % keys.shape[2] == 0


def check_cumulated(cumulated: torch.Tensor, num_rows: int, total: int) -> None:
    assert cumulated.dtype == torch.int32 and cumulated.shape == (num_rows + 1,) and cumulated.is_contiguous()
    assert cumulated[0] == 0 and cumulated[-1] == total and bool((cumulated.diff() > 0).all())


def check_table(table: torch.Tensor, num_rows: int, keys: torch.Tensor, kv_lens: Sequence[int]) -> None:
    assert table.dtype == torch.int32 and table.stride(-1) == 1
    assert table.shape[0] == num_rows and table.shape[1] * keys.shape[1] >= max(kv_lens)
    assert set(table.flatten().tolist()) <= set(range(keys.shape[0]))


def flash_module(name: str) -> ModuleType:
    """A double of one of the packages of FlashAttention."""
    double = ModuleType(name)
    module: Any = double
    if name == "flash_attn_interface":
        module.flash_attn_with_kvcache = FlashFunction(_HOPPER_KVCACHE, 1)
        module.flash_attn_varlen_func = FlashFunction(_HOPPER_VARLEN, 1)
    elif name == "vllm.vllm_flash_attn":
        module.flash_attn_varlen_func = FlashFunction(_VLLM_VARLEN, 16)
        module.is_fa_version_supported = lambda version, device=None: version in (2, 3)
    elif name == "vllm_flash_attn":
        module.flash_attn_with_kvcache = FlashFunction(_KVCACHE.format(leftpad="") + " * out=None", 16)
        module.flash_attn_varlen_func = FlashFunction(_VARLEN + " * out=None", 16)
    else:
        module.flash_attn_with_kvcache = FlashFunction(_KVCACHE.format(leftpad="cache_leftpad=None "), 256)
        module.flash_attn_varlen_func = FlashFunction(_VARLEN, 256)
    module.functions = [value for value in vars(double).values() if isinstance(value, FlashFunction)]
    return double


_PLAN = (
    "num_qo_heads num_kv_heads {head_dim} page_size {between}pos_encoding_mode='NONE' {after}window_left=-1 "
    "logits_soft_cap=None q_data_type='float16' kv_data_type=None o_data_type=None sm_scale=None rope_scale=None "
    "rope_theta=None non_blocking=True seq_lens=None block_tables=None fixed_split_size=None "
    "disable_split_kv=False"
)
_DECODE_PLAN = "indptr indices last_page_len " + _PLAN.format(head_dim="head_dim", between="", after="")
_PREFILL_PLAN = "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len " + _PLAN.format(
    head_dim="head_dim_qk",
    between="head_dim_vo=None custom_mask=None packed_custom_mask=None causal=False ",
    after="use_fp16_qk_reduction=False ",
)
_RUN = "q paged_kv_cache * q_scale=None k_scale=None v_scale=None out=None lse=None return_lse=False"


class FlashInferWrapper:
    """Base of both wrappers."""

    made: list[FlashInferWrapper]
    is_decode: bool

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        backend: str = "auto",
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and float_workspace_buffer.numel() == 128 << 20
        assert not float_workspace_buffer[:: 1 << 12].any() and float_workspace_buffer.data_ptr() % 16 == 0
        assert kv_layout == "NHD" and not use_cuda_graph
        assert backend == "auto" or (backend == "trtllm-gen" and not self.is_decode)
        self.use_tensor_cores, self.backend = use_tensor_cores, backend
        self.plans = self.runs = 0
        self._plan_arguments: dict[str, Any] = {}
        self.made.append(self)

    def plan(self, *args: Any, **kwargs: Any) -> None:
        passed = dict(signature(_DECODE_PLAN if self.is_decode else _PREFILL_PLAN).bind(*args, **kwargs).arguments)
        names = list(passed)[: 3 if self.is_decode else 4]
        *indptrs, last_page_len = (passed[name] for name in names)
        indices, kv_indptr = indptrs.pop(), indptrs[-1]
        num_rows = len(last_page_len)
        for indptr in (*indptrs, last_page_len):
            assert indptr.device.type == "cpu" and indptr.dtype == torch.int32
        check_cumulated(kv_indptr, num_rows, len(indices))
        assert indices.dtype == torch.int32
        assert last_page_len.min() >= 1 and last_page_len.max() <= passed["page_size"]
        self._pages = [part.tolist() for part in indices.split(kv_indptr.diff().tolist())]
        ends = zip(self._pages, last_page_len.tolist(), strict=True)
        self._kv_lens = [(len(pages) - 1) * passed["page_size"] + last for pages, last in ends]
        self._query_lens = [1] * num_rows
        if not self.is_decode:
            assert passed["causal"] is True
            check_cumulated(indptrs[0], num_rows, int(indptrs[0][-1]))
            self._query_lens = indptrs[0].diff().tolist()
        heads, kv_heads, self._dim = (
            passed[n] for n in ("num_qo_heads", "num_kv_heads", list(passed)[len(names) + 2])
        )
        assert heads % kv_heads == 0 and self._dim in (64, 128, 256)
        if self.is_decode and not self.use_tensor_cores:
            assert heads // kv_heads in (1, 2, 3, 4, 6, 8), "Unsupported group_size"
        if self.backend == "trtllm-gen":
            assert passed["page_size"] in (16, 32, 64) and passed["kv_data_type"] == passed["q_data_type"]
        assert math.isclose(passed["sm_scale"], self._dim**-0.5)
        assert passed["q_data_type"] in HALF and passed["kv_data_type"] in (
            passed["q_data_type"],
            torch.float8_e4m3fn,
        )
        types = {(plan["q_data_type"], plan["kv_data_type"]) for plan in (passed, self._plan_arguments or passed)}
        assert len(types) == 1, "the kernels of the first plan are kept"
        self._heads, self._plan_arguments = (heads, kv_heads), passed
        self.plans, self.runs = self.plans + 1, 0

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        passed = signature(_RUN).bind(*args, **kwargs).arguments
        query, (keys, values), out = passed["q"], passed["paged_kv_cache"], passed["out"]
        assert (
            query.dtype == self._plan_arguments["q_data_type"]
            and keys.dtype == self._plan_arguments["kv_data_type"]
        )
        assert query.shape == (sum(self._query_lens), self._heads[0], self._dim) and query.stride(-1) == 1
        assert keys.shape == values.shape and keys.stride() == values.stride()
        assert keys.shape[1:] == (self._plan_arguments["page_size"], self._heads[1], self._dim)
        assert out.shape == query.shape and out.dtype == query.dtype
        self.runs += 1
        if keys.dtype == torch.float8_e4m3fn:
            keys, values = keys.float() * passed["k_scale"], values.float() * passed["v_scale"]
        arguments = (
            self._pages,
            self._query_lens,
            self._kv_lens,
            self._plan_arguments["window_left"],
            self._plan_arguments["sm_scale"],
        )
        returned: torch.Tensor = out.copy_(paged_attention(query, keys, values, *arguments))
        return returned


def flashinfer_module() -> ModuleType:
    """A double of FlashInfer; `made` has its wrappers."""
    module = ModuleType("flashinfer")
    made: list[FlashInferWrapper] = []
    vars(module)["made"] = made
    for name, is_decode in (("Decode", True), ("Prefill", False)):
        full_name = f"Batch{name}WithPagedKVCacheWrapper"
        setattr(module, full_name, type(full_name, (FlashInferWrapper,), {"made": made, "is_decode": is_decode}))
    return module
