"""flash_attn_with_kvcache: attention over a cache, contiguous or in pages, appending to it first."""

import torch

from . import checks, ops


def _rotary(cos, sin, q, k, head_dim, positions):
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos and rotary_sin: give both or neither")
    if cos is None:
        return None, None
    if k is None:
        raise ValueError("rotary_cos is given without k: rotary embedding applies to keys that are being appended")
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if x.dim() != 2 or 2 * x.shape[1] > head_dim or x.shape != cos.shape:
            raise ValueError(f"{name} {tuple(x.shape)} must be (positions, rotary_dim / 2), rotary_dim <= {head_dim}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}: move it once with .to(q.device)")
        if x.shape[0] < positions:
            raise ValueError(
                f"{name} has {x.shape[0]} rows: it must have {positions}: one for each slot of the cache and query "
                "beyond the keys that are appended"
            )
    return cos.to(q.dtype).contiguous(), sin.to(q.dtype).contiguous()


def _capacity(k_cache, block_table):
    return k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])


def _lengths(cache_seqlens, q, k, capacity):
    """cache_seqlens as int32 (batch) or None; checked where the host knows the values."""
    new = 0 if k is None else k.shape[1]
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("cache_seqlens is None: with k the cache's lengths must be known, as an int or a tensor")
        return None
    if isinstance(cache_seqlens, int):
        if cache_seqlens < 0 or cache_seqlens + new > capacity:
            raise ValueError(
                f"cache_seqlens {cache_seqlens} and {new} new keys do not fit the cache's {capacity} slots: "
                "allocate a larger cache"
            )
        return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    cache_seqlens = checks.indices(cache_seqlens, "cache_seqlens", q.device).contiguous()
    if cache_seqlens.shape != (q.shape[0],):
        raise ValueError(f"cache_seqlens {tuple(cache_seqlens.shape)} must be (batch,) = ({q.shape[0]},)")
    return cache_seqlens


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """Attention of a few new queries over a key/value cache; k and v, where given, are first written into the cache.

    Args:
        q: (batch, seq_q, heads, head_dim).
        k_cache, v_cache: (cache_batch, capacity, kv_heads, head_dim), or with block_table (num_pages, page_size,
            kv_heads, head_dim). Any strides; written in place at cache_seqlens.
        k, v: (batch, seq_new, kv_heads, head_dim), appended.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2): k, and q, are rotated as they are read. Position of a new
            key: its row in the cache, left padding included. With causal or a window each query has its own position,
            otherwise all have the first.
        cache_seqlens: int or (batch,) int32: keys in the cache before the append. None: all of it.
        cache_batch_idx: (batch,) int32: the row of the cache that serves each row of q.
        cache_leftpad: (batch,) int32: keys to skip at the start of each row.
        block_table: (batch, pages) int32: the pages of each row, in order.
        rotary_interleaved: pairs (0, 1), (2, 3), … (GPT-J) or the two halves (GPT-NeoX, Llama).
        num_splits: into how many parts the keys are split; 0 chooses by the length.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in `flash_attn_func`. Alignment is bottom-right
            over the keys in use: the last query sees the last key.
        return_softmax_lse: return (out, softmax_lse), softmax_lse (batch, heads, seq_q) fp32.

    What lies on a GPU is not read by the host, which would have to wait for it. Lengths and left padding that a cache
    cannot have are taken as the nearest that it can, and keys without room are dropped; entries of cache_batch_idx and
    block_table must name rows and pages that exist. On the CPU all of these raise. Either way a slot that is appended
    must not be read by another row of the same call.

    Returns:
        out like q. There is no gradient.

    Raises:
        ValueError: also where the cache is too short for what is appended, if the host can know that without waiting.
    """
    q = checks.autocast(q)[0]
    if block_table is not None:
        block_table = checks.paged(q, k_cache, v_cache, block_table)
        checks.rows(block_table, "block_table", q.shape[0])
    elif cache_batch_idx is None:
        checks.dense(q, k_cache, v_cache)
    else:
        checks.dense(q, k_cache[:1].expand(q.shape[0], -1, -1, -1), v_cache[:1].expand(q.shape[0], -1, -1, -1))
    batch, _, heads, head_dim = q.shape
    if (k is None) != (v is None):
        raise ValueError("k and v: give both or neither")
    if k is not None:
        k, v = checks.autocast(k, v)
        checks.dense(q, k, v)
        if k.shape[2] != k_cache.shape[2]:
            raise ValueError(f"k {tuple(k.shape)} has other kv_heads than k_cache {tuple(k_cache.shape)}")
    capacity = _capacity(k_cache, block_table)
    left, right = checks.window(window_size, causal)
    own = (left >= 0 or right >= 0) and k is not None
    positions = capacity + (max(0, q.shape[1] - k.shape[1]) if own else 0)
    rotary_cos, rotary_sin = _rotary(rotary_cos, rotary_sin, q, k, head_dim, positions)
    _, softcap, scale = checks.scalars(0.0, softcap, softmax_scale, head_dim)
    num_splits = checks.integer(num_splits, "num_splits", "how many parts, 0 to choose by the length")
    cache_seqlens = _lengths(cache_seqlens, q, k, capacity)
    if cache_batch_idx is not None:
        if block_table is not None:
            raise ValueError("cache_batch_idx and block_table: give one; the table already says where each row lies")
        cache_batch_idx = checks.indices(cache_batch_idx, "cache_batch_idx", q.device, (batch,), k_cache.shape[0])
    if cache_leftpad is not None:
        cache_leftpad = checks.indices(cache_leftpad, "cache_leftpad", q.device, (batch,), capacity + 1)
    if alibi_slopes is not None:
        alibi_slopes = checks.alibi(alibi_slopes, heads, batch, q.device)
    with torch.no_grad():
        out, lse = ops.decode(
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
            block_table, alibi_slopes, scale, left, right, softcap, rotary_interleaved, num_splits,
        )  # fmt: skip
    return (out, lse) if return_softmax_lse else out
