"""flash_attn_func and its packed forms: every feature, dtype and head dim against fp64."""

import contextlib
import functools

import pytest
import torch
from oracle import Case, check, leaves, make, sample

import hf_flash
from hf_flash import library
from hf_flash.reference import attention_reference

HEAD_DIMS = (8, 16, 32, 40, 48, 63, 64, 72, 80, 96, 112, 120, 128, 160, 192, 224, 256)
LENGTHS = (1, 2, 3, 17, 63, 64, 65, 100, 127, 128, 129, 191, 257)
AXES = dict(
    head_dim=HEAD_DIMS,
    seq_q=LENGTHS,
    seq_k=LENGTHS,
    group=(101, 202, 104, 208, 103, 207),  # kv_heads * 100 + queries for each
    causal=(False, True),
    window=((-1, -1), (-1, -1), (5, 3), (64, 0), (-1, 7), (30, -1)),
    softcap=(0.0, 0.0, 3.0),
    alibi=(False, False, True),
    dropout=(0.0, 0.0, 0.17),
    layout=("contiguous", "slice", "heads first", "columns first", "odd"),
    grad_lse=(False, False, True),
    deterministic=(False, True),
)
SMALL = dict(AXES, head_dim=(32, 64), seq_q=(1, 17, 65, 130, 257), seq_k=(1, 17, 65, 130, 257, 300), group=(101, 102))
# Every kernel that there is for a head dim and dtype.
KERNELS = [
    dict(head_dim=(head_dim,), dtype=(dtype,), kernel=(family,))
    for head_dim in HEAD_DIMS
    for dtype in (torch.bfloat16, torch.float16)
    for family in ("portable", "hopper")
    if family == "portable" or head_dim > 32
]
# Six cases of each kernel have every value of every axis but the lengths.
SIX = dict(AXES, layout=(*AXES["layout"], "contiguous"))
CASES = {
    "cpu": sample(70, 1, dtype=(torch.float32, torch.bfloat16, torch.float16), **AXES),
    "cuda": [case for i, kernel in enumerate(KERNELS) for case in sample(6, 100 + i, **{**SIX, **kernel})]
    + sample(40, 3, dtype=(torch.bfloat16,), kernel=("portable", "hopper"), head_dim=(64, 80, 128, 256),
             seq_q=(512, 777, 1024), seq_k=(512, 777, 1024), group=(202, 104), causal=(False, True),
             magnitude=(1.0, 3.0, 10.0)),
    "emulated": sample(36, 4, dtype=(torch.bfloat16, torch.float16), **SMALL)
    + sample(68, 5, dtype=(torch.bfloat16, torch.float16), **dict(SMALL, head_dim=HEAD_DIMS)),
}  # fmt: skip


def all_cases():
    names = ["emulated"] if library.emulated() else ["cpu", "cuda"]
    return [
        pytest.param(name, case, id=f"{name}-{case}", marks=[pytest.mark.gpu] if name == "cuda" else [])
        for name in names
        for case in CASES[name]
    ]


@contextlib.contextmanager
def forced(kernel):
    """The kernel of a Case; where this GPU, or this build of the emulator, has no such kernel the test is skipped."""
    with library.force_kernel(kernel):
        try:
            yield
        except NotImplementedError as error:
            pytest.skip(str(error))


