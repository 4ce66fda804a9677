"""What only a GPU shows: streams, graphs, sizes past 2**31, memory, determinism, devices."""

import os
import subprocess
import sys

import pytest
import torch

import hf_flash
from hf_flash import library
from hf_flash.reference import dropout_keep

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def normal(*shape, grad=False, dtype=BF16):
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_(grad)


@pytest.fixture(autouse=True)
def _release():
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def poisoned_allocator():
    """Freed blocks of many sizes that hold NaN, which the next torch.empty hands out."""
    sizes = [1 << i for i in range(9, 27)]
    blocks = [torch.full((n // 2,), float("nan"), dtype=BF16, device="cuda") for n in sizes for _ in range(3)]
    del blocks


kernels = pytest.mark.parametrize("kernel", ["portable", "hopper"])


@pytest.fixture
def forced(request):
    """Forces the kernel of the `kernel` parameter; a GPU without it skips, with the library's words."""
    kernel = request.node.callspec.params["kernel"]
    with library.force_kernel(kernel):
        try:
            q = normal(1, 16, 1, request.node.callspec.params.get("head_dim", 64), grad=True)
            hf_flash.flash_attn_func(q, q, q).sum().backward()
        except NotImplementedError as error:
            pytest.skip(str(error))
        yield kernel


@kernels
def test_kernels_run_on_the_current_stream(kernel, forced):
    """Row 54: a side stream, behind a sleeping kernel, forward and backward, 20 of 20."""
    q0, k0, v0 = (normal(2, 257, 4, 64) for _ in range(3))
    expected_out = hf_flash.flash_attn_func(q0, k0, v0, causal=True)
    for _ in range(20):
        stream = torch.cuda.Stream()
        q, k, v = (torch.full_like(q0, float("nan")).requires_grad_() for _ in range(3))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            with torch.no_grad():
                for x, source in zip((q, k, v), (q0, k0, v0)):
                    x.copy_(source)
            out = hf_flash.flash_attn_func(q, k, v, causal=True, deterministic=True)
            grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        stream.synchronize()
        assert torch.equal(out, expected_out)
        assert all(torch.isfinite(g).all() for g in grads)


def test_two_streams_at_once_do_not_share_scratch_memory():
    """Row 54: each stream has a tile counter and a workspace of its own."""
    inputs = [[normal(4, 1500, 8, 64, grad=True) for _ in range(3)] for _ in range(2)]
    alone = []
    for x in inputs:
        out = hf_flash.flash_attn_func(*x, causal=True, deterministic=True)
        alone.append((out, *torch.autograd.grad(out, x, torch.ones_like(out))))
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(10):
        results = []
        for x, stream in zip(inputs, streams):
            with torch.cuda.stream(stream):
                out = hf_flash.flash_attn_func(*x, causal=True, deterministic=True)
                results.append((out, *torch.autograd.grad(out, x, torch.ones_like(out))))
        torch.cuda.synchronize()
        for a, b in zip(alone, results):
            assert all(torch.equal(x, y) for x, y in zip(a, b))


@kernels
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_cuda_graphs_replay_forward_and_backward(kernel, forced, dropout_p):
    """Row 55: captured without a sync; with dropout each replay draws a new mask, the same forward and backward."""
    eye = torch.eye(64, device="cuda", dtype=BF16)[None, :, None].expand(2, 64, 2, 64)
    q, k, v = normal(2, 64, 2, 64, grad=True), normal(2, 64, 2, 64, grad=True), eye.contiguous().requires_grad_()

    def step():
        out = hf_flash.flash_attn_func(q, k, v, dropout_p, causal=True, deterministic=True)
        return (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    replays = []
    for _ in range(3):
        graph.replay()
        replays.append([x.clone() for x in captured])
        dv = captured[3].float()
        # dv = Pᵀ · 1, and out = P · 1 as v is the identity: forward and backward used one mask.
        torch.testing.assert_close(dv[..., 0], captured[0].float().sum(1).transpose(1, 2), rtol=3e-2, atol=3e-2)
    if dropout_p:
        assert not torch.equal(replays[0][0] == 0, replays[1][0] == 0)
    else:
        assert all(torch.equal(a, b) for a, b in zip(replays[0], step()))
    assert all(torch.isfinite(x).all() for replay in replays for x in replay)


def test_graphs_replayed_beside_other_calls_share_no_tile_counter():
    """Row 55: two graphs captured on one stream and a call on that stream, all at once, 10 of 10."""
    q, k, v = (normal(4, 1500, 8, 64) for _ in range(3))
    expected = hf_flash.flash_attn_func(q, k, v, causal=True)
    streams, graphs, captured = [torch.cuda.Stream() for _ in range(3)], [], []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=streams[2]):
            captured.append(hf_flash.flash_attn_func(q, k, v, causal=True))
    for _ in range(10):
        for out in captured:
            out.zero_()
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            called = hf_flash.flash_attn_func(q, k, v, causal=True)
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in (*captured, called))


def test_cuda_graphs_replay_decode_with_growing_lengths():
    """Lengths are read on the device: one captured step serves every length."""
    cache = [normal(2, 300, 2, 64) for _ in "kv"]
    q, k, v = normal(2, 1, 8, 64), normal(2, 1, 2, 64), normal(2, 1, 2, 64)
    lengths = torch.tensor([5, 250], dtype=torch.int32, device="cuda")
    copies = [x.clone() for x in cache]
    hf_flash.flash_attn_with_kvcache(q, *copies, k, v, cache_seqlens=lengths, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = hf_flash.flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=lengths, causal=True)
    for _ in range(4):
        graph.replay()
        expected = hf_flash.flash_attn_with_kvcache(q, *copies, k, v, cache_seqlens=lengths, causal=True)
        assert torch.equal(out, expected) and torch.equal(cache[0], copies[0])
        lengths += 7


@kernels
def test_more_than_2_to_31_scratch_elements(kernel, forced):
    """Row 37: batch 8300 of one token, 16 heads of 128."""
    q, k, v = (normal(8300, 1, 16, 128, grad=True) for _ in range(3))
    out = hf_flash.flash_attn_func(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert torch.equal(out, v) and torch.equal(grads[2], torch.ones_like(v))
    assert all(torch.isfinite(g).all() for g in grads)


@kernels
def test_more_than_65535_sequences_and_heads(kernel, forced):
    cu = torch.arange(70_001, dtype=torch.int32, device="cuda")
    q, k, v = (normal(70_000, 2, 64, grad=True) for _ in range(3))
    out = hf_flash.flash_attn_varlen_func(q, k, v, cu, cu, 1, 1, causal=True)
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    assert torch.equal(out, v) and (dv == 1).all()


@kernels
def test_swapped_axes_are_a_correct_run_of_many_heads(kernel, forced):
    """Row 22: (batch, heads, seq, head_dim) in the place of (batch, seq, heads, head_dim): 71280 heads, 12 tokens."""
    q, k, v = (normal(1, 12, 71_280, 64, grad=True) for _ in range(3))
    out = hf_flash.flash_attn_func(q, k, v, deterministic=True)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    few = [x[:, :, -3:].detach().clone().requires_grad_() for x in (q, k, v)]
    alone = hf_flash.flash_attn_func(*few, deterministic=True)
    expected = (alone, *torch.autograd.grad(alone, few, torch.ones_like(alone)))
    assert all(torch.equal(x[:, :, -3:], y) for x, y in zip((out, *grads), expected))


@kernels
def test_more_than_2_to_31_input_elements(kernel, forced):
    """Row 38: a fused qkv of [200000, 3, 32, 128]; the last document equals its lone run, forward and backward."""
    length, count = 64, 3125
    total = length * count
    qkv = torch.empty(total, 3, 32, 128, dtype=BF16, device="cuda").normal_().requires_grad_()
    cu = torch.arange(count + 1, dtype=torch.int32, device="cuda") * length
    out = hf_flash.flash_attn_varlen_qkvpacked_func(qkv, cu, length, causal=True, deterministic=True)
    (grad,) = torch.autograd.grad(out, qkv, torch.ones_like(out))
    last = qkv[-length:].detach().clone().requires_grad_()
    lone = hf_flash.flash_attn_varlen_qkvpacked_func(last, cu[:2], length, causal=True, deterministic=True)
    (lone_grad,) = torch.autograd.grad(lone, last, torch.ones_like(lone))
    torch.testing.assert_close(out[-length:], lone, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(grad[-length:], lone_grad, rtol=2e-2, atol=2e-2)


@kernels
def test_memory_is_linear_at_64k_tokens(kernel, forced):
    """Row 41: no more than inputs, outputs, gradients and O(tokens) scratch, and finite past 65536."""
    n, heads, head_dim = 70_000, 2, 64
    q, k, v = (normal(1, n, heads, head_dim, grad=True) for _ in range(3))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = hf_flash.flash_attn_func(q, k, v, causal=True)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    peak = torch.cuda.max_memory_allocated() - before
    assert all(torch.isfinite(g).all() for g in grads)
    assert peak < 14 * q.numel() * q.element_size()  # out, its gradient, three gradients, an fp32 dq, statistics
    row = 69_000
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[:, row : row + 1].transpose(1, 2), k[:, : row + 1].transpose(1, 2), v[:, : row + 1].transpose(1, 2)
    )
    torch.testing.assert_close(out[:, row], expected[:, :, 0], rtol=2e-2, atol=2e-3)


@kernels
def test_dropout_masks_do_not_repeat_after_65536_rows(kernel, forced):
    """Row 41: rows r and r + 65536 have masks of their own, those of the oracle."""
    n = 70_000
    q, k = (torch.zeros(1, m, 1, 64, device="cuda", dtype=BF16) for m in (n, 64))
    v = torch.eye(64, device="cuda", dtype=BF16)[None, :, None]
    torch.manual_seed(9)
    kept = hf_flash.flash_attn_func(q, k, v, 0.5)[0, :, 0] > 0
    torch.manual_seed(9)
    rng_state = torch.randint(0, 1 << 62, (2,), dtype=torch.int64, device="cuda")
    first = dropout_keep(rng_state, 0.5, range(1), 1, range(0, 64), range(64))[0, 0]
    past = dropout_keep(rng_state, 0.5, range(1), 1, range(65536, 65600), range(64))[0, 0]
    assert torch.equal(kept[:64], first) and torch.equal(kept[65536:65600], past) and not torch.equal(first, past)


@kernels
def test_grouped_gradients_do_not_expand_keys(kernel, forced):
    """Row 43: 32 query heads, 4 kv heads, 16384 tokens: less than twice the gradients beside what is there."""
    q, k, v = (
        normal(1, 16384, 32, 128, grad=True),
        normal(1, 16384, 4, 128, grad=True),
        normal(1, 16384, 4, 128, grad=True),
    )
    out = hf_flash.flash_attn_func(q, k, v, causal=True)
    grad = torch.ones_like(out)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(out, (q, k, v), grad)
    # dq, dk, dv in bf16, and at most an fp32 dq of scratch with its statistics
    gradients = 2 * (q.numel() + 2 * k.numel())
    assert torch.cuda.max_memory_allocated() - before < gradients + 4.2 * q.numel()


@kernels
@pytest.mark.parametrize("head_dim, group", [(64, 1), (128, 4), (256, 2)])
def test_deterministic_gradients_are_bit_equal_over_30_runs(kernel, forced, head_dim, group):
    """Rows 50, 51: also when only torch.use_deterministic_algorithms asks for it."""
    q = normal(2, 777, 2 * group, head_dim, grad=True)
    k, v = (normal(2, 777, 2, head_dim, grad=True) for _ in "kv")
    grad, first = torch.randn_like(q), None
    for i in range(30):
        torch.use_deterministic_algorithms(i % 2 == 1)
        try:
            out = hf_flash.flash_attn_func(q, k, v, causal=True, deterministic=i % 2 == 0)
            grads = torch.autograd.grad(out, (q, k, v), grad)
        finally:
            torch.use_deterministic_algorithms(False)
        first = first or (out, *grads)
        assert all(torch.equal(a, b) for a, b in zip(first, (out, *grads))), i


@kernels
def test_dk_and_dv_are_bit_equal_without_asking(kernel, forced):
    """Row 50: B = 300, Sq = 2048, Sk = 128, D = 128, 50 repeats."""
    q, k, v = normal(300, 2048, 1, 128), normal(300, 128, 1, 128, grad=True), normal(300, 128, 1, 128, grad=True)
    out = hf_flash.flash_attn_func(q, k, v)
    grad = torch.randn_like(out)
    first = torch.autograd.grad(out, (k, v), grad, retain_graph=True)
    for _ in range(50):
        assert all(map(torch.equal, first, torch.autograd.grad(out, (k, v), grad, retain_graph=True)))


@kernels
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_ragged_batches_on_a_poisoned_allocator(kernel, forced, head_dim, poisoned_allocator):
    """Rows 28, 30: empty sequences first, in the middle and last, rows past the end: zeros, whatever was there."""
    lengths = [0, 130, 0, 1, 777, 64, 0]
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    q, k, v = (normal(sum(lengths) + 40, 4, head_dim, grad=True) for _ in range(3))
    for causal in (False, True):
        out = hf_flash.flash_attn_varlen_func(q, k, v, cu, cu, 777, 777, causal=causal)
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        for x in (out, *grads):
            assert torch.isfinite(x).all() and not x[sum(lengths) :].any()


def test_no_host_synchronisation():
    """Row 68: forward, backward, packed and cached calls never make the host wait."""
    q, k, v = (normal(2, 64, 2, 64, grad=True) for _ in range(3))
    cu = torch.tensor([0, 64, 128], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([3, 40], dtype=torch.int32, device="cuda")

    def run():
        out = hf_flash.flash_attn_func(q, k, v, 0.1, causal=True)
        out = out + hf_flash.flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in (q, k, v)), cu.clone(), cu, 64, 64, window_size=(9, 0)
        ).view_as(out)
        out.backward(torch.ones_like(out))
        new = q.detach()[:, :1]
        hf_flash.flash_attn_with_kvcache(new, k.detach(), v.detach(), new, new, cache_seqlens=lengths, causal=True)

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_current_device_other_than_the_inputs():
    """Row 53: inputs on cuda:1 while cuda:0 is current, forward and backward."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q, k, v = (torch.randn(2, 100, 2, 64, device="cuda:1", dtype=BF16, requires_grad=True) for _ in range(3))
    with torch.cuda.device(0):
        out = hf_flash.flash_attn_func(q, k, v, causal=True)
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    with torch.cuda.device(1):
        expected = hf_flash.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(out, expected) and all(torch.isfinite(g).all() for g in grads)
    with pytest.raises(ValueError, match="move them to one device"):
        hf_flash.flash_attn_func(q, k.to("cuda:0"), v)


@pytest.mark.parametrize("offsets, longest", [("[0, 200]", 128), ("[0, 5, 3, 200]", 200), ("[1, 200]", 200)])
def test_offsets_that_make_no_sense_stop_the_program(offsets, longest):
    """Row 31: the host does not wait for the values, the device asserts them; never a silent result."""
    code = f"""
import torch, hf_flash
q = torch.randn(200, 1, 64, device="cuda", dtype=torch.bfloat16)
cu = torch.tensor({offsets}, dtype=torch.int32, device="cuda")
out = hf_flash.flash_attn_varlen_func(q, q, q, cu, cu, {longest}, {longest})
torch.cuda.synchronize()
print("silent")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ)
    assert result.returncode != 0 and "silent" not in result.stdout and "assert" in result.stderr
