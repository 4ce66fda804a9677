"""flash_attn_with_kvcache's kernel, csrc/portable/decode.cu, on a GPU and in the emulator, against fp64 attention."""

import ctypes
import math
import shutil

import pytest
import torch
from emulator import build

from hf_flash import flash_attn_with_kvcache, library

EMULATED_TILES = (64, 80, 128)


@pytest.fixture(scope="module", params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, tmp_path_factory):
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
        yield "cuda"
        return
    if shutil.which("g++") is None or not (build.cuda_include() / "cuda_bf16.h").exists():
        pytest.skip("needs g++ and CUDA headers")
    output = build.DEFAULT_OUTPUT.with_name("libhf_flash_decode.so")
    build.build(output, EMULATED_TILES, ("portable/decode", "portable/forward"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_FLASH_LIBRARY", str(output))
        patch.setenv("HF_FLASH_EMULATED_CAPABILITY", "80")
        library.reload()
        yield "cpu"
    library.reload()


def rotate(x, cos, sin, positions, interleaved):
    """x (rows, heads, head_dim), positions (rows); in the arithmetic of cos's dtype, fp32 or wider."""
    half = cos.shape[1]
    c, s = cos[positions][:, None], sin[positions][:, None]
    out = x.to(c.dtype).clone()
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = out[..., first].clone(), out[..., second].clone()
    out[..., first], out[..., second] = a * c - b * s, a * s + b * c
    return out


class Case:
    """Random arguments of one call, NaN wherever nothing may be read, and what plain attention makes of them."""

    def __init__(
        self, device, lengths, heads=4, kv_heads=2, head_dim=64, seq_q=1, seq_new=0, capacity=None,
        dtype=torch.bfloat16, page_size=None, leftpad=None, shuffled=False, rotary_dim=0, interleaved=True,
        causal=False, window=(-1, -1), softcap=0.0, alibi=False, num_splits=0, scale=None,
    ):  # fmt: skip
        self.lengths, self.seq_q, self.seq_new, self.heads, self.kv_heads = lengths, seq_q, seq_new, heads, kv_heads
        self.leftpad = leftpad or [0] * len(lengths)
        self.causal, self.window, self.softcap = causal, window, softcap
        self.scale = scale or head_dim**-0.5
        batch = len(lengths)
        capacity = capacity or max(lengths) + seq_new

        def normal(*shape):
            return torch.randn(*shape, device=device).to(dtype)

        self.q = normal(batch, seq_q, heads, head_dim)
        self.k, self.v = (normal(batch, seq_new, kv_heads, head_dim) for _ in "kv")
        self.keys, self.values = (
            [normal(n - pad, kv_heads, head_dim) for n, pad in zip(lengths, self.leftpad)] for _ in "kv"
        )
        self.page_size, self.table = page_size, None
        if page_size:
            pages = -(-capacity // page_size)
            self.table = torch.randperm(batch * pages + 3, device=device)[: batch * pages].view(batch, pages).int()
            shape = (batch * pages + 3, page_size, kv_heads, head_dim)
        else:
            shape = (batch + 2 * shuffled, capacity, kv_heads, head_dim)
        self.rows = torch.randperm(batch + 2, device=device)[:batch].int() if shuffled else None
        # Every second head of a wider buffer: strides that no dense cache has.
        self.k_cache, self.v_cache = (
            torch.full((*shape[:2], 2 * kv_heads, head_dim), math.nan, device=device, dtype=dtype)[:, :, ::2]
            for _ in "kv"
        )
        for cache, parts in ((self.k_cache, self.keys), (self.v_cache, self.values)):
            for b, part in enumerate(parts):
                for i, row in enumerate(part):
                    self.slot(cache, b, self.leftpad[b] + i).copy_(row)
        self.cos = self.sin = None
        if rotary_dim:
            angles = torch.rand(capacity + (page_size or 0) + seq_q, rotary_dim // 2, device=device) * 7
            self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.interleaved = interleaved
        self.slopes = torch.rand(batch, heads, device=device) if alibi else None
        self.num_splits = num_splits

    def slot(self, cache, b, i):
        if self.page_size:
            return cache[self.table[b, i // self.page_size], i % self.page_size]
        return cache[b if self.rows is None else self.rows[b], i]

    def run(self, batch=None):
        """Calls the function, for one sequence of the batch or for all; returns out, lse."""
        at = slice(None) if batch is None else slice(batch, batch + 1)
        new = self.seq_new > 0
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=self.q.device)
        rows = self.rows
        if rows is None and not self.page_size:
            rows = torch.arange(len(self.lengths), dtype=torch.int32, device=self.q.device)
        pad = torch.tensor(self.leftpad, dtype=torch.int32, device=self.q.device)
        return flash_attn_with_kvcache(
            self.q[at], self.k_cache, self.v_cache, k=self.k[at] if new else None, v=self.v[at] if new else None,
            rotary_cos=self.cos, rotary_sin=self.sin, cache_seqlens=lengths[at],
            cache_batch_idx=None if self.page_size else rows[at], cache_leftpad=pad[at] if any(self.leftpad) else None,
            block_table=None if self.table is None else self.table[at], causal=self.causal, window_size=self.window,
            softcap=self.softcap, softmax_scale=self.scale, rotary_interleaved=self.interleaved,
            alibi_slopes=None if self.slopes is None else self.slopes[at], num_splits=self.num_splits,
            return_softmax_lse=True,
        )  # fmt: skip

    def plain(self, dtype):
        """Plain attention in dtype: out, lse, and the keys that the append must have written (in the cache's dtype)."""
        outs, lses, appended = [], [], []
        left, right = self.window
        if self.causal:
            right = 0
        for b, length in enumerate(self.lengths):
            q, k = self.q[b], self.k[b]
            if self.cos is not None:
                cos, sin = self.cos.float(), self.sin.float()
                steps = torch.arange(self.seq_q, device=q.device) * (left >= 0 or right >= 0)
                q = rotate(q, cos, sin, length + steps, self.interleaved).to(self.q.dtype)
                positions = length + torch.arange(self.seq_new, device=q.device)
                k = rotate(k, cos, sin, positions, self.interleaved).to(self.q.dtype)
            appended.append(k)
            group = self.heads // self.kv_heads
            k = torch.cat((self.keys[b], k)).to(dtype).repeat_interleave(group, 1)
            v = torch.cat((self.values[b], self.v[b])).to(dtype).repeat_interleave(group, 1)
            scores = torch.einsum("ihd,jhd->hij", q.to(dtype), k) * self.scale
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            i = torch.arange(self.seq_q, device=q.device)[:, None] + len(k) - self.seq_q
            j = torch.arange(len(k), device=q.device)
            if self.slopes is not None:
                scores = scores - (self.slopes[b, :, None, None] * (i - j).abs()).to(dtype)
            hidden = (j - i < -left if left >= 0 else torch.zeros_like(j - i, dtype=torch.bool)) | (
                j - i > right if right >= 0 else torch.zeros_like(j - i, dtype=torch.bool)
            )
            scores = scores.masked_fill(hidden, -math.inf)
            lses.append(torch.logsumexp(scores, -1))
            weights = torch.softmax(scores, -1).nan_to_num(0.0)
            outs.append(torch.einsum("hij,jhd->ihd", weights, v))
        return torch.stack(outs), torch.stack(lses), appended

    def check(self):
        out, lse = self.run()
        exact, exact_lse, appended = self.plain(torch.float64)
        peer = self.plain(self.q.dtype)[0]
        allowed = 2 * (peer.double() - exact).abs().max().item() + 1e-5
        assert (out.double() - exact).abs().max().item() <= allowed
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)
        for b, length in enumerate(self.lengths):
            for i in range(self.seq_new):
                assert torch.equal(self.slot(self.k_cache, b, length + i), appended[b][i])
                assert torch.equal(self.slot(self.v_cache, b, length + i), self.v[b, i])


FEATURES = {
    "none": {},
    "append, rotary halves": dict(seq_q=2, seq_new=2, rotary_dim=16, interleaved=False, causal=True),
    "pages, rotary pairs": dict(page_size=16, seq_new=1, rotary_dim=32, causal=True),
    "left padding, chosen rows": dict(leftpad=[5, 0, 17], shuffled=True, seq_new=1),
    "window, softcap": dict(seq_q=4, window=(16, 3), softcap=5.0),
    "alibi, splits": dict(seq_q=3, alibi=True, causal=True, num_splits=2),
    "one head for all": dict(heads=8, kv_heads=1),
}


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("head_dim", [64, 72, 128, pytest.param(32, marks=pytest.mark.gpu), *(
    pytest.param(d, marks=pytest.mark.gpu) for d in (80, 96, 112, 160, 192, 256)
)])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_head_dim_and_dtype_with_every_feature(device, head_dim, dtype, name):
    if device == "cpu" and head_dim not in (64, 72, 128):
        pytest.skip("not compiled for the emulator")
    lengths = [37, 1, 300] if "splits" in name else [37, 1, 64]
    Case(device, lengths, head_dim=head_dim, dtype=dtype, **FEATURES[name]).check()


@pytest.mark.parametrize(
    "heads, kv_heads, seq_q", [(2, 2, 1), (8, 1, 1), (6, 2, 5), (40, 1, 1), (4, 2, 33), (3, 1, 23)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_groups_of_heads_and_several_queries(device, heads, kv_heads, seq_q, causal):
    Case(device, [70, 40], heads=heads, kv_heads=kv_heads, seq_q=seq_q, causal=causal).check()


@pytest.mark.parametrize("num_splits", [0, 1, 2, 7])
def test_splits(device, num_splits):
    Case(device, [300, 700, 256, 257, 0, 1], num_splits=num_splits).check()


def test_many_splits_with_a_long_sequence(device):
    Case(device, [4200, 5], heads=2, kv_heads=1, capacity=9000, seq_q=2, causal=True).check()


@pytest.mark.parametrize("page_size", [1, 7, 16, 256])
def test_pages(device, page_size):
    Case(device, [100, 33, 260], page_size=page_size, seq_new=2, seq_q=2, causal=True).check()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [64, 32, 20])
@pytest.mark.parametrize("causal", [False, True])
def test_append_with_rotary(device, interleaved, rotary_dim, causal):
    Case(
        device, [30, 0, 300], seq_q=3, seq_new=3, rotary_dim=rotary_dim, interleaved=interleaved, causal=causal
    ).check()


def test_left_padding_and_rows_of_the_cache(device):
    Case(device, [30, 300, 9], leftpad=[5, 17, 0], shuffled=True, seq_q=2, seq_new=2, causal=True).check()


@pytest.mark.parametrize("window", [(16, 0), (0, 0), (300, -1), (20, 5), (-1, 3)])
def test_windows(device, window):
    Case(device, [90, 600], window=window, seq_q=4).check()


@pytest.mark.parametrize(
    "options", [{"softcap": 15.0}, {"alibi": True}, {"softcap": 5.0, "alibi": True}, {"scale": -0.2}]
)
def test_what_is_done_to_scores(device, options):
    Case(device, [90, 300], seq_q=3, causal=True, **options).check()


def test_queries_before_the_first_key_get_zero(device):
    case = Case(device, [2, 0], seq_q=4, causal=True)
    case.check()
    out, lse = case.run()
    assert not out[0, :2].any() and not out[1].any()
    assert (lse[0, :, :2] == -math.inf).all() and (lse[1] == -math.inf).all()


@pytest.mark.parametrize("causal", [False, True])
def test_a_sequence_gives_the_same_bits_alone_and_in_a_batch(device, causal):
    case = Case(device, [300, 5, 1100], heads=4, kv_heads=2, seq_q=2, causal=causal, capacity=5000)
    out, lse = case.run()
    for b in range(3):
        alone, alone_lse = case.run(b)
        assert torch.equal(alone[0], out[b]) and torch.equal(alone_lse[0], lse[b])


@pytest.mark.parametrize("seq_q, num_splits", [(1, 0), (9, 0), (1, 11)])
def test_one_block_for_several_splits_changes_no_bits(device, seq_q, num_splits):
    """A batch that fills the GPU many times gets few blocks for a sequence; one sequence gets one for each split."""
    lengths = [1900, 300, 0, 1100, 257, 2048] * (1 if device == "cpu" else 40)
    case = Case(device, lengths, heads=8, kv_heads=4, seq_q=seq_q, causal=True, num_splits=num_splits)
    case.check()
    out, lse = case.run()
    for b in range(6):
        alone, alone_lse = case.run(b)
        assert torch.equal(alone[0], out[b]) and torch.equal(alone_lse[0], lse[b])


@pytest.mark.parametrize("order", [-1, 1, 2])
def test_the_order_of_threads_does_not_matter(device, order, monkeypatch):
    if device != "cpu":
        pytest.skip("the emulator's threads run in an order that can be chosen")
    case = Case(device, [300, 90], heads=6, head_dim=128, seq_q=3, seq_new=3, rotary_dim=64, causal=True)
    expected = case.run()
    monkeypatch.setenv("HF_FLASH_EMULATED_ORDER", str(order))
    for a, b in zip(case.run(), expected):
        assert torch.equal(a, b)


# Two tiles of rows and several splits; new keys that no query sees any more; pages.
STEPS = {
    "several splits": dict(lengths=[700, 90, 0], heads=6, seq_q=7, seq_new=7, rotary_dim=64, causal=True),
    "hidden keys": dict(lengths=[300, 20], seq_q=2, seq_new=9, window=(2, 0)),
    "pages": dict(lengths=[257, 600], page_size=16, seq_q=1, seq_new=1, rotary_dim=32, interleaved=False),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_order_of_blocks_does_not_matter(device, name, monkeypatch):
    if device != "cpu":
        pytest.skip("the emulator's blocks run in an order that can be chosen")
    case = Case(device, **STEPS[name])
    empty = case.k_cache.clone(), case.v_cache.clone()
    expected = *case.run(), case.k_cache.clone(), case.v_cache.clone()
    case.k_cache.copy_(empty[0]), case.v_cache.copy_(empty[1])
    monkeypatch.setenv("HF_FLASH_EMULATED_BLOCKS", "-1")
    for a, b in zip((*case.run(), case.k_cache, case.v_cache), expected):
        assert torch.equal(a.nan_to_num(7.25), b.nan_to_num(7.25))


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_one_launch_and_leaves_its_counters_at_zero(device, name):
    case = Case(device, **STEPS[name])
    case.check()
    if device == "cpu":
        launches = ctypes.c_int64.in_dll(library._loaded(), "hf_emulated_launches")
        before = launches.value
    results = [case.run() for _ in range(2)]  # the splits of a second step would not meet in counters that are not zero
    if device == "cpu":
        assert launches.value == before + 2
    case.check()
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_a_launch_that_gets_no_counters_clears_its_own(device, monkeypatch, poisoned):
    """The handle that stands for a stream of every thread has none."""
    case, run = Case(device, **STEPS["several splits"]), library._run
    expected = case.run()
    monkeypatch.setattr(library, "_run", lambda *arguments: run(*arguments[:-1], 2))
    if device == "cuda":
        torch.cuda.synchronize()
    found = case.run()
    if device == "cuda":
        torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize("seq_new", [0, 1])
def test_lengths_that_no_cache_has_are_taken_as_empty_or_full(device, seq_new):
    """The host cannot know lengths on a GPU: what lies outside a row of the cache is neither read nor written."""
    full = 40 + seq_new
    case = Case(device, [40, 40, 40], seq_new=seq_new, capacity=full)
    case.check()
    results = []
    for case.lengths in ([0, full, 40], [-7, 90_000, 40]):
        results.append((*case.run(), case.k_cache.clone(), case.v_cache.clone()))
    for a, b in zip(*results):
        assert torch.equal(a, b)