@pytest.mark.parametrize("name, case", all_cases())
def test_out_lse_and_gradients_match_fp64(name, case, poisoned):
    """Rows 1, 2, 6, 33, 34, 44, 47: lengths about tile edges, strided inputs, head groups, odd head dims."""
    device = torch.device("cuda" if name == "cuda" else "cpu")
    c = case
    q = make((2, c.seq_q, c.heads, c.head_dim), c.dtype, device, c.layout, c.magnitude)
    k = make((2, c.seq_k, c.kv_heads, c.head_dim), c.dtype, device, c.layout, c.magnitude)
    v = make((2, c.seq_k, c.kv_heads, c.head_dim), c.dtype, device, c.layout)
    slopes = torch.rand(2, c.heads, device=device) if c.alibi else None
    features = dict(causal=c.causal, window_size=c.window, softcap=c.softcap, alibi_slopes=slopes, dropout_p=c.dropout)
    torch.manual_seed(5)
    rng_state = torch.randint(0, 1 << 62, (2,), dtype=torch.int64, device=device)

    def run(q, k, v):
        torch.manual_seed(5)
        return hf_flash.flash_attn_func(q, k, v, deterministic=c.deterministic, return_lse=True, **features)

    with forced(c.kernel):
        check(run, q, k, v, grad_lse=c.grad_lse, rng_state=rng_state, **features)


def uniform(backend, seq_q, seq_k, v=None, heads=1, kv_heads=1, **arguments):
    """With q = k = 0 the output is the mean of the values a query sees; v_j defaults to j. -> (seq_q, heads)"""
    dtype, device = backend.dtypes[0], backend.device
    v = torch.arange(seq_k) if v is None else v
    v = torch.as_tensor(v, dtype=dtype, device=device).reshape(-1, seq_k)  # (1 or kv_heads, seq_k)
    v = v.expand(kv_heads, -1).T[None, :, :, None].expand(1, seq_k, kv_heads, 64)
    q = torch.zeros(1, seq_q, heads, 64, dtype=dtype, device=device)
    k = torch.zeros(1, seq_k, kv_heads, 64, dtype=dtype, device=device)
    out = hf_flash.flash_attn_func(q, k, v, **arguments)
    assert torch.equal(out, out[..., :1].expand_as(out))
    return out[0, :, :, 0].float().cpu()


def assert_values(out, expected):
    torch.testing.assert_close(out.flatten(), torch.tensor(expected, dtype=torch.float32), rtol=5e-3, atol=1e-6)


def test_causal_is_aligned_bottom_right(backend):
    """Rows 1, 65: two new queries on three cached keys."""
    assert_values(uniform(backend, 2, 5, causal=True), [1.5, 2.0])
    assert_values(uniform(backend, 1, 5, causal=True), [2.0])


@pytest.mark.parametrize("seq_k", [63, 64, 65, 127, 128, 129])
def test_the_last_query_sees_every_key_about_tile_edges(backend, seq_k):
    """Row 1."""
    for seq_q in (1, seq_k - 1, seq_k):
        expected = (seq_k - seq_q + torch.arange(seq_q)) / 2  # the mean of 0 … i + seq_k - seq_q
        assert_values(uniform(backend, seq_q, seq_k, causal=True), expected.tolist())


def test_rows_without_keys_give_zero(backend):
    """Rows 2, 3: with more queries than keys, and with a window that leaves rows empty; gradients stay finite."""
    assert_values(uniform(backend, 5, 2, [1, 2], causal=True), [0, 0, 0, 1, 1.5])
    assert_values(uniform(backend, 4, 2, [1, 2], window_size=(1, 0)), [0, 0, 1, 1.5])
    make_zero = lambda n: torch.zeros(1, n, 1, 64, dtype=backend.dtypes[0], device=backend.device).requires_grad_()  # noqa: E731
    q, k, v = make_zero(5), make_zero(2), make_zero(2)
    out, lse = hf_flash.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert torch.equal(lse[0, 0, :3].cpu(), torch.full((3,), float("-inf")))
    torch.testing.assert_close(lse[0, 0, 3:].cpu(), torch.tensor([0.0, 0.6931]), rtol=1e-4, atol=1e-4)
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.isfinite(x).all() for x in (dq, dk, dv))
    assert not dq[:, :3].any()


