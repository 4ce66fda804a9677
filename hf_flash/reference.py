"""Attention in plain PyTorch, written for clarity: the oracle of the tests, in any dtype, differentiable by autograd.

`attention_reference` builds the whole matrix of scores. What runs on the CPU in earnest is `hf_flash.cpu`.
"""

import ctypes

import torch

_WORD = 0xFFFFFFFF


def philox(key, counter):
    """Philox4x32 with 7 rounds (Salmon et al., SC 2011), as in csrc/philox.cuh.

    key: two ints below 2**32; counter: four int64 tensors of values below 2**32 that broadcast. Returns four words.
    """
    kx, ky = key
    x, y, z, w = counter
    for _ in range(7):
        a, b = x * 0xD2511F53, z * 0xCD9E8D57  # 64-bit products: signed overflow keeps the right bits
        x, y, z, w = ((b >> 32) & _WORD) ^ y ^ kx, b & _WORD, ((a >> 32) & _WORD) ^ w ^ ky, a & _WORD
        kx, ky = (kx + 0x9E3779B9) & _WORD, (ky + 0xBB67AE85) & _WORD
    return x, y, z, w


def dropout_keep(rng_state, dropout_p, batches, heads, queries, keys):
    """Which elements of P survive dropout: bool (len(batches), heads, len(queries), len(keys)).

    batches, queries and keys are ranges of absolute indices: sequence in the batch, row and column inside it.
    One draw serves queries {i, i + 8} x keys {j, j + 8} where bit 3 of i and j is clear.
    """
    seed, offset = rng_state.tolist()
    device = rng_state.device

    def aligned(r):
        start, stop = r.start & ~15, (r.stop + 15) & ~15
        blocks = torch.arange(start, stop, 16, device=device)[:, None] + torch.arange(8, device=device)
        return blocks.flatten(), r.start - start

    i, skip_i = aligned(queries)
    j, skip_j = aligned(keys)
    batch = torch.arange(batches.start, batches.stop, device=device)
    batch_head = ((batch[:, None] * heads + torch.arange(heads, device=device)) & _WORD)[:, :, None, None]
    counter = (i[:, None], j, batch_head, torch.tensor(offset & _WORD, device=device))
    words = philox((seed & _WORD, (seed >> 32) & _WORD), counter)
    drop_below = int(ctypes.c_float(dropout_p).value * 4294967296.0)
    kept = torch.stack([word >= drop_below for word in words])
    # (2 rows, 2 columns, batch, head, row block, 8, column block, 8) -> rows and columns in order
    kept = kept.view(2, 2, len(batches), heads, len(i) // 8, 8, len(j) // 8, 8)
    kept = kept.permute(2, 3, 4, 0, 5, 6, 1, 7).reshape(len(batches), heads, 2 * len(i), 2 * len(j))
    return kept[:, :, skip_i : skip_i + len(queries), skip_j : skip_j + len(keys)]


def visible(seq_q, seq_k, window_left, window_right, device=None):
    """Which keys a query sees, bool (seq_q, seq_k): -left <= j - (i + seq_k - seq_q) <= right, -1 lifts a limit."""
    distance = torch.arange(seq_k, device=device) - torch.arange(seq_q, device=device)[:, None] - (seq_k - seq_q)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if window_left >= 0:
        seen &= distance >= -window_left
    if window_right >= 0:
        seen &= distance <= window_right
    return seen


def _one(q, k, v, scale, window_left, window_right, softcap, slopes, keep, keep_scale):
    """q (batch, seq_q, heads, head_dim), k and v (batch, seq_k, heads, head_dim) -> out, lse, probabilities."""
    seq_q, seq_k = q.shape[1], k.shape[1]
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        distance = torch.arange(seq_q, device=q.device)[:, None] + seq_k - seq_q - torch.arange(seq_k, device=q.device)
        scores = scores - slopes.to(scores.dtype)[..., None, None] * distance.abs().to(scores.dtype)
    hidden = ~visible(seq_q, seq_k, window_left, window_right, q.device)
    empty = hidden.all(-1) if seq_k else torch.ones(seq_q, dtype=torch.bool, device=q.device)
    # A row without keys takes scores of 0 while it is differentiated, so that no NaN arises, and is then set.
    scores = scores.masked_fill(hidden & ~empty[:, None], float("-inf")).masked_fill(empty[:, None], 0.0)
    lse = scores.logsumexp(-1).masked_fill(empty, float("-inf"))
    p = scores.softmax(-1).masked_fill(empty[:, None], 0.0)
    dropped = p if keep is None else p * keep * keep_scale
    return torch.einsum("bhij,bjhd->bihd", dropped, v), lse, p


def attention_reference(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    *,
    seqused_k=None,
    leftpad_k=None,
    scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    dropout_p=0.0,
    rng_state=None,
    dtype=None,
):
    """Exact attention, one score matrix per sequence; every feature of the kernels, in q's dtype or `dtype`.

    Dense: q (batch, seq_q, heads, head_dim), k and v (batch, seq_k, kv_heads, head_dim); packed with cu_seqlens:
    without batch and with all tokens in a row. Returns out (like q) and lse (batch, heads, seq_q) or (heads, total_q).
    Rows without visible keys, and rows past cu_seqlens[-1], give out 0; the former lse -inf.
    """
    dtype = q.dtype if dtype is None else dtype
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    packed = cu_seqlens_q is not None
    heads, batch = q.shape[-2], len(cu_seqlens_q) - 1 if packed else q.shape[0]
    left, right = window_size
    if causal:
        right = 0
    out, lse = [], []
    for b in range(batch):
        q_b = q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]] if packed else q[b]
        k_start = int(cu_seqlens_k[b]) if cu_seqlens_k is not None else 0
        k_stop = int(cu_seqlens_k[b + 1]) if cu_seqlens_k is not None else k.shape[1]
        if seqused_k is not None:
            k_stop = k_start + int(seqused_k[b])
        if leftpad_k is not None:
            k_start = min(k_start + int(leftpad_k[b]), k_stop)
        k_b, v_b = (x[k_start:k_stop] if cu_seqlens_k is not None else x[b, k_start:k_stop] for x in (k, v))
        k_b, v_b = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k_b, v_b))
        slopes = None
        if alibi_slopes is not None:
            slopes = alibi_slopes[b] if alibi_slopes.dim() == 2 else alibi_slopes
        keep = None
        if dropout_p > 0:
            keep = dropout_keep(rng_state, dropout_p, range(b, b + 1), heads, range(len(q_b)), range(len(k_b)))
        keep_scale = 1.0 / (1.0 - dropout_p)
        o, s, _ = _one(q_b[None], k_b[None], v_b[None], scale, left, right, softcap, slopes, keep, keep_scale)
        out.append(o[0])
        lse.append(s[0])
    if not packed:
        return torch.stack(out), torch.stack(lse)
    tail = q.shape[0] - int(cu_seqlens_q[-1])
    out.append(q[:tail] * 0.0)
    lse.append(torch.zeros(heads, tail, dtype=lse[0].dtype, device=q.device))
    return torch.cat(out), torch.cat(lse, dim=1)


