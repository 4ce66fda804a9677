"""The CPU backend: PyTorch's own fused CPU attention wherever it is exact, chunks of queries elsewhere.

No matrix of seq_q x seq_k scores is ever built: memory is linear in the sequence, forward and backward.
Inside, tensors are (batch, heads, seq, head_dim) views. The functions take and return what hf_flash.ops does.
"""

import ctypes

import torch

from .reference import dropout_keep, rotate_and_append

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_NEG_INF = float("-inf")
# From this version PyTorch's kernel takes fewer kv heads than heads as they are.
NATIVE_GROUPS = tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 9)
_BUDGET = 1 << 24  # elements of a chunk's scores or mask


class _Features:
    """What the sequences of a call share."""

    __slots__ = ("scale", "left", "right", "softcap", "slopes", "dropout_p", "rng_state", "plain")

    def __init__(self, scale, left, right, softcap, slopes, dropout_p, rng_state):
        self.scale, self.left, self.right, self.softcap, self.slopes = scale, left, right, softcap, slopes
        self.dropout_p, self.rng_state = dropout_p, rng_state
        self.plain = softcap > 0 or dropout_p > 0  # what PyTorch's fused kernel lacks


def _pieces(q, k, f, plain):
    """Cuts the queries into [(first, last, key_first, key_last, kind)], kind "full", "causal" (square) or "mask".

    Rows that see no key belong to no piece: with bottom-right alignment they are always the first rows.
    """
    batch, heads, seq_q, _ = q.shape
    seq_k, left, right = k.shape[2], f.left, f.right
    rows_cost = batch * heads if plain else heads if f.slopes is not None else 1
    diagonal = seq_k - seq_q
    first = seq_q if seq_k == 0 else max(0, -(diagonal + right)) if right >= 0 else 0
    if first >= seq_q or batch == 0:
        return []
    unbound_right = right < 0 or first + diagonal + right >= seq_k - 1
    unbound_left = left < 0 or seq_q - 1 + diagonal - left <= 0
    if not plain and f.slopes is None and unbound_left:
        if unbound_right:
            return [(first, seq_q, 0, seq_k, "full")]
        if first + diagonal + right == 0 and seq_q - first == seq_k:
            return [(first, seq_q, 0, seq_k, "causal")]
    # Rows of a chunk: few enough for the budget; with a window also few enough that a chunk's keys are mostly seen.
    reach = seq_k if left < 0 or right < 0 else min(seq_k, left + right + 256)
    chunk = max(16, min(512, _BUDGET // max(1, reach * rows_cost)) & ~15)
    pieces = []
    for a in range(first, seq_q, chunk):
        b = min(a + chunk, seq_q)
        low = 0 if left < 0 else max(0, a + diagonal - left)
        high = seq_k if right < 0 else min(seq_k, b + diagonal + right)
        seen_low = 0 if left < 0 else max(0, b - 1 + diagonal - left)
        seen_high = seq_k if right < 0 else min(seq_k, a + 1 + diagonal + right)
        masked = f.slopes is not None or low != seen_low or high != seen_high
        pieces.append((a, b, low, high, "mask" if masked else "full"))
    return pieces


def _bias(piece, diagonal, f, batches, dtype):
    """The additive mask of a piece, (rows, keys), with ALiBi (1 or batch, heads, rows, keys); None where not needed."""
    a, b, low, high, kind = piece
    if kind != "mask":
        return None
    distance = torch.arange(low, high) - torch.arange(a + diagonal, b + diagonal)[:, None]
    hidden = None
    if f.left >= 0:
        hidden = distance < -f.left
    if f.right >= 0:
        hidden = distance > f.right if hidden is None else hidden | (distance > f.right)
    if f.slopes is None:
        return torch.zeros(distance.shape, dtype=dtype).masked_fill_(hidden, _NEG_INF)
    slopes = f.slopes[batches.start : batches.stop] if f.slopes.dim() == 2 else f.slopes[None]
    bias = distance.abs_().to(dtype) * -slopes.to(dtype)[:, :, None, None]
    return bias if hidden is None else bias.masked_fill_(hidden, _NEG_INF)


def _statistics_dtype(q):
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _scores(q, k, piece, diagonal, f, batches):
    """Plain scores of a piece after softcap, bias and mask, (batch, heads, rows, keys), and softcap's derivative."""
    a, b, low, high, _ = piece
    dtype = _statistics_dtype(q)
    batch, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    rows = q[:, :, a:b].to(dtype).reshape(batch, kv_heads, -1, q.shape[-1])
    scores = (rows @ k[:, :, low:high].to(dtype).transpose(-1, -2)).view(batch, heads, b - a, high - low)
    scores *= f.scale
    slope = None
    if f.softcap > 0:
        scores = scores.div_(f.softcap).tanh_()
        slope = 1 - scores * scores
        scores = scores.mul_(f.softcap)
    bias = _bias(piece, diagonal, f, batches, dtype)
    return (scores if bias is None else scores.add_(bias)), slope


def _keep_scale(f):
    p = ctypes.c_float(f.dropout_p).value
    return 1.0 / (1.0 - p)


def _kept(f, batches, heads, piece):
    return dropout_keep(f.rng_state, f.dropout_p, batches, heads, range(*piece[:2]), range(*piece[2:4]))


def _grouped(tensors, kv_tensors, bias, b):
    """Row b of the batch with its kv heads for a batch and the heads of a group for heads: k and v as views."""
    kv_heads = kv_tensors[0].shape[1]
    group = tensors[0].shape[1] // kv_heads
    if bias is not None and bias.dim() == 4:
        bias = bias[b if bias.shape[0] > 1 else 0].unflatten(0, (kv_heads, group))
    folded = [x[b].unflatten(0, (kv_heads, group)) for x in tensors]
    return folded, [x[b][:, None].expand(-1, group, -1, -1) for x in kv_tensors], bias


def _fused_forward(q, k, v, causal, bias, scale):
    """PyTorch's fused forward, out and lse (batch, heads, seq, …)."""
    if NATIVE_GROUPS or q.shape[1] == k.shape[1]:
        return _fused(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    results = []
    for b in range(q.shape[0]):
        (q_b,), kv, bias_b = _grouped((q,), (k, v), bias, b)
        results.append([x.flatten(0, 1) for x in _fused(q_b, *kv, 0.0, causal, attn_mask=bias_b, scale=scale)])
    return [torch.stack(x) for x in zip(*results)]


def _fused_gradients(grad_out, q, k, v, out, lse, causal, bias, scale):
    """PyTorch's fused backward. In half precision it would add up a group's dk and dv in that; here in fp32."""
    if q.shape[1] == k.shape[1] or (NATIVE_GROUPS and q.dtype.itemsize > 2):
        return _fused_backward(grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
    results = []
    for b in range(q.shape[0]):
        (grad_b, q_b, out_b, lse_b), kv, bias_b = _grouped((grad_out, q, out, lse), (k, v), bias, b)
        grads = _fused_backward(grad_b, q_b, *kv, out_b, lse_b, 0.0, causal, attn_mask=bias_b, scale=scale)
        results.append((grads[0].flatten(0, 1), *(x.sum(1, dtype=lse.dtype) for x in grads[1:])))
    return [torch.stack(x) for x in zip(*results)]


def _forward_one(q, k, v, f, batches):
    """(batch, heads, seq, head_dim) -> out (batch, seq_q, heads, head_dim), lse (batch, heads, seq_q)."""
    batch, heads, seq_q, _ = q.shape
    seq_k = k.shape[2]
    pieces = _pieces(q, k, f, f.plain)
    diagonal, dtype = seq_k - seq_q, _statistics_dtype(q)
    if len(pieces) == 1 and not f.plain and pieces[0][:4] == (0, seq_q, 0, seq_k):
        bias = _bias(pieces[0], diagonal, f, batches, dtype)
        out, lse = _fused_forward(q, k, v, pieces[0][4] == "causal", bias, f.scale)
        return out.transpose(1, 2).contiguous(), lse.contiguous()
    out = q.new_zeros(batch, seq_q, heads, v.shape[-1])
    lse = torch.full((batch, heads, seq_q), _NEG_INF, dtype=dtype)
    for piece in pieces:
        a, b, low, high, kind = piece
        k_piece, v_piece = k[:, :, low:high], v[:, :, low:high]
        if not f.plain:
            bias = _bias(piece, diagonal, f, batches, dtype)
            o, s = _fused_forward(q[:, :, a:b], k_piece, v_piece, kind == "causal", bias, f.scale)
        else:
            p, _ = _scores(q, k, piece, diagonal, f, batches)
            s = p.logsumexp(-1)
            p = p.sub_(s[..., None]).exp_()
            if f.dropout_p > 0:
                p = p.mul_(_kept(f, batches, heads, piece)).mul_(_keep_scale(f))
            o = p.view(batch, k.shape[1], -1, high - low) @ v_piece.to(dtype)
            o = o.view(batch, heads, b - a, -1)
        out[:, a:b] = o.transpose(1, 2)
        lse[:, :, a:b] = s
    return out, lse


def _backward_one(grad_out, grad_lse, q, k, v, out, lse, f, batches):
    """Inputs (batch, heads, seq, head_dim); returns dq, dk, dv of that shape (any strides)."""
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k = k.shape[1], k.shape[2]
    plain = f.plain or grad_lse is not None
    pieces = _pieces(q, k, f, plain)
    diagonal, dtype = seq_k - seq_q, _statistics_dtype(q)
    if len(pieces) == 1 and not plain and pieces[0][:4] == (0, seq_q, 0, seq_k):
        bias = _bias(pieces[0], diagonal, f, batches, dtype)
        causal = pieces[0][4] == "causal"
        return _fused_gradients(grad_out, q, k, v, out, lse, causal, bias, f.scale)
    dq = torch.zeros_like(q)
    dk = torch.zeros(k.shape, dtype=dtype)
    dv = torch.zeros(v.shape, dtype=dtype)
    for piece in pieces:
        a, b, low, high, kind = piece
        q_piece, k_piece, v_piece = q[:, :, a:b], k[:, :, low:high], v[:, :, low:high]
        grad, o, s = grad_out[:, :, a:b], out[:, :, a:b], lse[:, :, a:b]
        if not plain:
            bias = _bias(piece, diagonal, f, batches, dtype)
            dq_piece, dk_piece, dv_piece = _fused_gradients(
                grad, q_piece, k_piece, v_piece, o, s, kind == "causal", bias, f.scale
            )
        else:
            p, slope = _scores(q, k, piece, diagonal, f, batches)
            p = p.sub_(s[..., None]).exp_()
            grouped = (batch, kv_heads, -1, high - low)
            grad = grad.to(dtype)
            grad = grad.reshape(batch, kv_heads, -1, v.shape[-1])
            dp = (grad @ v_piece.to(dtype).transpose(-1, -2)).view(p.shape)
            dropped = p
            if f.dropout_p > 0:
                keep = _kept(f, batches, heads, piece) * _keep_scale(f)
                dropped, dp = p * keep, dp.mul_(keep)
            delta = (p * dp).sum(-1, keepdim=True)
            if grad_lse is not None:
                delta -= grad_lse[:, :, a:b, None].to(dtype)
            dv_piece = dropped.view(grouped).transpose(-1, -2) @ grad
            ds = dp.sub_(delta).mul_(p).mul_(f.scale)
            if slope is not None:
                ds = ds.mul_(slope)
            ds = ds.view(grouped)
            dq_piece = (ds @ k_piece.to(dtype)).view(batch, heads, b - a, head_dim)
            dk_piece = ds.transpose(-1, -2) @ q_piece.to(dtype).reshape(batch, kv_heads, -1, head_dim)
        dq[:, :, a:b] = dq_piece
        dk[:, :, low:high] += dk_piece
        dv[:, :, low:high] += dv_piece
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _rows(x):
    return x if x.stride(-1) == 1 else x.contiguous()  # PyTorch's kernel takes the last axis to be contiguous


def _spans(q, k, cu_seqlens_q, cu_seqlens_k, used_k, leftpad_k):
    """[(batch, q_first, q_last, k_first, k_last)] of every sequence, or None where the call is one dense batch."""
    if cu_seqlens_q is None and cu_seqlens_k is None and used_k is None and leftpad_k is None:
        return None
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    q_at = cu_seqlens_q.tolist() if cu_seqlens_q is not None else None
    k_at = cu_seqlens_k.tolist() if cu_seqlens_k is not None else None
    used = used_k.tolist() if used_k is not None else None
    pads = leftpad_k.tolist() if leftpad_k is not None else None
    spans = []
    for b in range(batch):
        q_first, q_last = (q_at[b], q_at[b + 1]) if q_at else (0, q.shape[1])
        k_first, k_last = (k_at[b], k_at[b + 1]) if k_at else (0, k.shape[1])
        if used:
            k_last = k_first + used[b]
        if pads:
            k_first = min(k_first + pads[b], k_last)
        spans.append((b, q_first, q_last, k_first, k_last))
    return spans


def _even(spans, q, k, packed_q, packed_k):
    """The common (q_length, k_length) where packed sequences of one length fill both tensors, else None."""
    if not (packed_q and packed_k) or not spans:
        return None
    n_q, n_k = spans[0][2], spans[0][4]
    if len(spans) * n_q != q.shape[0] or len(spans) * n_k != k.shape[0] or n_q == 0:
        return None
    for b, q_first, q_last, k_first, k_last in spans:
        if q_first != b * n_q or q_last - q_first != n_q or k_first != b * n_k or k_last - k_first != n_k:
            return None
    return n_q, n_k


def _split(x, n):
    return x.view(n, -1, x.shape[1], x.shape[2])


def _paged(k, v, used_k, block_table):
    """Gathers the pages in use: dense (batch, longest, kv_heads, head_dim). Entries of no use may be anything."""
    pages = _pages(block_table, used_k, *k.shape[:2])
    return tuple(x[pages].flatten(1, 2) for x in (k, v))


def _pages(block_table, used_k, count, page_size):
    """The columns of block_table that hold the longest sequence, 0 in place of entries past a sequence's end."""
    longest = int(used_k.max()) if used_k.numel() else 0
    pages = block_table[:, : -(-longest // page_size)].long()
    pages = pages.masked_fill(torch.arange(pages.shape[1]) * page_size >= used_k[:, None], 0)
    if ((pages < 0) | (pages >= count)).any():
        raise ValueError(f"block_table {pages.tolist()} must name pages from 0 to below {count}")
    return pages


def forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, used_k, leftpad_k, cache_batch_idx, block_table, alibi_slopes, rng_state,
    scale, window_left, window_right, softcap, dropout_p,
):  # fmt: skip
    """out (contiguous, like q) and lse, fp32 (fp64 for fp64 inputs)."""
    f = _Features(scale, window_left, window_right, softcap, alibi_slopes, dropout_p, rng_state)
    q, k, v = _rows(q), _rows(k), _rows(v)
    if block_table is not None:
        k, v = _paged(k, v, used_k, block_table)
    if cache_batch_idx is not None:
        k, v = k[cache_batch_idx.long()], v[cache_batch_idx.long()]
    spans = _spans(q, k, cu_seqlens_q, cu_seqlens_k, used_k, leftpad_k)
    if spans is None:
        return _forward_one(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), f, range(q.shape[0]))
    packed_q, packed_k = cu_seqlens_q is not None, cu_seqlens_k is not None
    even = _even(spans, q, k, packed_q, packed_k)
    if even is not None:
        n = len(spans)
        q, k, v = _split(q, n), _split(k, n), _split(v, n)
        out, lse = _forward_one(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), f, range(n))
        return out.flatten(0, 1), lse.transpose(0, 1).reshape(lse.shape[1], -1)
    out = torch.empty(q.shape, dtype=q.dtype)
    dtype = _statistics_dtype(q)
    if packed_q:
        lse = torch.empty(q.shape[1], q.shape[0], dtype=dtype)
        last = spans[-1][2] if spans else 0
        out[last:] = 0
        lse[:, last:] = 0
    else:
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=dtype)
    for span in spans:
        b = span[0]
        q_b, k_b, v_b = _views(span, (q,), packed_q, 1) + _views(span, (k, v), packed_k, 3)
        o, s = _forward_one(q_b, k_b, v_b, f, range(b, b + 1))
        (out[span[1] : span[2]] if packed_q else out[b]).copy_(o[0])
        (lse[:, span[1] : span[2]] if packed_q else lse[b]).copy_(s[0])
    return out, lse


def _views(span, tensors, packed, at):
    """(1, heads, rows, head_dim) views of the rows that span[at], span[at + 1] name."""
    first, last, b = span[at], span[at + 1], span[0]
    return tuple((x[first:last] if packed else x[b, first:last]).transpose(0, 1)[None] for x in tensors)


def backward(
    grad_out, grad_lse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, used_k, leftpad_k, alibi_slopes, rng_state,
    scale, window_left, window_right, softcap, dropout_p, dq, dk, dv,
):  # fmt: skip
    """Writes the gradients into dq, dk and dv; one that is None is not wanted."""
    f = _Features(scale, window_left, window_right, softcap, alibi_slopes, dropout_p, rng_state)
    q, k, v, grad_out = _rows(q), _rows(k), _rows(v), _rows(grad_out)
    spans = _spans(q, k, cu_seqlens_q, cu_seqlens_k, used_k, leftpad_k)
    packed_q, packed_k = cu_seqlens_q is not None, cu_seqlens_k is not None
    wanted = (dq, dk, dv)
    even = None if spans is None else _even(spans, q, k, packed_q, packed_k)
    if even is not None:
        n = len(spans)
        q, out, grad_out, k, v = (_split(x, n) for x in (q, out, grad_out, k, v))
        lse, grad_lse = (x if x is None else x.reshape(len(x), n, -1).transpose(0, 1) for x in (lse, grad_lse))
        wanted = tuple(x if x is None else _split(x, n) for x in wanted)
    if spans is None or even is not None:
        tensors = (x.transpose(1, 2) for x in (q, k, v, out))
        grads = _backward_one(grad_out.transpose(1, 2), grad_lse, *tensors, lse, f, range(q.shape[0]))
        for into, grad in zip(wanted, grads):
            if into is not None:
                into.copy_(grad.transpose(1, 2))
        return
    if dq is not None and packed_q:
        dq[spans[-1][2] if spans else 0 :] = 0
    for x in (dk, dv):
        if x is not None:
            x.zero_()  # keys that no span names
    for span in spans:
        b, q_first, q_last, k_first, k_last = span
        q_b, out_b, grad_b = _views(span, (q, out, grad_out), packed_q, 1)
        k_b, v_b = _views(span, (k, v), packed_k, 3)
        lse_b, grad_lse_b = (
            x if x is None else (x[None, :, q_first:q_last] if packed_q else x[b : b + 1]) for x in (lse, grad_lse)
        )
        grads = _backward_one(grad_b, grad_lse_b, q_b, k_b, v_b, out_b, lse_b, f, range(b, b + 1))
        for into, grad, packed, first, last in zip(
            wanted, grads, (packed_q, packed_k, packed_k), (q_first, k_first, k_first), (q_last, k_last, k_last)
        ):
            if into is not None:
                (into[first:last] if packed else into[b, first:last]).copy_(grad[0].transpose(0, 1))


def decode(
    q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
    alibi_slopes, scale, window_left, window_right, softcap, rotary_interleaved,
):  # fmt: skip
    """Appends, then attends: out like q and lse (batch, heads, seq_q)."""
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    lengths = [] if cache_seqlens is None else cache_seqlens.tolist()
    new = 0 if k is None else k.shape[1]
    if lengths and (max(lengths) + new > capacity or min(lengths) < 0):
        raise ValueError(f"cache_seqlens {lengths} and {new} new keys do not fit the cache's {capacity} slots")
    if block_table is not None and k is not None:
        _pages(block_table, cache_seqlens + new, *k_cache.shape[:2])  # before anything is written
    # Rows of one length are one batched call on a part of the cache.
    even = lengths and lengths.count(lengths[0]) == len(lengths) and cache_leftpad is None and block_table is None
    if even and rotary_cos is None and cache_batch_idx is None and k is not None:
        k_cache[:, lengths[0] : lengths[0] + new] = k
        v_cache[:, lengths[0] : lengths[0] + new] = v
        k = None
    q, used = rotate_and_append(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, block_table,
        window_left, window_right, rotary_interleaved,
    )  # fmt: skip
    if even:
        k_cache, v_cache, used = k_cache[:, : lengths[0] + new], v_cache[:, : lengths[0] + new], None
    if block_table is not None and used is None:
        used = torch.full((q.shape[0],), capacity, dtype=torch.int32)
    return forward(
        q, k_cache, v_cache, None, None, used, cache_leftpad, cache_batch_idx, block_table, alibi_slopes, None,
        scale, window_left, window_right, softcap, 0.0,
    )  # fmt: skip