@pytest.mark.parametrize("causal", [False, True])
def test_the_tail_of_a_tile_does_not_count(backend, causal, poisoned):
    """Row 6: v = 1 gives 1 at every length; memory past the end is NaN."""
    lengths = (1, 65, 130) if backend.name == "emulated" else range(1, 261, 1 if backend.name == "cuda" else 7)
    buffer = torch.full((1, 300, 1, 64), float("nan"), dtype=backend.dtypes[0], device=backend.device)
    for n in lengths:
        buffer.fill_(float("nan"))
        buffer[:, :n] = 1
        x = buffer[:, :n]
        assert ((hf_flash.flash_attn_func(x, x, x, causal=causal) - 1).abs() < 1e-6).all(), n


def test_a_window_counts_keys_on_each_side(backend):
    """Row 7: a model's window of 4 is three keys back and the token itself."""
    assert_values(uniform(backend, 8, 8, window_size=(3, 0)), [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5])
    assert_values(uniform(backend, 8, 8, causal=True, window_size=(3, -1)), [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5])


def test_query_heads_share_the_kv_head_of_their_group(backend):
    """Row 44: the map of heads, and the sum of dv over the group."""
    out = uniform(backend, 1, 1, [[1], [2]], heads=8, kv_heads=2)
    assert_values(out, [1, 1, 1, 1, 2, 2, 2, 2])
    v = torch.zeros(1, 3, 2, 64, dtype=backend.dtypes[0], device=backend.device).requires_grad_()
    q = torch.zeros(1, 3, 8, 64, dtype=v.dtype, device=v.device)
    hf_flash.flash_attn_func(q, v.detach(), v).sum().backward()
    assert (v.grad - 4).abs().max() < 0.05  # 4 heads, three weights of 1/3


@pytest.mark.parametrize("features", [{"causal": True}, {"window_size": (70, 2)}, {"softcap": 3.0}], ids=str)
def test_few_queries_against_many_keys_share_a_tile_with_their_group(backend, features, monkeypatch):
    """On the GPU they run on the decode kernel, which packs a group's heads and splits the keys; dropout does not."""
    passes, run = [], library.run
    monkeypatch.setattr(library, "run", lambda which, *rest: passes.append(which) or run(which, *rest))
    q = make((2, 3, 8, 64), backend.dtypes[0], backend.device)
    k, v = (make((2, 300, 2, 64), backend.dtypes[0], backend.device) for _ in range(2))
    attend = functools.partial(hf_flash.flash_attn_func, return_lse=True, **features)
    check(attend, q, k, v, grad_lse=True, **features)
    hf_flash.flash_attn_func(q, k, v, dropout_p=0.1)
    hf_flash.flash_attn_func(q, k[:, :90], v[:, :90])
    forward, backward, decode = library.FORWARD, library.BACKWARD, library.DECODE
    assert passes == ([decode, backward, forward, forward] if backend.kernels else [])


@pytest.mark.parametrize("seq_q", [1, 2])
def test_softcap_caps_scaled_scores_and_zero_is_none(backend, seq_q):
    """Row 48: scaled scores 4 and 0 with cap 2 weigh 0.8730; without, 0.9820."""
    q = torch.zeros(1, seq_q, 1, 64, dtype=backend.dtypes[0], device=backend.device)
    k = torch.zeros(1, 2, 1, 64, dtype=q.dtype, device=q.device)
    q[..., 0], k[0, 0, 0, 0] = 8, 4  # a score of 32, times 1/8
    v = torch.zeros_like(k)
    v[0, 0] = 1
    for softcap, weight in ((2.0, 0.8730), (0.0, 0.9820)):
        out = hf_flash.flash_attn_func(q, k, v, softcap=softcap)
        assert abs(out[0, -1, 0, 0].item() - weight) < 4e-3


