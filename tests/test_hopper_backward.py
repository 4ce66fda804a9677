"""The Hopper backward kernels, run by the emulator through the C ABI: every head-dim tile against fp64.

The measure is that of all kernels: the largest error is at most twice that of PyTorch's own computation in the same
dtype, plus 1e-5; or, where few elements make that a matter of luck, the norm of the error is at most 1.1 times its.
Outputs and workspaces come poisoned with NaN, shared memory too.
"""

import ctypes
import functools
import itertools
import shutil
import types

import pytest
import torch
from emulator import build

from hf_flash import library
from hf_flash.reference import attention_reference

HEAD_DIMS = (64, 80, 96, 128, 192, 256)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("g++") is None or not (build.cuda_include() / "cuda_bf16.h").exists(),
        reason="needs g++ and CUDA headers",
    ),
]


@pytest.fixture(scope="module")
def built():
    output = build.DEFAULT_OUTPUT.with_name("libhf_flash_hopper_backward.so")
    return build.build(output, HEAD_DIMS, ("hopper/backward",))


def load(path):
    loaded = ctypes.CDLL(str(path))
    loaded.hf_flash_workspace_bytes.restype = ctypes.c_int64
    return loaded


@pytest.fixture(scope="module")
def kernels(built):
    return load(built)


