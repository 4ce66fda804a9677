"""flash_attn_with_kvcache: append, rotary, lengths, left padding, pages, in place."""

import pytest
import torch
from oracle import assert_close, make

import hf_flash
from hf_flash.reference import attention_reference


def junk(shape, backend, value=float("nan")):
    return torch.full(shape, value, dtype=backend.dtypes[0], device=backend.device)


def turn(x, cos, sin, first, interleaved):
    """Rotary embedding written out pair by pair: x (seq, heads, head_dim), row i at position first + i."""
    out, half = x.double().clone(), cos.shape[1]
    for i in range(x.shape[0]):
        for j in range(half):
            a, b = (2 * j, 2 * j + 1) if interleaved else (j, j + half)
            c, s = cos[first + i, j].double(), sin[first + i, j].double()
            out[i, :, a] = x[i, :, a].double() * c - x[i, :, b].double() * s
            out[i, :, b] = x[i, :, a].double() * s + x[i, :, b].double() * c
    return out.to(x.dtype)


CASES = {
    "plain": dict(),
    "causal": dict(causal=True, seq_q=3),
    "append": dict(new=1, causal=True),
    "append several": dict(new=5, seq_q=5, causal=True),
    "more queries than appended": dict(new=2, seq_q=4, causal=True),
    "rotary halves": dict(new=2, seq_q=2, causal=True, rotary=32, interleaved=False),
    "rotary pairs": dict(new=2, seq_q=2, causal=True, rotary=16, interleaved=True),
    "rotary, all queries at one position": dict(new=2, seq_q=2, rotary=32, interleaved=True),
    "window": dict(seq_q=2, window_size=(9, 0)),
    "softcap and alibi": dict(softcap=4.0, alibi=True, causal=True, new=1),
    "left padding": dict(leftpad=True, causal=True, new=1, seq_q=1),
    "rows": dict(rows=True, new=1, causal=True),
    "pages": dict(page=16, new=3, seq_q=3, causal=True),
    "pages and rotary": dict(page=16, new=1, causal=True, rotary=32, interleaved=False),
    "heads first": dict(heads_first=True, new=1, causal=True),
    "one head for all": dict(kv_heads=1, new=1, causal=True),
    "many queries": dict(new=100, seq_q=100, causal=True, rotary=16, interleaved=True),
    "odd head dim": dict(head_dim=60, new=2, seq_q=2, causal=True),
    "splits": dict(new=1, causal=True, num_splits=3),
}


