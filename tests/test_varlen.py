"""flash_attn_varlen_func and its packed forms: each sequence as if it were alone."""

import random

import pytest
import torch
from oracle import check, make, sample
from test_attention import AXES, KERNELS, forced

import hf_flash
from hf_flash import library
from hf_flash.reference import attention_reference

LENGTHS = {  # (queries, keys) of each sequence: first, middle and last empty, equal, about tile edges
    "self": ([3, 64, 1, 129, 65], None),
    "equal": ([40, 40, 40], None),
    "empty queries": ([0, 150, 0, 33, 0], [100, 100, 1, 65, 20]),
    "empty keys": ([10, 150, 33, 5], [0, 128, 0, 70]),
    "both": ([0, 17, 0], [0, 17, 0]),
    "cross": ([7, 70, 1], [4, 130, 90]),
}
VARLEN_AXES = dict(
    {k: v for k, v in AXES.items() if k not in ("seq_q", "seq_k")}, layout=("contiguous", "slice", "odd"), seq_k=(100,)
)


def offsets(lengths, device):
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(device=device, dtype=torch.int32)


def drawn(name):
    """(lengths, Case) for one backend: on a GPU three of every kernel, elsewhere some of all lengths."""
    if name == "cuda":
        for i, kernel in enumerate(KERNELS):
            chosen = random.Random(i).sample(list(LENGTHS), 3)
            yield from zip(chosen, sample(3, 200 + i, **{**VARLEN_AXES, **kernel}))
        return
    axes = {"dtype": (torch.float32, torch.bfloat16), **VARLEN_AXES}
    if name == "emulated":
        axes.update(dtype=(torch.bfloat16, torch.float16), head_dim=(64,), group=(101, 102))
    for i, lengths in enumerate(LENGTHS):
        for case in sample(2 if name == "emulated" else 4, 10 + i, **axes):
            yield lengths, case


def varlen_cases():
    for name in ["emulated"] if library.emulated() else ["cpu", "cuda"]:
        marks = [pytest.mark.gpu] if name == "cuda" else []
        for lengths, case in drawn(name):
            yield pytest.param(name, lengths, case, id=f"{name}-{lengths}-{case}", marks=marks)


@pytest.mark.parametrize("name, lengths, case", list(varlen_cases()))
def test_each_sequence_matches_fp64_alone(name, lengths, case, poisoned):
    """Rows 6, 13, 28, 30: also rows past the last offset, which give 0."""
    c, device = case, torch.device("cuda" if name == "cuda" else "cpu")
    lengths_q, lengths_k = LENGTHS[lengths]
    cu_q = offsets(lengths_q, device)
    cu_k = cu_q if lengths_k is None else offsets(lengths_k, device)
    lengths_k = lengths_k or lengths_q
    tail = 5 if case.deterministic else 0
    q = make((sum(lengths_q) + tail, c.heads, c.head_dim), c.dtype, device, c.layout)
    k, v = (make((sum(lengths_k) + tail, c.kv_heads, c.head_dim), c.dtype, device, c.layout) for _ in "kv")
    slopes = torch.rand(len(lengths_q), c.heads, device=device) if c.alibi else None
    features = dict(causal=c.causal, window_size=c.window, softcap=c.softcap, alibi_slopes=slopes, dropout_p=c.dropout)
    torch.manual_seed(5)
    rng_state = torch.randint(0, 1 << 62, (2,), dtype=torch.int64, device=device)

    def run(q, k, v):
        torch.manual_seed(5)
        out, lse, _ = hf_flash.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, max(lengths_q), max(lengths_k), deterministic=c.deterministic, return_attn_probs=True,
            **features,
        )  # fmt: skip
        return out, torch.cat([lse[:, : sum(lengths_q)], torch.zeros_like(lse[:, sum(lengths_q) :])], 1)

    with forced(c.kernel):
        check(run, q, k, v, grad_lse=c.grad_lse, rng_state=rng_state, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **features)


