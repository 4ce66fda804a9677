"""The attention functions, with flash-attn 2.8's names, arguments, shapes and defaults, and their autograd.Function.

FlashAttention (Dao et al. 2022, arXiv 2205.14135) and FlashAttention-2 (Dao 2023, arXiv 2307.08691).
"""

import torch
import torch.nn.functional as F

from . import checks, library, ops
from .cpu import NATIVE_GROUPS

_sdpa = F.scaled_dot_product_attention


class _Attention(torch.autograd.Function):
    """out, lse = attention(...). packing 3: q is (q, k, v) in one tensor; 2: k is (k, v); 0: three tensors."""

    @staticmethod
    def forward(
        ctx, packing, lse_wanted, q, k, v, cu_seqlens_q, cu_seqlens_k, used_k, leftpad_k, alibi_slopes, rng_state,
        deterministic, *settings,
    ):  # fmt: skip
        sequences = cu_seqlens_q, cu_seqlens_k, used_k, leftpad_k
        out, lse = ops.forward(*_unpacked(packing, q, k, v), *sequences, None, None, alibi_slopes, rng_state, *settings)
        ctx.save_for_backward(q, k, v, out, lse, *sequences, alibi_slopes, rng_state)
        ctx.packing, ctx.deterministic, ctx.settings = packing, deterministic, settings
        ctx.set_materialize_grads(False)
        if not lse_wanted:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        q, k, v, out, lse, *sequences, alibi_slopes, rng_state = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:5]
        nothing = (None,) * (7 + len(ctx.settings))
        if grad_out is None:
            if grad_lse is None:
                return None, None, None, None, None, *nothing
            grad_out = torch.zeros_like(out)
        with torch.no_grad():
            grads = ops.backward(
                grad_out, grad_lse, *_unpacked(ctx.packing, q, k, v), out, lse, *sequences, alibi_slopes, rng_state,
                *ctx.settings, ctx.deterministic, ctx.packing, wanted,
            )  # fmt: skip
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            grads = _LastDerivative.apply(len(grads), *grads, grad_out, q, k, v)
        grads = iter(grads)
        dq, dk, dv = [next(grads) if w else None for w in wanted]
        return None, None, dq, dk, dv, *nothing


class _LastDerivative(torch.autograd.Function):
    """The first `count` tensors as they are: gradients of the rest, which refuse to be differentiated in silence."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(x.view_as(x) for x in tensors[:count] if x is not None)

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(
            "hf_flash attention has no second derivative: for create_graph=True, gradient penalties and Hessians use "
            "torch.nn.functional.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)"
        )


def _unpacked(packing, q, k, v):
    if packing == 0:
        return q, k, v
    return q.unbind(-3) if packing == 3 else (q, *k.unbind(-3))


def uses_kernels(q):
    """Whether tensors like q go to libhf_flash.so."""
    return q.is_cuda or (q.dtype in library.DTYPES and library.emulated())


def attend(
    packing, q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0, used_k=None,
    leftpad_k=None, block_table=None, dropout_p=0.0, scale=None, left=-1, right=-1, softcap=0.0, alibi_slopes=None,
    deterministic=False, lse_wanted=False,
):  # fmt: skip
    """Checked arguments to (out, lse): what the public functions share.

    q, k, v as packing says (see `_Attention`; absent ones None). lse (batch, heads, seq_q), packed (heads, total_q).
    """
    head_dim = q.shape[-1]
    pad = -head_dim % 8
    if pad and uses_kernels(q):
        q, k, v = (F.pad(x, (0, pad)) for x in _unpacked(packing, q, k, v))
        packing = 0
    rng_state = None
    if dropout_p > 0:  # torch's generator, so that checkpointing, CUDA graphs and seeds treat it as any random op
        rng_state = torch.randint(0, 1 << 62, (2,), dtype=torch.int64, device=q.device)
    settings = max_seqlen_q, max_seqlen_k, scale, left, right, softcap, dropout_p
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v)):
        if block_table is not None:
            raise NotImplementedError(
                "block_table: attention over pages has no gradient; call it under torch.no_grad()"
            )
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        out, lse = _Attention.apply(
            packing, lse_wanted, q, k, v, cu_seqlens_q, cu_seqlens_k, used_k, leftpad_k, alibi_slopes, rng_state,
            deterministic, *settings,
        )  # fmt: skip
    else:
        out, lse = ops.forward(
            *_unpacked(packing, q, k, v), cu_seqlens_q, cu_seqlens_k, used_k, leftpad_k, None, block_table,
            alibi_slopes, rng_state, *settings,
        )  # fmt: skip
    return (out[..., :head_dim] if pad and out.shape[-1] != head_dim else out), lse


def _is_stock(q, k, v, right):
    """Whether PyTorch's own function does the same without a mask."""
    return (
        q.is_cpu
        and not uses_kernels(q)
        and (right < 0 or (right == 0 and (q.shape[1] == k.shape[1] or q.shape[1] == 1)))
        and k.numel() > 0
        # PyTorch adds a group's gradients in half precision, and before NATIVE_GROUPS has no fused path for groups.
        and (q.shape[2] == k.shape[2] or (NATIVE_GROUPS and q.dtype.itemsize > 2))
    )