@pytest.mark.parametrize(
    "name, lengths",
    [(name, "ragged") for name in CASES]
    + [(name, lengths) for name in ("plain", "append", "append several") for lengths in ("equal", "int")]
    + [("plain", "all")],
)
def test_append_and_attend_match_the_oracle(backend, name, lengths):
    """Rows 1, 60, 61, 62, 65: slots past the lengths hold NaN; the cache changes only where rows are appended."""
    c = dict(seq_q=1, new=0, head_dim=64, kv_heads=2, heads=4, rotary=0, page=0)
    c.update(CASES[name])
    batch, capacity, new, d = 3, 160, c["new"], c["head_dim"]
    used = {"ragged": [50, 7, 33], "equal": [20] * 3, "int": [20] * 3, "all": [capacity] * 3}[lengths]
    leftpad = [4, 0, 30] if c.get("leftpad") else [0] * batch
    rows = [3, 0, 2] if c.get("rows") else list(range(batch))
    keys, values = ([make((n, c["kv_heads"], d), backend.dtypes[0], backend.device) for n in used] for _ in "kv")
    shape = (5, capacity, c["kv_heads"], d)
    if c["page"]:
        table = torch.randperm(40, device=backend.device)[: batch * 10].view(batch, 10).to(torch.int32)
        shape = (40, 16, c["kv_heads"], d)
    elif not c.get("rows"):
        shape = (batch, *shape[1:])
    if c.get("heads_first"):
        caches = [junk((shape[0], shape[2], shape[1], d), backend).transpose(1, 2) for _ in "kv"]
    else:
        caches = [junk(shape, backend) for _ in "kv"]

    def slot(b, i):
        return (table[b, i // 16], i % 16) if c["page"] else (rows[b], i)

    for b in range(batch):
        for cache, full in zip(caches, (keys, values)):
            for i in range(leftpad[b], used[b]):
                cache[slot(b, i)] = full[b][i]
    q = make((batch, c["seq_q"], c["heads"], d), backend.dtypes[0], backend.device)
    k, v = (make((batch, new, c["kv_heads"], d), backend.dtypes[0], backend.device) if new else None for _ in "kv")
    arguments = {x: c[x] for x in ("causal", "window_size", "softcap", "num_splits") if x in c}
    expected_q, expected_k = q.clone(), k
    if c["rotary"]:
        angles = torch.rand(capacity, c["rotary"] // 2, device=backend.device) * 6
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        arguments.update(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=c["interleaved"])
        expected_k = torch.stack([turn(k[b], cos, sin, used[b], c["interleaved"]) for b in range(batch)])
        for b in range(batch):
            for i in range(c["seq_q"]):
                at = used[b] + (i if c.get("causal") else 0)
                expected_q[b, i : i + 1] = turn(q[b, i : i + 1], cos, sin, at, c["interleaved"])
    if c.get("alibi"):
        arguments["alibi_slopes"] = torch.rand(c["heads"], device=backend.device)
    before = [cache.clone() for cache in caches]
    integers = dict(dtype=torch.int32, device=backend.device)
    given = {"all": None, "int": used[0]}.get(lengths, torch.tensor(used, **integers))
    out, lse = hf_flash.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=given,
        cache_batch_idx=torch.tensor(rows, **integers) if c.get("rows") else None,
        cache_leftpad=torch.tensor(leftpad, **integers) if c.get("leftpad") else None,
        block_table=table if c["page"] else None, return_softmax_lse=True, **arguments,
    )  # fmt: skip
    for cache, old, appended in zip(caches, before, (expected_k, v)):
        for b in range(batch):
            for i in range(new):
                stored = cache[slot(b, used[b] + i)]
                torch.testing.assert_close(stored, appended[b, i], rtol=2e-2 if c["rotary"] else 0, atol=1e-2)
                cache[slot(b, used[b] + i)] = old[slot(b, used[b] + i)]
        assert torch.equal(cache.nan_to_num(7.25), old.nan_to_num(7.25)), "other slots changed"
    features = {x: arguments[x] for x in ("causal", "window_size", "softcap", "alibi_slopes") if x in arguments}
    for b in range(batch):
        k_b, v_b = (
            torch.cat([full[b][leftpad[b] :], *([extra[b]] if new else [])])[None]
            for full, extra in ((keys, expected_k), (values, v))
        )
        results = [
            attention_reference(expected_q[b : b + 1], k_b, v_b, dtype=dtype, **features)
            for dtype in (torch.float64, q.dtype)
        ]
        assert_close((out[b : b + 1], lse[b : b + 1]), *results, ("out", "lse"))


def uniform(backend, values, seq_q=1, **arguments):
    """q = k = 0: the mean of the values seen. values (batch, slots)."""
    v = torch.tensor(values, dtype=backend.dtypes[0], device=backend.device)[:, :, None, None].expand(-1, -1, 1, 64)
    q = torch.zeros(len(values), seq_q, 1, 64, dtype=v.dtype, device=v.device)
    out = hf_flash.flash_attn_with_kvcache(q, torch.zeros_like(v), v.contiguous(), **arguments)
    return out[..., 0, 0].flatten().tolist()


def test_unused_slots_of_a_static_cache_are_not_seen(backend):
    """Row 62: 16 slots, 5 in use, junk of 1000 in the rest."""
    assert uniform(backend, [[0, 1, 2, 3, 4] + [1000] * 11], cache_seqlens=5) == [2.0]


def test_left_padding_of_a_cache_is_not_seen(backend):
    """Row 61: two pads, cached 2 to 4."""
    pad = torch.tensor([2], dtype=torch.int32, device=backend.device)
    assert uniform(backend, [[0, 1, 2, 3, 4]], cache_leftpad=pad) == [3.0]


def test_several_new_tokens_are_aligned_to_the_end(backend):
    """Row 65: two new tokens on three cached."""
    assert uniform(backend, [[0, 1, 2, 3, 4] + [1000] * 3], 2, cache_seqlens=5, causal=True) == [1.5, 2.0]


def test_an_append_without_room_is_refused(backend):
    """Row 40: eight slots, eight used; neighbours stay as they were."""
    memory = torch.zeros(3, 8, 1, 64, dtype=backend.dtypes[0], device=backend.device)
    cache, new = memory[1:2], torch.ones(1, 1, 1, 64, dtype=memory.dtype, device=memory.device)
    with pytest.raises(ValueError, match="cache_seqlens 8 and 1 new keys do not fit the cache's 8 slots"):
        hf_flash.flash_attn_with_kvcache(new, cache, cache.clone(), new, new, cache_seqlens=8)
    lengths = torch.tensor([8], dtype=torch.int32, device=backend.device)
    if backend.name == "cpu":  # a length on a GPU cannot be read without waiting; there the row is dropped
        with pytest.raises(ValueError, match="do not fit the cache's 8 slots"):
            hf_flash.flash_attn_with_kvcache(new, cache, cache.clone(), new, new, cache_seqlens=lengths)
    else:
        hf_flash.flash_attn_with_kvcache(new, cache, cache.clone(), new, new, cache_seqlens=lengths)
    assert not memory.any()


@pytest.mark.parametrize("seq_q", [1, 3])
def test_a_row_does_not_depend_on_the_others_of_its_batch(backend, seq_q):
    """Row 52: alone and in a batch of 33, bit-equal."""
    batch = 33 if backend.name != "emulated" else 5
    lengths = torch.randint(1, 1000 if backend.name != "emulated" else 300, (batch,), dtype=torch.int32)
    lengths[3] = int(lengths.max())
    lengths = lengths.to(backend.device)
    q = make((batch, seq_q, 8, 64), backend.dtypes[0], backend.device)
    cache = [make((batch, 1000, 2, 64), q.dtype, q.device) for _ in "kv"]
    together = hf_flash.flash_attn_with_kvcache(q, *cache, cache_seqlens=lengths, causal=True)
    for b in (0, 3, batch - 1):
        one = slice(b, b + 1)
        alone = hf_flash.flash_attn_with_kvcache(
            q[one], *(x[one] for x in cache), cache_seqlens=lengths[one], causal=True
        )
        assert torch.equal(alone[0], together[b])


def test_a_cache_step_by_step_equals_all_at_once(backend):
    """Row 60: 24 tokens appended one by one give the rows of one causal call."""
    q, k, v = (make((2, 24, 2, 64), backend.dtypes[0], backend.device) for _ in range(3))
    caches = [junk((2, 32, 2, 64), backend) for _ in "kv"]
    steps = [
        hf_flash.flash_attn_with_kvcache(
            q[:, i : i + 1], *caches, k[:, i : i + 1], v[:, i : i + 1], cache_seqlens=i, causal=True
        )
        for i in range(24)
    ]
    whole = hf_flash.flash_attn_func(q, k, v, causal=True)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding_at_far_positions(backend, interleaved):
    """Row 80: position 32 000 turns by its own angle, not by one that low precision rounded."""
    at, half = 32_000, 16
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(at + 2, dtype=torch.float64)[:, None] * frequencies
    cos, sin = (x.to(backend.device, torch.float32) for x in (angles.cos(), angles.sin()))
    cache = [torch.zeros(1, at + 2, 1, 64, dtype=backend.dtypes[0], device=backend.device) for _ in "kv"]
    q, k, v = (make((1, 2, 1, 64), backend.dtypes[0], backend.device) for _ in range(3))
    hf_flash.flash_attn_with_kvcache(
        q, *cache, k, v, cos, sin, cache_seqlens=at, causal=True, rotary_interleaved=interleaved, window_size=(8, 0)
    )
    expected = turn(k[0], cos, sin, at, interleaved)
    torch.testing.assert_close(cache[0][0, at:], expected, rtol=2e-2, atol=2e-2)
    assert (expected - turn(k[0], cos, sin, at - 1, interleaved)).abs().max() > 0.1
