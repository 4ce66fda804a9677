"""Bad input raises before anything runs, naming the argument, its shape and what to do."""

import inspect

import pytest
import torch

import hf_flash
from hf_flash import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)


@pytest.fixture
def make(backend):
    return lambda *shape, dtype=None: torch.zeros(shape, dtype=dtype or backend.dtypes[-1], device=backend.device)


def refused(error, text, function, *args, **kwargs):
    with pytest.raises(error, match=text):
        function(*args, **kwargs)


def test_shapes(make):
    """Row 22: swapped axes give a readable error."""
    q = make(1, 6, 4, 16)
    refused(ValueError, r"q \(6, 4, 16\).*call flash_attn_varlen_func", flash_attn_func, q[0], q[0], q[0])
    refused(ValueError, r"has 7 heads, k \(1, 4, 5, 16\) has 5.*transpose\(1, 2\)", flash_attn_func,
            make(1, 4, 7, 16), make(1, 4, 5, 16), make(1, 4, 5, 16))  # fmt: skip
    refused(ValueError, "must have one shape", flash_attn_func, q, q, make(1, 5, 4, 16))
    refused(ValueError, "head_dim differs.*pad the narrower", flash_attn_func, q, make(1, 6, 4, 8), make(1, 6, 4, 8))
    refused(ValueError, "batch differs", flash_attn_func, q, make(2, 6, 4, 16), make(2, 6, 4, 16))
    refused(NotImplementedError, "head_dim 264 is larger than 256", flash_attn_func, *[make(1, 6, 4, 264)] * 3)
    refused(ValueError, "must not be 0", flash_attn_func, q, make(1, 6, 0, 16), make(1, 6, 0, 16))
    refused(ValueError, r"qkv \(1, 6, 4, 16\) must be \(batch, seq, 3", flash_attn_qkvpacked_func, q)
    refused(ValueError, r"kv \(1, 6, 4, 16\) must be \(batch, seq, 2", flash_attn_kvpacked_func, q, q)
    refused(ValueError, "unpad_input", flash_attn_varlen_func, q, q, q, None, None, 1, 1)


def test_dtypes(make, backend):
    half, single = make(1, 6, 4, 16), make(1, 6, 4, 16, dtype=torch.float32)
    refused(TypeError, r"cast them to one dtype.*autocast", flash_attn_func, half, single, half)
    integers = make(1, 6, 4, 16, dtype=torch.int32)
    refused(TypeError, "takes bfloat16 and float16", flash_attn_func, integers, integers, integers)
    if backend.name == "cuda":
        refused(TypeError, r"\.to\(torch.bfloat16\).*autocast", flash_attn_func, single, single, single)


def test_scalars(make):
    q = make(1, 6, 4, 16)
    refused(ValueError, "dropout_p is 1.0", flash_attn_func, q, q, q, 1.0)
    refused(ValueError, "dropout_p is -0.1", flash_attn_func, q, q, q, -0.1)
    refused(ValueError, "softcap is -1", flash_attn_func, q, q, q, softcap=-1)
    refused(ValueError, "softcap is nan", flash_attn_func, q, q, q, softcap=float("nan"))
    slopes = torch.zeros(3, device=q.device)
    refused(ValueError, r"alibi_slopes \(3,\) must be \(4,\)", flash_attn_func, q, q, q, alibi_slopes=slopes)


def test_devices(make):
    """Row 53: tensors on two devices."""
    q, other = make(1, 6, 4, 16), torch.zeros(1, 6, 4, 16, dtype=make(1).dtype, device="meta")
    refused(ValueError, r"k on meta.*\.to\(q.device\)", flash_attn_func, q, other, q)
    q, other = q[0], torch.zeros(2, dtype=torch.int32, device="meta")
    refused(ValueError, "cu_seqlens_q is on meta.*move it once", flash_attn_varlen_func, q, q, q, other, other, 6, 6)


def test_offsets_on_the_cpu_for_tensors_on_a_gpu(make, backend):
    """Row 31."""
    if backend.name != "cuda":
        pytest.skip("needs two kinds of device")
    q, cu = make(6, 4, 16), torch.tensor([0, 6], dtype=torch.int32)
    refused(ValueError, "cu_seqlens_q is on cpu.*move it once", flash_attn_varlen_func, q, q, q, cu, cu, 6, 6)


def test_offsets_of_another_integer_type_are_cast(make, backend):
    """Row 31: int64 offsets are right, not garbage."""
    q = torch.randn_like(make(6, 4, 16).float()).to(make(1).dtype)
    cu = torch.tensor([0, 2, 6], device=backend.device)
    expected = flash_attn_varlen_func(q, q, q, cu.int(), cu.int(), 4, 4)
    assert torch.equal(flash_attn_varlen_func(q, q, q, cu, cu, 4, 4), expected)
    assert torch.equal(flash_attn_varlen_func(q, q, q, cu.int(), cu, 4, torch.tensor(4)), expected)
    cu = cu.float()
    refused(TypeError, "cu_seqlens_q is torch.float32", flash_attn_varlen_func, q, q, q, cu, cu, 4, 4)