@pytest.fixture(scope="module")
def on_multiprocessors(built, tmp_path_factory):
    """The kernels on a GPU of so many: a library asks once, so each count has a copy."""
    folder = tmp_path_factory.mktemp("kernels")

    @functools.cache
    def of(count):
        loaded = load(shutil.copy(built, folder / f"of_{count}.so"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_FLASH_EMULATED_SM_COUNT", str(count))
            loaded.hf_flash_kernel_name(library.BACKWARD, ctypes.byref(library.HfFlashParams()))
        return loaded

    return of


def problem(head_dim, dtype, q_lengths, k_lengths, heads=2, kv_heads=None, packed=True, **features):
    """Random inputs of these lengths, packed or (all equal) dense. Features are named as attention_reference does."""
    kv_heads = kv_heads or heads
    p = types.SimpleNamespace(head_dim=head_dim, dtype=dtype, heads=heads, kv_heads=kv_heads, batch=len(q_lengths))
    p.seq_q, p.seq_k = max(q_lengths), max(k_lengths)
    p.cu_q, p.cu_k = (
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32) if packed else None
        for lengths in (q_lengths, k_lengths)
    )
    q_shape = (sum(q_lengths),) if packed else (p.batch, p.seq_q)
    k_shape = (sum(k_lengths),) if packed else (p.batch, p.seq_k)
    p.q, p.grad_out = (torch.randn(*q_shape, heads, head_dim).to(dtype) for _ in range(2))
    p.k, p.v = (torch.randn(*k_shape, kv_heads, head_dim).to(dtype) for _ in range(2))
    p.features = {"scale": head_dim**-0.5, "rng_state": torch.tensor([1234567891011, 5]), **features}
    return p


def reference(p, dtype):
    """out, lse and the three gradients in dtype."""
    inputs = [x.to(dtype).requires_grad_() for x in (p.q, p.k, p.v)]
    out, lse = attention_reference(*inputs, p.cu_q, p.cu_k, **p.features, dtype=dtype)
    grads = torch.autograd.grad((out.double() * p.grad_out.double()).sum(), inputs)
    return out.detach(), lse.detach(), grads


def run(kernels, p, out, lse, deterministic=False, wanted="qkv"):
    """The gradients as the kernel computes them, None for those that are not wanted; and the workspace's bytes."""
    packed, params = p.cu_q is not None, library.HfFlashParams()

    def tensor(x):
        if x is None:
            return library.HfFlashTensor(None, 0, 0, 0)
        return library.HfFlashTensor(x.data_ptr() or None, *((0, *x.stride()[:2]) if packed else x.stride()[:3]))

    out, lse = out.to(p.dtype), lse.float().contiguous()
    grads = [
        torch.full_like(x, float("nan")) if name in wanted else None
        for name, x in zip("qkv", (p.q, p.k, p.v), strict=True)
    ]
    params.q, params.k, params.v, params.out, params.grad_out = map(tensor, (p.q, p.k, p.v, out, p.grad_out))
    params.grad_q, params.grad_k, params.grad_v = map(tensor, grads)
    params.lse, params.lse_head_stride = lse.data_ptr() or None, lse.stride(-2)
    params.lse_batch_stride = 0 if packed else lse.stride(0)
    if packed:
        params.cu_seqlens_q, params.cu_seqlens_k = p.cu_q.data_ptr(), p.cu_k.data_ptr()
        params.total_q, params.total_k = len(p.q), len(p.k)
    slopes = p.features.get("alibi_slopes")
    params.alibi_slopes = None if slopes is None else slopes.data_ptr()
    params.rng_state = p.features["rng_state"].data_ptr()
    params.dtype, params.kernel = library.DTYPES[p.dtype], 2
    params.batch, params.heads, params.kv_heads, params.head_dim = p.batch, p.heads, p.kv_heads, p.head_dim
    params.seq_q, params.seq_k, params.deterministic = p.seq_q, p.seq_k, deterministic
    left, right = p.features.get("window_size", (-1, -1))
    params.window_left, params.window_right = left, 0 if p.features.get("causal") else right
    params.scale, params.softcap = p.features["scale"], p.features.get("softcap", 0.0)
    params.dropout_p = p.features.get("dropout_p", 0.0)
    params.workspace_bytes = kernels.hf_flash_workspace_bytes(library.BACKWARD, ctypes.byref(params))
    workspace = torch.full((params.workspace_bytes // 4 + 64,), float("nan"))
    params.workspace = workspace.data_ptr()
    assert kernels.hf_flash_backward(ctypes.byref(params), None) == 0
    assert workspace[params.workspace_bytes // 4 :].isnan().all()  # nothing written past its end
    return grads, params.workspace_bytes


def kernel(*what, **how):
    return run(*what, **how)[0]


def check(kernels, p, **how):
    """Returns the workspace's bytes."""
    out, lse, exact = reference(p, torch.float64)
    half = reference(p, p.dtype)[2]
    grads, workspace_bytes = run(kernels, p, out, lse, **how)
    for name, x, y, z in zip("qkv", grads, exact, half, strict=True):
        if name in how.get("wanted", "qkv"):
            bound = 2 * (z.double() - y).abs().amax() + 1e-5
            close = (x.double() - y).norm() <= 1.1 * (z.double() - y).norm() + 1e-5
            assert (x.double() - y).abs().amax() <= bound or close, f"d{name}"
        else:
            assert x is None
    return workspace_bytes


CASES = {
    "causal": dict(q=(150, 150), k=(201, 201), packed=False, causal=True),
    "causal, more queries than keys": dict(q=(201,), k=(97,), packed=False, causal=True),
    "full, grouped heads": dict(q=(129,), k=(258,), packed=False, heads=4, kv_heads=2),
    "window": dict(q=(260,), k=(220,), packed=False, window_size=(70, 5)),
    "dropout": dict(q=(97,), k=(150,), packed=False, dropout_p=0.2),
    "alibi": dict(q=(120,), k=(90,), packed=False, causal=True, alibi=True),
    "packed": dict(q=(100, 0, 1, 130), k=(65, 30, 0, 130), heads=2, kv_heads=1, causal=True),
    "packed, everything": dict(q=(70, 140), k=(140, 70), window_size=(90, -1), softcap=5.0, dropout_p=0.3, alibi=True),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 40, 104, 136, 248])
def test_gradients_match_fp64(kernels, head_dim, name):
    """Every tile, and head dims that are padded to one; one dtype each, drawn at random."""
    case = dict(CASES[name])
    dtype = (torch.bfloat16, torch.float16)[int(torch.randint(2, ()))]
    if case.pop("alibi", False):
        case["alibi_slopes"] = torch.rand(2) * 0.2
    check(kernels, problem(head_dim, dtype, case.pop("q"), case.pop("k"), **case))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("features", [{}, {"causal": True}, {"window_size": (60, 30)}], ids=str)
def test_deterministic_sums_match_fp64(kernels, head_dim, features):
    """Turns are taken in order: a block that waited for one that comes after it would never end."""
    check(kernels, problem(head_dim, torch.bfloat16, (300, 170), (270, 400), **features), deterministic=True)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "kv"])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_only_wanted_gradients_are_written(kernels, head_dim, wanted):
    check(kernels, problem(head_dim, torch.bfloat16, (100,), (150,), packed=False, causal=True), wanted=wanted)


@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 72, 200])
@pytest.mark.parametrize("features", [{}, {"causal": True, "dropout_p": 0.1}], ids=str)
def test_nan_in_a_sequence_stays_there(kernels, head_dim, features):
    """The other sequences of a packed batch get the same bits, whatever their neighbour holds."""
    p = problem(head_dim, torch.bfloat16, (70, 50, 90), (65, 33, 130), **features)
    out, lse, _ = reference(p, torch.float64)
    clean = kernel(kernels, p, out, lse)
    for x, cu in ((p.q, p.cu_q), (p.grad_out, p.cu_q), (out, p.cu_q), (p.k, p.cu_k), (p.v, p.cu_k)):
        x[cu[1] : cu[2]] = float("nan")
    for x, y, cu in zip(kernel(kernels, p, out, lse), clean, (p.cu_q, p.cu_k, p.cu_k), strict=True):
        assert torch.equal(x[: cu[1]], y[: cu[1]]) and torch.equal(x[cu[2] :], y[cu[2] :])