def uniform(backend, lengths_q, lengths_k, **arguments):
    dtype, device = backend.dtypes[0], backend.device
    v = torch.arange(sum(lengths_k), dtype=dtype, device=device)[:, None, None].expand(-1, 1, 64)
    q = torch.zeros(sum(lengths_q), 1, 64, dtype=dtype, device=device)
    cu_q, cu_k = offsets(lengths_q, device), offsets(lengths_k, device)
    arguments = dict(max_seqlen_q=max(lengths_q), max_seqlen_k=max(lengths_k), **arguments)
    return hf_flash.flash_attn_varlen_func(q, torch.zeros_like(v), v, cu_q, cu_k, **arguments)[:, 0, 0].float().cpu()


def test_packed_documents_do_not_see_each_other(backend):
    """Row 16: three documents of 3, 4 and 2 tokens."""
    out = uniform(backend, [3, 4, 2], [3, 4, 2], causal=True)
    torch.testing.assert_close(out, torch.tensor([0, 0.5, 1, 3, 3.5, 4, 4.5, 7, 7.5]))


def test_an_edit_of_one_document_leaves_the_others_bit_equal(backend):
    """Row 16."""
    qkv = make((140, 3, 2, 64), backend.dtypes[0], backend.device)
    cu = offsets([60, 80], backend.device)
    before = hf_flash.flash_attn_varlen_qkvpacked_func(qkv, cu, 80, causal=True)
    qkv[:60] = float("nan")
    after = hf_flash.flash_attn_varlen_qkvpacked_func(qkv, cu, 80, causal=True)
    assert torch.equal(before[60:], after[60:]) and after[:60].isnan().all()


def test_a_key_mask_of_cross_attention_holds_for_every_query(backend):
    """Row 13: seven queries, keys masked to [1, 1, 1, 0]."""
    torch.testing.assert_close(uniform(backend, [7], [3]), torch.ones(7))


@pytest.mark.parametrize("mask, expected", [
    ([0, 0, 1, 1, 1], [2, 2.5, 3]),
    ([1, 1, 0, 1, 1], [0, 0.5, 4 / 3, 2]),
    ([0, 1, 1, 0], [1, 1.5]),
    ([1, 1, 1, 0, 0], [0, 0.5, 1]),
])  # fmt: skip
def test_padding_anywhere_is_not_seen(backend, mask, expected):
    """Rows 10, 11: left, right and two-sided padding and holes, unpadded, attended, padded again."""
    n, dtype = len(mask), backend.dtypes[0]
    v = torch.arange(n, dtype=dtype, device=backend.device)[None, :, None, None].expand(1, n, 1, 64)
    mask = torch.tensor([mask], device=backend.device)
    v, indices, cu, longest, _ = hf_flash.unpad_input(v, mask)
    zero = torch.zeros_like(v)
    out = hf_flash.flash_attn_varlen_func(zero, zero, v, cu, cu, longest, longest, causal=True)
    padded = hf_flash.pad_input(out, indices, 1, n)[0, :, 0, 0].float()
    assert not padded[~mask[0].bool()].any()
    torch.testing.assert_close(padded[mask[0].bool()].cpu(), torch.tensor(expected), rtol=5e-3, atol=0)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_empty_sequences_leave_no_garbage(backend, head_dim, poisoned):
    """Row 28: queries or keys of length 0; gradients of keys that no query sees are 0, outputs without keys are 0."""
    if backend.name == "emulated" and head_dim != 64:
        pytest.skip("the emulator compiles few head dims")
    cu_q = torch.tensor([0, 0, 150, 150, 300], dtype=torch.int32, device=backend.device)
    cu_k = torch.tensor([0, 100, 100, 200, 300], dtype=torch.int32, device=backend.device)
    q, k, v = (make((300, 2, head_dim), backend.dtypes[0], backend.device).requires_grad_() for _ in range(3))
    out = hf_flash.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 150, 100)
    out.sum().backward()
    assert not out[:150].any() and not q.grad[:150].any()
    for x in (k.grad, v.grad):
        assert not x[:200].any() and torch.isfinite(x).all() and x[200:].any()


