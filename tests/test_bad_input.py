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


NAN, INF = float("nan"), float("inf")
VALUES = [  # argument, value, what is raised, words that it holds
    ("dropout_p", 1.0, ValueError, "dropout_p is 1.0: it must be at least 0 and below 1"),
    ("dropout_p", -0.1, ValueError, "dropout_p is -0.1"),
    ("dropout_p", NAN, ValueError, "dropout_p is nan"),
    ("dropout_p", True, TypeError, "dropout_p is a bool: it must be a number"),
    ("dropout_p", None, TypeError, "dropout_p is a NoneType"),
    ("softcap", -1, ValueError, "softcap is -1: it must be positive, or 0 for none"),
    ("softcap", NAN, ValueError, "softcap is nan"),
    ("softcap", INF, ValueError, "softcap is inf"),
    ("softcap", "2", TypeError, "softcap is a str"),
    ("softmax_scale", NAN, ValueError, "softmax_scale is nan: it must be finite, or None"),
    ("softmax_scale", -INF, ValueError, "softmax_scale is -inf"),
    ("softmax_scale", True, TypeError, "softmax_scale is a bool"),
    ("softmax_scale", torch.ones(2), TypeError, "softmax_scale is a Tensor"),
    ("window_size", (-2, 0), ValueError, r"window_size is -2: give \(left, right\) in tokens, -1 for no limit"),
    ("window_size", (2.0, 0), TypeError, "window_size is 2.0, a float: give int"),
    ("window_size", (True, 0), TypeError, "window_size is True, a bool"),
    ("window_size", (None, None), TypeError, "window_size is None"),
    ("window_size", 4, ValueError, r"window_size is 4: it must be \(left, right\)"),
    ("window_size", (1, 2, 3), ValueError, r"window_size is \(1, 2, 3\)"),
    ("alibi_slopes", torch.zeros(3), ValueError, r"alibi_slopes \(3,\) must be \(4,\) or \(1, 4\)"),
    ("alibi_slopes", torch.zeros(4, 1), ValueError, r"alibi_slopes \(4, 1\) must be"),
    ("alibi_slopes", torch.ones(4, dtype=torch.int64), TypeError, "alibi_slopes is torch.int64: it must be float32"),
    ("alibi_slopes", [0.5] * 4, TypeError, "alibi_slopes is list"),
    ("alibi_slopes", torch.ones(4, requires_grad=True), NotImplementedError, r"get no gradient: .*detach\(\)"),
]


@pytest.mark.parametrize("name, value, error, text", VALUES, ids=lambda x: str(x)[:20])
def test_values_out_of_range_or_of_another_type(make, backend, name, value, error, text):
    if isinstance(value, torch.Tensor):
        value = value.to(backend.device)
    q, cu = make(1, 6, 4, 16), torch.tensor([0, 6], dtype=torch.int32, device=backend.device)
    refused(error, text, flash_attn_func, q, q, q, **{name: value})
    refused(error, text, flash_attn_varlen_func, q[0], q[0], q[0], cu, cu, 6, 6, **{name: value})
    if name != "dropout_p" and not getattr(value, "requires_grad", False):  # a cache has no gradient in any case
        refused(error, text, flash_attn_with_kvcache, q, q, q, **{name: value})


def test_values_that_convert_are_taken(make, backend):
    """NumPy's and torch's numbers, no scale, scales that flip or flatten, windows wider than an int holds."""
    q = torch.randn_like(make(1, 6, 4, 16).float()).to(make(1).dtype)
    half = torch.tensor(0.5, dtype=torch.float64)
    expected = flash_attn_func(q, q, q, 0.0, 0.5, window_size=(2, 0))
    found = flash_attn_func(q, q, q, 0, half.numpy(), window_size=[torch.tensor(2), half.numpy().astype(int)])
    assert torch.equal(flash_attn_func(q, q, q, 0.0, half, window_size=(2, 0)), expected)
    assert torch.equal(found, expected)
    assert torch.equal(flash_attn_func(q, q, q, 0.0, None), flash_attn_func(q, q, q, 0.0, 0.25))
    assert torch.equal(flash_attn_func(q, q, q, window_size=(2**32, 2**40)), flash_attn_func(q, q, q))
    mean = q.float().mean(1, keepdim=True).expand_as(q)
    torch.testing.assert_close(flash_attn_func(q, q, q, 0.0, 0.0).float(), mean, rtol=1e-2, atol=1e-2)
    mirrored = flash_attn_func(-q, q, q, 0.0, 0.5)
    torch.testing.assert_close(flash_attn_func(q, q, q, 0.0, -0.5), mirrored, rtol=1e-2, atol=1e-2)