def rotate(x, cos, sin, positions, interleaved):
    """Rotary embedding of the first 2 * cos.shape[-1] columns of x (batch, seq, heads, head_dim).

    cos and sin (rows, rotary_dim / 2), positions (batch, seq) rows of them. interleaved: pairs (0, 1), (2, 3), …
    (GPT-J); else the first half pairs with the second (GPT-NeoX, Llama).
    """
    half = cos.shape[-1]
    cos, sin = (t[positions][:, :, None].to(torch.float32 if x.dtype != torch.float64 else x.dtype) for t in (cos, sin))
    turned, rest = x[..., : 2 * half].to(cos.dtype), x[..., 2 * half :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    first, second = a * cos - b * sin, a * sin + b * cos
    turned = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def append(k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, block_table):
    """Writes k and v (batch, seq_new, kv_heads, head_dim) into the cache behind cache_seqlens, without a sync."""
    positions = cache_seqlens.long()[:, None] + torch.arange(k.shape[1], device=k.device)
    if block_table is not None:
        rows, positions = (
            block_table.long().gather(1, positions // k_cache.shape[1]),
            positions % k_cache.shape[1],
        )
    elif cache_batch_idx is not None:
        rows = cache_batch_idx.long()[:, None]
    else:
        rows = torch.arange(k.shape[0], device=k.device)[:, None]
    k_cache[rows, positions] = k
    v_cache[rows, positions] = v


def rotate_and_append(
    q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, block_table,
    window_left, window_right, rotary_interleaved,
):  # fmt: skip
    """The first half of decode in plain PyTorch; returns (rotated q, keys in use or None for all).

    rotary_cos, rotary_sin: (positions, rotary_dim / 2), or (batch, seq_new, rotary_dim / 2) for the new tokens.
    """
    if k is None:
        return q, cache_seqlens
    if rotary_cos is not None and rotary_cos.dim() == 3:
        own = torch.arange(rotary_cos.shape[:2].numel(), device=q.device).view(rotary_cos.shape[:2])
        tables = rotary_cos.flatten(0, 1), rotary_sin.flatten(0, 1)
        k, q = (rotate(x, *tables, own, rotary_interleaved) for x in (k, q))
    elif rotary_cos is not None:
        start = cache_seqlens.long()[:, None]  # rows of the cache, left padding included
        k = rotate(k, rotary_cos, rotary_sin, start + torch.arange(k.shape[1], device=k.device), rotary_interleaved)
        # As in flash-attn: with a causal or local mask each query has its own position, else all share the first.
        steps = torch.arange(q.shape[1], device=q.device) * (window_left >= 0 or window_right >= 0)
        q = rotate(q, rotary_cos, rotary_sin, start + steps, rotary_interleaved)
    append(k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, block_table)
    return q, cache_seqlens + k.shape[1]