@pytest.mark.parametrize("head_dim", [8, 16, 40, 48, 63, 72, 80, 96, 112, 120, 160, 192, 224, 256])
def test_the_scale_is_that_of_the_true_head_dim(backend, head_dim):
    """Row 47: head dims that are padded, inside or outside, keep 1 / sqrt(head_dim), and gradients have its width."""
    if backend.name == "emulated" and head_dim not in (40, 63):
        pytest.skip("the emulator compiles few head dims")
    q, k, v = (make((1, 33, 2, head_dim), backend.dtypes[-1], backend.device, magnitude=2.0) for _ in range(3))
    out, _, dq, _, _ = check(lambda q, k, v: hf_flash.flash_attn_func(q, k, v, return_lse=True), q, k, v)
    assert out.shape == dq.shape == q.shape


@pytest.mark.parametrize("score", [6.0, 12.0, 300.0])
def test_one_dominant_key_of_a_long_row(backend, score):
    """The running maximum moves far and late: the key that outweighs all lies at the end, then at the start."""
    n = {"cpu": 300, "cuda": 4096, "emulated": 300}[backend.name]
    for at in (n - 2, 1):
        q, k, v = (make((1, n, 1, 64), backend.dtypes[-1], backend.device) for _ in range(3))
        q[..., 0] = 8.0
        k[0, at, 0, 0] = score  # 8 * score / sqrt(64)
        if score < 100:
            check(lambda q, k, v: hf_flash.flash_attn_func(q, k, v, return_lse=True), q, k, v)
            continue
        # The weight is 1, so dq and dk are a difference of equal numbers, times 300: nothing is left but rounding.
        q, k, v = leaves(q, k, v)
        out, lse = hf_flash.flash_attn_func(q, k, v, return_lse=True)
        assert torch.equal(out, v[:, at : at + 1].expand_as(out)) and (lse / score - 1).abs().max() < 3e-2
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        assert dq.abs().max() < 0.3 and dk.abs().max() < 0.1 and torch.isfinite(dv).all()


def test_one_key_gives_exact_gradients(backend):
    """Row 26: fp16, head dim 16, values x3: dq = dk = 0, dv = 1."""
    q, k, v = (make((1, 1, 1, 16), torch.float16, backend.device, magnitude=3.0).requires_grad_() for _ in range(3))
    hf_flash.flash_attn_func(q, k, v).sum().backward()
    assert not q.grad.any() and not k.grad.any() and (v.grad == 1).all()


def test_gradients_do_not_depend_on_the_strides_of_grad_out(backend):
    """Row 32: MQA [2, 32, 4, 128]; broadcast, contiguous and transposed output gradients."""
    head_dim = 64 if backend.name == "emulated" else 128
    q = make((2, 32, 4, head_dim), backend.dtypes[0], backend.device).requires_grad_()
    k, v = (make((2, 32, 1, head_dim), backend.dtypes[0], backend.device).requires_grad_() for _ in range(2))

    def gradients(grad):
        out = hf_flash.flash_attn_func(q, k, v, deterministic=True)
        return torch.autograd.grad(out.sum() if grad is None else out, (q, k, v), grad)

    ones = torch.ones_like(q)
    broadcast, contiguous = gradients(None), gradients(ones)
    transposed = gradients(torch.ones_like(ones.transpose(1, 2).contiguous()).transpose(1, 2))
    for a, b, c in zip(broadcast, contiguous, transposed):
        assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_slices_of_a_fused_projection_equal_contiguous_tensors(backend, head_dim):
    """Row 34: q, k, v as slices of [S, 3, H, D], and k of every second row."""
    if backend.name == "emulated" and head_dim != 64:
        pytest.skip("the emulator compiles few head dims")
    qkv = make((1, 100, 3, 2, head_dim), backend.dtypes[0], backend.device)
    every_second = make((1, 200, 2, head_dim), backend.dtypes[0], backend.device)[:, ::2]
    for q, k, v in (qkv.unbind(2), (qkv[:, :, 0], every_second, qkv[:, :, 2].contiguous())):
        results = []
        for inputs in ((q, k, v), tuple(x.contiguous() for x in (q, k, v))):
            inputs = [x.detach().requires_grad_() for x in inputs]
            out = hf_flash.flash_attn_func(*inputs, causal=True, deterministic=True)
            results.append((out, *torch.autograd.grad(out, inputs, torch.ones_like(out))))
        for a, b in zip(*results):
            assert torch.equal(a, b)