def test_what_is_no_tensor(make):
    q = make(1, 6, 4, 16)
    refused(TypeError, "q is list: it must be a torch.Tensor", flash_attn_func, [1.0], q, q)
    refused(TypeError, "v is NoneType", flash_attn_func, q, q, None)
    refused(TypeError, "k is NoneType", flash_attn_varlen_func, q[0], None, q[0], None, None, 6, 6)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which make_dual uses
@pytest.mark.parametrize("features", [{}, {"causal": True, "window_size": (2, 0)}, {"softcap": 2.0}], ids=str)
def test_derivatives_that_there_are_not_raise_instead_of_being_zero(make, features):
    """A second derivative, forward mode and torch.func's transforms; a first derivative with create_graph is right."""
    q = torch.randn_like(make(2, 6, 4, 16).float()).to(make(1).dtype).requires_grad_()

    def attend(q):
        return flash_attn_func(q, q, q, **features)

    (plain,) = torch.autograd.grad(attend(q).sum(), q)
    (first,) = torch.autograd.grad(attend(q).sum(), q, create_graph=True)
    assert torch.equal(plain, first)
    penalty = first.square().sum() + q.sum()
    refused(NotImplementedError, "no second derivative: .*SDPBackend.MATH", penalty.backward)
    x = q.detach()
    refused(NotImplementedError, r"torch.func \(vmap", torch.func.vmap(attend), x[None])
    refused(NotImplementedError, "torch.func", torch.func.grad(lambda x: attend(x).sum()), x)
    refused(NotImplementedError, "torch.func", torch.func.jvp, attend, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        attend(x)  # no dual number: nothing is lost
        refused(NotImplementedError, "no forward-mode", attend, torch.autograd.forward_ad.make_dual(x, x))


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
    refused(ValueError, r"rotary_cos has 7 rows.*8", call, q, cache, cache, new, new, angles[:7], angles[:7],
            cache_seqlens=1)  # fmt: skip
    for name in ("cache_batch_idx", "cache_leftpad"):
        refused(ValueError, rf"{name} \(3,\) must be \(2,\)", call, q, cache, cache, **{name: lengths})
    for splits, error in ((-1, ValueError), (1.5, TypeError), (True, TypeError)):
        refused(error, f"num_splits is {splits}.*0 to choose", call, q, cache, cache, num_splits=splits)
    table = torch.zeros(2, 1, dtype=torch.int32, device=backend.device)
    refused(ValueError, r"block_table \(1, 1\) must have 2 rows", call, q, cache, cache, block_table=table[:1])
    refused(ValueError, "cache_batch_idx and block_table: give one", call, q, cache, cache, block_table=table,
            cache_batch_idx=lengths[:2])  # fmt: skip


@pytest.mark.parametrize("name, values, text", [
    ("cache_batch_idx", [0, 3], r"cache_batch_idx is \[0, 3\]: its entries must be at least 0 and below 3"),
    ("cache_batch_idx", [-1, 0], r"cache_batch_idx is \[-1, 0\]"),
    ("cache_leftpad", [0, 9], r"cache_leftpad is \[0, 9\]: its entries must be at least 0 and below 9"),
    ("block_table", [[0], [3]], "block_table .*must name pages from 0 to below 3"),
])  # fmt: skip
def test_indices_past_the_cache_are_refused_where_the_host_has_them(make, backend, name, values, text):
    if backend.name != "cpu":
        pytest.skip("on a GPU the host does not wait for values")
    q, cache = make(2, 1, 4, 16), make(2 if name == "cache_leftpad" else 3, 8, 2, 16)
    refused(ValueError, text, flash_attn_with_kvcache, q, cache, cache, **{name: torch.tensor(values)})


def test_pages_past_a_sequence_s_end_may_be_anything(make, backend):
    q, cache = make(2, 1, 4, 16), torch.randn_like(make(3, 8, 2, 16).float()).to(make(1).dtype)
    lengths = torch.tensor([16, 3], dtype=torch.int32, device=backend.device)
    results = []
    for unused in (0, 2**30, -1):
        table = torch.tensor([[2, 1], [0, unused]], dtype=torch.int32, device=backend.device)
        results.append(flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, block_table=table))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


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
    "index_first_axis": "x, indices",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_flash_attn(name):
    parameters = inspect.signature(getattr(hf_flash, name)).parameters.values()
    positional = ", ".join(str(p) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    assert positional == SIGNATURES[name]


def test_what_is_returned_with_the_probabilities(make):
    """flash-attn's triple: no score matrix exists, so the third is None, with dropout too."""
    q = make(1, 6, 4, 16)
    for dropout_p in (0.0, 0.5):
        for returned in (flash_attn_func(q, q, q, dropout_p, return_attn_probs=True),
                         flash_attn_func(q, q, q, dropout_p, return_attn_probs=True, return_lse=True)):  # fmt: skip
            out, lse, probabilities = returned
            assert out.shape == q.shape and lse.shape == (1, 4, 6) and probabilities is None
    assert len(flash_attn_func(q, q, q, return_lse=True)) == 2