def shared_bytes(head_dim, lengths, heads, parts, gradients=2, packed=True):
    """What blocks that share a group take of the workspace: fp32 sums of key rows, which come in sixteens."""
    tile = next(x for x in HEAD_DIMS if x >= head_dim)
    blocks = sum(lengths) // 16 + len(lengths) if packed else sum(-(-x // 16) for x in lengths)
    return gradients * heads * parts * blocks * 16 * tile * 4


GROUPS = {
    "causal": dict(q=(150, 150), k=(201, 201), packed=False, heads=6, kv_heads=2, causal=True),
    "full": dict(q=(97,), k=(260,), packed=False, heads=3, kv_heads=1),
    "window, softcap, dropout": dict(
        q=(130,), k=(140,), packed=False, heads=4, kv_heads=1, window_size=(70, 5), softcap=5.0, dropout_p=0.2
    ),
    "keys that no query sees": dict(q=(30,), k=(300,), packed=False, heads=4, kv_heads=2, window_size=(60, 0)),
    "packed, causal": dict(q=(100, 0, 1, 130), k=(65, 30, 0, 143), heads=4, kv_heads=1, causal=True),
}


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 40, 104, 136, 248])
def test_a_group_shared_by_blocks_gets_its_gradients(on_multiprocessors, head_dim, name):
    """On a GPU that needs a block for every query head, and on one that keeps the group whole."""
    case = dict(GROUPS[name])
    dtype = (torch.bfloat16, torch.float16)[int(torch.randint(2, ()))]
    p = problem(head_dim, dtype, case.pop("q"), lengths := case.pop("k"), **case)
    whole, shared = (check(on_multiprocessors(count), p) for count in (1, 64))
    sums = shared_bytes(head_dim, lengths, p.kv_heads, p.heads // p.kv_heads, packed=p.cu_k is not None)
    assert 0 <= shared - whole - sums < 256


@pytest.mark.parametrize("head_dim", [80, 192])
def test_parts_of_a_group_need_not_be_equal(on_multiprocessors, head_dim):
    """Eleven heads, four blocks' worth of keys: three, three, three and two heads to a block."""
    p = problem(head_dim, torch.bfloat16, (60,), (500 if head_dim <= 128 else 250,), 11, 1, False, causal=True)
    whole, shared = (check(on_multiprocessors(count), p) for count in (1, 8))
    assert 0 <= shared - whole - shared_bytes(head_dim, (p.seq_k,), 1, 4, packed=False) < 256


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("lengths", [(150,), (70, 1, 200)], ids=str)
def test_shared_groups_give_the_same_bits_in_every_run(on_multiprocessors, monkeypatch, head_dim, lengths):
    """Deterministic, whichever blocks and threads come first; dk and dv in any mode."""
    p = problem(head_dim, torch.bfloat16, lengths, lengths, heads=4, kv_heads=1, causal=True)
    out, lse, _ = reference(p, torch.float64)
    shared = on_multiprocessors(64)
    check(shared, p, deterministic=True)
    first = kernel(shared, p, out, lse, deterministic=True)
    monkeypatch.setenv("HF_FLASH_EMULATED_ORDER", "7")
    assert all(map(torch.equal, kernel(shared, p, out, lse, deterministic=True), first))
    monkeypatch.setenv("HF_FLASH_EMULATED_BLOCKS", "-1")
    assert all(map(torch.equal, kernel(shared, p, out, lse)[1:], first[1:]))


@pytest.mark.parametrize("wanted", ["q", "k", "v", "kv"])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_shared_groups_write_only_wanted_gradients(on_multiprocessors, head_dim, wanted):
    p = problem(head_dim, torch.bfloat16, (100,), (150,), packed=False, heads=3, kv_heads=1, causal=True)
    whole, shared = (check(on_multiprocessors(count), p, wanted=wanted) for count in (1, 64))
    gradients = len(wanted.replace("q", ""))
    assert 0 <= shared - whole - shared_bytes(head_dim, (150,), 1, 3, gradients, packed=False) < 256