def test_only_wanted_gradients_are_computed(backend, monkeypatch):
    """Row 78: a frozen k or v gets none, and the backend is not asked for it."""
    from hf_flash import ops

    asked, backward = [], ops.backward
    monkeypatch.setattr(ops, "backward", lambda *a: asked.append(tuple(a[-1])) or backward(*a))
    q, k, v = (make((1, 33, 2, 64), backend.dtypes[0], backend.device) for _ in range(3))
    for wanted in ((True, False, False), (False, False, True), (False, True, True)):
        inputs = [x.detach().requires_grad_(w) for x, w in zip((q, k, v), wanted)]
        out, _ = hf_flash.flash_attn_func(*inputs, causal=True, return_lse=True)
        out.sum().backward()
        assert tuple(x.grad is not None for x in inputs) == wanted == asked[-1]
        whole = [x.detach().requires_grad_() for x in (q, k, v)]
        out, _ = hf_flash.flash_attn_func(*whole, causal=True, return_lse=True)
        for x, y, w in zip(inputs, torch.autograd.grad(out.sum(), whole), wanted):
            assert not w or (x.grad - y).abs().max() <= 1e-2


@pytest.mark.parametrize("head_dim", [64, 63])
def test_packed_forms_equal_the_plain_one(backend, head_dim):
    """Outputs and gradients of qkv and kv in one tensor."""
    qkv = make((2, 40, 3, 2, head_dim), backend.dtypes[0], backend.device)
    plain = [x.contiguous().requires_grad_() for x in qkv.detach().unbind(2)]
    arguments = dict(causal=True, deterministic=True, return_attn_probs=True)
    out, lse, _ = hf_flash.flash_attn_func(*plain, **arguments)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, plain, grad)
    fused = qkv.detach().requires_grad_()
    o, s, _ = hf_flash.flash_attn_qkvpacked_func(fused, **arguments)
    (dqkv,) = torch.autograd.grad(o, fused, grad)
    assert torch.equal(o, out) and torch.equal(s, lse) and torch.equal(dqkv, torch.stack(expected, 2))
    q, kv = qkv[:, :, 0].detach().requires_grad_(), qkv[:, :, 1:].detach().requires_grad_()
    o, s, _ = hf_flash.flash_attn_kvpacked_func(q, kv, **arguments)
    dq, dkv = torch.autograd.grad(o, (q, kv), grad)
    assert torch.equal(o, out) and torch.equal(dq, expected[0]) and torch.equal(dkv, torch.stack(expected[1:], 2))


def test_empty_inputs_give_zero_and_minus_infinity(backend):
    """Row 28, dense: no keys, no queries, no batch."""
    for shape_q, shape_k in (((2, 5, 2, 64), (2, 0, 2, 64)), ((2, 0, 2, 64), (2, 5, 2, 64)), ((0, 5, 2, 64),) * 2):
        q = torch.ones(shape_q, dtype=backend.dtypes[0], device=backend.device, requires_grad=True)
        k = torch.ones(shape_k, dtype=q.dtype, device=q.device, requires_grad=True)
        out, lse = hf_flash.flash_attn_func(q, k, k, return_lse=True)
        out.sum().backward()
        assert out.shape == q.shape and not out.any() and not q.grad.any() and not k.grad.any()
        assert torch.isneginf(lse).all()


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.1}, {"softcap": 2.0}, {"window_size": (2, 0)}], ids=str)
def test_a_batch_of_no_rows_gives_no_rows_to_grouped_heads(backend, options):
    shapes = ((0, 5, 4, 64), (0, 5, 2, 64), (0, 5, 2, 64))
    given = [torch.ones(s, dtype=backend.dtypes[0], device=backend.device, requires_grad=True) for s in shapes]
    out = hf_flash.flash_attn_func(*given, **options)
    out.sum().backward()
    assert out.shape == shapes[0] and all(x.grad.shape == s for x, s in zip(given, shapes))