def _stock(q, k, v, scale, causal):
    """PyTorch's own function, where its meaning is ours: the least overhead on the CPU."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:  # else it would take the path with a score matrix
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = _sdpa(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    if out.requires_grad and not torch.compiler.is_compiling():
        out.grad_fn.register_hook(_end_of_graph)
    return out.transpose(1, 2)


def _end_of_graph(grads, _):
    """Hook of the stock function's node: what _Attention.backward does with its gradients."""
    if torch.is_grad_enabled():
        found = iter(_LastDerivative.apply(len(grads), *grads))
        return tuple(None if x is None else next(found) for x in grads)


def _dense(
    packing, q, k, v, dropout_p, scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    return_lse,
):  # fmt: skip
    left, right = checks.window(window_size, causal)
    dropout_p, softcap, scale = checks.scalars(dropout_p, softcap, scale, q.shape[-1])
    wants_lse = return_attn_probs or return_lse
    if packing == 0 and dropout_p == 0 and softcap == 0 and left < 0 and alibi_slopes is None and not wants_lse:
        if _is_stock(q, k, v, right):
            # A branch: compiled for every length, the comparison alone would be symbolic.
            return _stock(q, k, v, scale, True if right == 0 and q.shape[1] > 1 else False)
    if alibi_slopes is not None:
        alibi_slopes = checks.alibi(alibi_slopes, q.shape[-2], q.shape[0], q.device)
    out, lse = attend(
        packing, q, k, v, dropout_p=dropout_p, scale=scale, left=left, right=right, softcap=softcap,
        alibi_slopes=alibi_slopes, deterministic=deterministic, lse_wanted=wants_lse,
    )  # fmt: skip
    return checks.returned(out, lse, return_attn_probs, return_lse)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, *, return_lse=False,
):  # fmt: skip
    """Exact attention: softmax(q kᵀ · softmax_scale) v, in memory linear in the sequence, differentiable.

    Args:
        q: (batch, seq_q, heads, head_dim), bf16 or fp16; on the CPU also fp32 and fp64. head_dim up to 256.
        k, v: (batch, seq_k, kv_heads, head_dim), same dtype and device. heads is a multiple of kv_heads: query head h
            attends to kv head h // (heads // kv_heads) (GQA, MQA). Any strides.
        dropout_p: probability of dropping an attention weight; 0.0 in evaluation.
        softmax_scale: default 1 / sqrt(head_dim).
        causal: query i sees key j only if j <= i + seq_k - seq_q (aligned bottom-right).
        window_size: (left, right): query i sees keys i + seq_k - seq_q - left … + right, inclusive; -1 is no limit.
        softcap: scores become softcap * tanh(scores / softcap); 0.0 is none.
        alibi_slopes: (heads,) or (batch, heads) fp32; adds -slope * |i + seq_k - seq_q - j| to the scores.
        deterministic: gradients bit-equal run to run; also set by torch.use_deterministic_algorithms.
        return_attn_probs: return (out, softmax_lse, S_dmask); S_dmask is always None, as no score matrix exists.
        return_lse: return (out, softmax_lse).

    Returns:
        out like q. softmax_lse (batch, heads, seq_q) fp32, natural logarithm, differentiable. A query that sees no key
        gives 0 and -inf. Gradients are those of q, k and v, once: no second derivative, no forward mode.

    Raises:
        TypeError, ValueError, NotImplementedError: on bad input, before anything is launched.
        RuntimeError: where the library of kernels is missing or has none for this GPU.
    """
    q, k, v = checks.autocast(q, k, v)
    checks.dense(q, k, v)
    return _dense(
        0, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, return_lse,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, *, return_lse=False,
):  # fmt: skip
    """`flash_attn_func` for qkv (batch, seq, 3, heads, head_dim); the gradient is one tensor of that shape."""
    (qkv,) = checks.autocast(qkv)
    checks.packed(qkv, "qkv", 3, dims=5)
    checks.dense(*qkv.unbind(-3))
    return _dense(
        3, qkv, None, None, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, return_lse,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, *, return_lse=False,
):  # fmt: skip
    """`flash_attn_func` for q (batch, seq_q, heads, head_dim) and kv (batch, seq_k, 2, kv_heads, head_dim)."""
    q, kv = checks.autocast(q, kv)
    checks.packed(kv, "kv", 2, dims=5)
    checks.dense(q, *kv.unbind(-3))
    return _dense(
        2, q, kv, None, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, return_lse,
    )  # fmt: skip