def test_rows_past_the_last_offset_give_zero(backend, poisoned):
    """Row 30: 698 rows, offsets to 486."""
    cu = torch.tensor([0, 137, 486], dtype=torch.int32, device=backend.device)
    q, k, v = (make((698, 1, 64), backend.dtypes[0], backend.device).requires_grad_() for _ in range(3))
    out, lse = hf_flash.flash_attn_varlen_func(q, k, v, cu, cu, 349, 349, causal=True, return_lse=True)
    torch.autograd.backward((out, lse), (torch.ones_like(out), torch.ones_like(lse)))
    for x in (out, q.grad, k.grad, v.grad, lse.T):
        assert not x[486:].any() and torch.isfinite(x).all()


@pytest.mark.parametrize("head_dim", [64, 63])
def test_packed_forms_equal_the_plain_one(backend, head_dim):
    """Outputs and gradients of qkv and kv in one tensor; row 34: head dims that are padded outside too."""
    cu = offsets([30, 1, 41], backend.device)
    qkv = make((72, 3, 2, head_dim), backend.dtypes[0], backend.device)
    plain = [x.contiguous().requires_grad_() for x in qkv.detach().unbind(1)]
    out = hf_flash.flash_attn_varlen_func(*plain, cu, cu, 41, 41, causal=True, deterministic=True)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, plain, grad)
    fused = qkv.detach().requires_grad_()
    o = hf_flash.flash_attn_varlen_qkvpacked_func(fused, cu, 41, causal=True, deterministic=True)
    (dqkv,) = torch.autograd.grad(o, fused, grad)
    assert torch.equal(o, out) and torch.equal(dqkv, torch.stack(expected, 1))
    q, kv = qkv[:, 0].detach().requires_grad_(), qkv[:, 1:].detach().requires_grad_()
    o = hf_flash.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 41, 41, causal=True, deterministic=True)
    dq, dkv = torch.autograd.grad(o, (q, kv), grad)
    assert torch.equal(o, out) and torch.equal(dq, expected[0]) and torch.equal(dkv, torch.stack(expected[1:], 1))


@pytest.mark.parametrize("seq_q", [1, 20])
def test_pages_equal_rows_in_a_line(backend, seq_q):
    """block_table: k and v in pages, lengths from cu_seqlens_k."""
    lengths, page = [37, 64, 5], 16
    k, v = (make((sum(lengths), 2, 64), backend.dtypes[0], backend.device) for _ in "kv")
    cu_k, cu_q = offsets(lengths, backend.device), offsets([seq_q] * 3, backend.device)
    table = torch.randperm(16, device=backend.device)[:12].view(3, 4).to(torch.int32)
    pages = [torch.full((16, page, 2, 64), float("nan"), dtype=k.dtype, device=k.device) for _ in "kv"]
    for b, n in enumerate(lengths):
        for into, rows in zip(pages, (k, v)):
            for i in range(n):
                into[table[b, i // page], i % page] = rows[cu_k[b] + i]
    q = make((3 * seq_q, 4, 64), backend.dtypes[0], backend.device)
    arguments = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=seq_q, max_seqlen_k=64, causal=True)
    out = hf_flash.flash_attn_varlen_func(q, *pages, **arguments, block_table=table)
    expected = hf_flash.flash_attn_varlen_func(q, k, v, **arguments)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    with pytest.raises(NotImplementedError, match="no gradient"):
        hf_flash.flash_attn_varlen_func(q.requires_grad_(), *pages, **arguments, block_table=table)


def test_offsets_made_under_inference_mode(backend):
    with torch.inference_mode():
        q, cu = make((6, 2, 64), backend.dtypes[0], backend.device), offsets([2, 4], backend.device)
        for _ in range(2):
            assert hf_flash.flash_attn_varlen_func(q, q, q, cu, cu, 4, 4).shape == q.shape


def test_many_short_sequences(backend):
    """More sequences than a grid's second axis could count are a gpu test; here 300 of 0 to 3 tokens."""
    lengths = torch.randint(0, 4, (300 if backend.name != "emulated" else 40,)).tolist()
    cu = offsets(lengths, backend.device)
    q, k, v = (make((sum(lengths), 1, 64), backend.dtypes[0], backend.device) for _ in range(3))
    out = hf_flash.flash_attn_varlen_func(q, k, v, cu, cu, 3, 3, causal=True)
    expected, _ = attention_reference(q, k, v, cu, cu, causal=True, dtype=torch.float64)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