@pytest.mark.parametrize("offsets, longest, text", [
    ([0, 5, 3, 6], 5, "must ascend from 0"),
    ([1, 3, 6], 5, "must ascend from 0"),
    ([0, 3, 7], 5, "at most 6, the number of rows"),
    ([0, 6], 4, "longer than max_seqlen 4"),
])  # fmt: skip
def test_offsets_that_make_no_sense(make, backend, offsets, longest, text):
    """Row 31; on a GPU an asynchronous assertion says it (tests/gpu)."""
    if backend.name == "cuda":
        pytest.skip("a failed device assertion ends the process: tests/gpu runs it in its own")
    q, cu = make(6, 4, 16), torch.tensor(offsets, dtype=torch.int32)
    refused(ValueError, text, flash_attn_varlen_func, q, q, q, cu, cu, longest, longest)
    good = torch.tensor([0, 3, 6][: len(offsets)], dtype=torch.int32)
    if len(good) == len(offsets):
        refused(ValueError, text, flash_attn_varlen_func, q, q, q, good, cu, 6, longest)


@pytest.mark.parametrize("missing", ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"])
def test_each_varlen_argument_is_needed(make, backend, missing):
    """Row 25: half a set of varlen arguments is an error, never a dense call."""
    q, cu = make(6, 4, 16), torch.tensor([0, 6], dtype=torch.int32, device=backend.device)
    arguments = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=6, max_seqlen_k=6)
    refused(ValueError, f"{missing} is None: give", flash_attn_varlen_func, q, q, q, **{**arguments, missing: None})
    del arguments[missing]
    refused(TypeError, missing, flash_attn_varlen_func, q, q, q, **arguments)


def test_offsets_of_different_batches(make, backend):
    q = make(6, 4, 16)
    a, b = (torch.tensor(x, dtype=torch.int32, device=backend.device) for x in ([0, 6], [0, 3, 6]))
    refused(ValueError, "different batch sizes", flash_attn_varlen_func, q, q, q, a, b, 6, 6)


def test_offsets_edited_in_place_are_checked_again(make, backend):
    if backend.name == "cuda":
        pytest.skip("as above")
    q, cu = make(6, 4, 16), torch.tensor([0, 6], dtype=torch.int32)
    flash_attn_varlen_func(q, q, q, cu, cu, 6, 6)
    cu[1] = 9
    refused(ValueError, "at most 6", flash_attn_varlen_func, q, q, q, cu, cu, 9, 9)


def test_caches(make, backend):
    """Row 40 is in test_kvcache."""
    q, cache, new = make(2, 1, 4, 16), make(2, 8, 2, 16), make(2, 1, 2, 16)
    call = flash_attn_with_kvcache
    refused(ValueError, "cache_seqlens is None: with k", call, q, cache, cache, new, new)
    refused(ValueError, "k and v: give both", call, q, cache, cache, new, cache_seqlens=1)
    refused(ValueError, "batch differs", call, q, cache[:1], cache[:1])
    refused(ValueError, r"k \(2, 1, 4, 16\) has other kv_heads", call, q, cache, cache, q, q, cache_seqlens=1)
    angles = make(8, 8)
    refused(ValueError, "rotary_cos is given without k", call, q, cache, cache, None, None, angles, angles)
    refused(ValueError, "give both or neither", call, q, cache, cache, new, new, angles, cache_seqlens=1)
    refused(ValueError, "rotary_dim <= 16", call, q, cache, cache, new, new, make(8, 9), make(8, 9), cache_seqlens=1)
    lengths = torch.tensor([1, 2, 3], dtype=torch.int32, device=backend.device)
    refused(
        ValueError, r"cache_seqlens \(3,\) must be \(batch,\) = \(2,\)", call, q, cache, cache, cache_seqlens=lengths
    )
    refused(TypeError, "must be int32", call, q, cache, cache, cache_seqlens=lengths[:2].float())
    table = torch.zeros(2, 1, dtype=torch.int32, device=backend.device)
    refused(ValueError, "cache_batch_idx and block_table: give one", call, q, cache, cache, block_table=table,
            cache_batch_idx=lengths[:2])  # fmt: skip


SIGNATURES = {  # those of flash-attn 2.8
    "flash_attn_func": "q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False",
    "flash_attn_qkvpacked_func": "qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), "
    "softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False",
    "flash_attn_kvpacked_func": "q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), "
    "softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, "
    "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
    "return_attn_probs=False, block_table=None",
    "flash_attn_varlen_qkvpacked_func": "qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False",
    "flash_attn_varlen_kvpacked_func": "q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, "
    "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
    "return_attn_probs=False",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False",
    "unpad_input": "hidden_states, attention_mask, unused_mask=None",
    "pad_input": "hidden_states, indices, batch, seqlen",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_flash_attn(name):
    parameters = inspect.signature(getattr(hf_flash, name)).parameters.values()
    positional = ", ".join(str(p) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    assert positional == SIGNATURES[name]