def test_autocast_runs_attention_in_its_dtype(backend):
    """Row 72: fp32 inputs under autocast; gradients come back in fp32."""
    q = torch.randn(1, 9, 2, 64, device=backend.device, requires_grad=True)
    with torch.autocast(backend.device.type, torch.bfloat16):
        out = hf_flash.flash_attn_func(q, q, q)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("features", [{}, {"causal": True}, {"softcap": 9.0}, {"window_size": (64, 64)}], ids=str)
def test_memory_is_linear_on_the_cpu(features):
    """Row 41, CPU: 20 000 tokens forward and backward; a score matrix would take 1.6 GB."""
    if library.emulated():
        pytest.skip("for the CPU backend")
    import resource

    n = 20_000 if features != {"softcap": 9.0} else 6_000
    q = torch.randn(1, n, 1, 8, requires_grad=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = hf_flash.flash_attn_func(q, q, q, **features)
    out.sum().backward()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert torch.isfinite(q.grad).all()
    assert grown < 500e6
    row = n // 3  # a part of it against the oracle
    left = max(0, row - 64) if "window_size" in features else 0
    right = row + 1 if "causal" in features else row + 65 if "window_size" in features else n
    x = q.detach()
    expected, _ = attention_reference(x[:, row : row + 1], x[:, left:right], x[:, left:right],
                                      softcap=features.get("softcap", 0.0))  # fmt: skip
    torch.testing.assert_close(out[:, row : row + 1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", sample(12, 7, dtype=(torch.float64,), **dict(AXES, layout=("contiguous",))), ids=str)
def test_fp64_on_the_cpu_is_exact(case):
    q, k, v = (
        torch.randn(1, n, h, case.head_dim, dtype=torch.float64)
        for n, h in ((case.seq_q, case.heads), (case.seq_k, case.kv_heads), (case.seq_k, case.kv_heads))
    )
    features = dict(causal=case.causal, window_size=case.window, softcap=case.softcap)
    out = hf_flash.flash_attn_func(q, k, v, **features)
    torch.testing.assert_close(out, attention_reference(q, k, v, **features)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("alibi", [False, True])
def test_groups_without_pytorchs_own_support_for_them(monkeypatch, alibi):
    """Before torch 2.9 the fused CPU kernel wants as many kv heads as heads."""
    from hf_flash import cpu

    q, k, v = (torch.randn(2, 700, h, 8, requires_grad=True) for h in (6, 2, 2))
    slopes = torch.rand(2, 6) if alibi else None
    results = []
    for native in (cpu.NATIVE_GROUPS, False):
        monkeypatch.setattr(cpu, "NATIVE_GROUPS", native)
        out, lse = hf_flash.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, return_lse=True)
        results.append((out, lse, *torch.autograd.grad(out.sum(), (q, k, v))))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_sample_covers_each_head_dim_and_feature():
    for name, cases in CASES.items():
        for field in ("causal", "alibi", "grad_lse", "deterministic"):
            assert {getattr(c, field) for c in cases} == {False, True}, (name, field)
    assert Case(64) == Case(head_dim=64)


def test_on_a_gpu_every_kernel_has_every_feature():
    """Row 47: for each head dim and dtype, of each family of kernels."""
    for kernel in KERNELS:
        cases = [c for c in CASES["cuda"] if all(getattr(c, name) in values for name, values in kernel.items())]
        groups = {100 * c.kv_heads + c.heads // c.kv_heads for c in cases}
        assert groups == set(AXES["group"]), kernel
        for name in ("causal", "window", "softcap", "alibi", "dropout", "layout", "grad_lse", "deterministic"):
            assert {getattr(c, name) for c in cases} == set(AXES[name]), (name, kernel)