def _varlen(
    packing, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, scale, causal, window_size,
    softcap, alibi_slopes, deterministic, return_attn_probs, return_lse, block_table=None,
):  # fmt: skip
    left, right = checks.window(window_size, causal)
    dropout_p, softcap, scale = checks.scalars(dropout_p, softcap, scale, q.shape[-1])
    max_seqlen_q = checks.length(max_seqlen_q, "max_seqlen_q")
    max_seqlen_k = checks.length(max_seqlen_k, "max_seqlen_k")
    total_k = None if block_table is not None else q.shape[0] if k is None else k.shape[0]
    cu_seqlens_q, cu_seqlens_k = checks.offsets(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, total_k)
    batch = cu_seqlens_q.shape[0] - 1
    if alibi_slopes is not None:
        alibi_slopes = checks.alibi(alibi_slopes, q.shape[-2], batch, q.device)
    used_k = None
    if block_table is not None:  # pages have no offsets: each sequence has a length
        checks.rows(block_table, "block_table", batch)
        used_k, cu_seqlens_k = (cu_seqlens_k[1:] - cu_seqlens_k[:-1]).to(torch.int32), None
    wants_lse = return_attn_probs or return_lse
    out, lse = attend(
        packing, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, used_k, None, block_table, dropout_p,
        scale, left, right, softcap, alibi_slopes, deterministic, wants_lse,
    )  # fmt: skip
    return checks.returned(out, lse, return_attn_probs, return_lse)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None, *, return_lse=False,
):  # fmt: skip
    """`flash_attn_func` for sequences of different lengths laid end to end; none sees another.

    Args:
        q: (total_q, heads, head_dim). k, v: (total_k, kv_heads, head_dim).
        cu_seqlens_q, cu_seqlens_k: (batch + 1) int32 on q's device, ascending from 0: sequence b is rows
            cu_seqlens[b] to cu_seqlens[b + 1]. Rows past the last offset give 0.
        max_seqlen_q, max_seqlen_k: the longest lengths, or more.
        block_table: (batch, pages) int32: k and v are (num_pages, page_size, kv_heads, head_dim), and cu_seqlens_k says
            only how many keys each sequence has. No gradient.
        The rest as in `flash_attn_func`.

    Returns:
        out like q; softmax_lse (heads, total_q), 0 in rows past the last offset.
    """
    q, k, v = checks.autocast(q, k, v)
    if block_table is None:
        checks.varlen(q, k, v)
    else:
        block_table = checks.paged(q, k, v, block_table)
    return _varlen(
        0, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs, return_lse, block_table,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False, *, return_lse=False,
):  # fmt: skip
    """`flash_attn_varlen_func` for qkv (total, 3, heads, head_dim)."""
    (qkv,) = checks.autocast(qkv)
    checks.packed(qkv, "qkv", 3, dims=4)
    checks.varlen(*qkv.unbind(-3))
    return _varlen(
        3, qkv, None, None, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs, return_lse,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, *,
    return_lse=False,
):  # fmt: skip
    """`flash_attn_varlen_func` for q (total_q, heads, head_dim) and kv (total_k, 2, kv_heads, head_dim)."""
    q, kv = checks.autocast(q, kv)
    checks.packed(kv, "kv", 2, dims=4)
    checks.varlen(q, *kv.unbind(-3))
    return _varlen(
        2, q, kv, None, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs, return_lse,
    )  # fmt: skip
