"""The torch.library ops and what PyTorch does with them: opcheck, compile, export, checkpointing."""

import pytest
import torch
from oracle import make
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import hf_flash

OPS = torch.ops.hf_flash


def tensors(backend, *shapes):
    return [make(shape, backend.dtypes[0], backend.device) for shape in shapes]


def integers(backend, values):
    return torch.tensor(values, dtype=torch.int32, device=backend.device)


SETTINGS = (9, 11, 0.25, -1, 0, 0.0)


@pytest.mark.parametrize("features", ["dense", "varlen", "alibi and dropout"])
def test_opcheck_of_forward_and_backward(backend, features):
    """Row 83."""
    alibi = rng_state = cu_q = cu_k = None
    if features == "varlen":
        q, k, v = tensors(backend, (18, 4, 64), (22, 2, 64), (22, 2, 64))
        cu_q, cu_k = integers(backend, [0, 9, 18]), integers(backend, [0, 11, 22])
    else:
        q, k, v = tensors(backend, (2, 9, 4, 64), (2, 11, 2, 64), (2, 11, 2, 64))
    if features == "alibi and dropout":
        alibi = torch.rand(4, device=backend.device)
        rng_state = torch.tensor([5, 7], device=backend.device)
    dropout = 0.1 if rng_state is not None else 0.0
    sequences = (cu_q, cu_k, None, None)
    arguments = (q, k, v, *sequences, None, None, alibi, rng_state, *SETTINGS, dropout)
    opcheck(OPS.forward.default, arguments)
    out, lse = OPS.forward(*arguments)
    settings = (*sequences, alibi, rng_state, *SETTINGS, dropout, True)
    for packing, wanted in ((0, [True] * 3), (0, [True, False, True]), (2, [True, True, False])):
        opcheck(OPS.backward.default, (torch.randn_like(out), None, q, k, v, out, lse, *settings, packing, wanted))
    opcheck(
        OPS.backward.default,
        (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, *settings, 0, [True] * 3),
    )


def test_opcheck_of_decode(backend):
    q, k, v = tensors(backend, (2, 1, 4, 64), (2, 1, 2, 64), (2, 1, 2, 64))
    caches = tensors(backend, (2, 32, 2, 64), (2, 32, 2, 64))
    angles = torch.rand(32, 16, device=backend.device)
    rotary = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
    opcheck(
        OPS.decode.default,
        (q, *caches, k, v, *rotary, integers(backend, [3, 20]), None, None, None, None, 0.125, -1, 0, 0.0, True, 0),
    )


def attend(q, k, v, dropout_p=0.0):
    out, lse = hf_flash.flash_attn_func(q * 1.0, k, v, dropout_p, causal=True, return_lse=True)
    return out.sin(), lse


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_compile_without_a_graph_break(backend, dynamic, dropout_p):
    """Row 83: fullgraph, forward and backward, also with dynamic lengths."""
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (9, 17, 33) if dynamic else (17,):
        inputs = [x.requires_grad_() for x in tensors(backend, *((2, n, 2, 64),) * 3)]
        results = []
        for function in (attend, compiled):
            torch.manual_seed(3)
            out, lse = function(*inputs, dropout_p)
            results.append((out, lse, *torch.autograd.grad(out.sum() + lse.sum(), inputs)))
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("form", ["plain", "packed", "varlen", "short of arguments", "cache"])
def test_compile_of_each_public_form(backend, form):
    """Row 83."""
    torch._dynamo.reset()
    q, k, v = tensors(backend, *((1, 20, 2, 64),) * 3)
    cu = integers(backend, [0, 8, 20])
    qkv = torch.stack((q, k, v), 2)

    def run(q, k, v, qkv):
        if form == "plain":
            return hf_flash.flash_attn_func(q, k, v, causal=True)
        if form == "short of arguments":
            return hf_flash.flash_attn_func(q[..., :60], k[..., :60], v[..., :60], window_size=(3, 3))
        if form == "packed":
            return hf_flash.flash_attn_qkvpacked_func(qkv, causal=True)
        if form == "varlen":
            return hf_flash.flash_attn_varlen_qkvpacked_func(qkv[0], cu, 12, causal=True)
        return hf_flash.flash_attn_with_kvcache(q[:, :1], k, v, k[:, :1], v[:, :1], cache_seqlens=cu[1:2], causal=True)

    expected = run(q, k.clone(), v.clone(), qkv)
    out = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v, qkv)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    if form == "cache":
        assert torch.equal(k[:, 8], k[:, 0])


def test_inductor_compiles_it(backend):
    """Row 83, with the default compiler."""
    if backend.name != "cuda":
        pytest.skip("compiling C++ takes long; the GPU suite does it")
    torch._dynamo.reset()
    inputs = [x.requires_grad_() for x in tensors(backend, *((2, 33, 2, 64),) * 3)]
    results = []
    for function in (attend, torch.compile(attend, fullgraph=True)):
        out, lse = function(*inputs)
        results.append((out, lse, *torch.autograd.grad(out.sum() + lse.sum(), inputs)))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("strict", [False, True])
def test_export(backend, strict):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return hf_flash.flash_attn_func(q, k, v, causal=True, return_lse=True)

    inputs = tuple(tensors(backend, *((2, 9, 2, 64),) * 3))
    program = torch.export.export(Module(), inputs, strict=strict)
    assert any("hf_flash.forward" in str(node.target) for node in program.graph.nodes)
    for a, b in zip(program.module()(*inputs), Module()(*inputs)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("form", ["plain", "qkvpacked", "kvpacked", "varlen", "varlen_qkvpacked", "varlen_kvpacked"])
def test_checkpointed_dropout_draws_the_same_mask(backend, form, reentrant):
    """Rows 58, 75: gradients bit-equal to those without checkpointing, same seed."""
    cu = integers(backend, [0, 8, 20])
    qkv = make((1, 20, 3, 2, 64), backend.dtypes[0], backend.device)
    options = dict(dropout_p=0.1, causal=True, deterministic=True)
    offsets = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=12, max_seqlen_k=12)

    def run(qkv):
        packed = qkv[0]
        if form == "plain":
            return hf_flash.flash_attn_func(*qkv.unbind(2), **options)
        if form == "qkvpacked":
            return hf_flash.flash_attn_qkvpacked_func(qkv, **options)
        if form == "kvpacked":
            return hf_flash.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], **options)
        if form == "varlen":
            return hf_flash.flash_attn_varlen_func(*packed.unbind(1), **offsets, **options)
        if form == "varlen_qkvpacked":
            return hf_flash.flash_attn_varlen_qkvpacked_func(packed, cu, 12, **options)
        return hf_flash.flash_attn_varlen_kvpacked_func(packed[:, 0], packed[:, 1:], **offsets, **options)

    results = []
    for function in (run, lambda x: checkpoint(run, x, use_reentrant=reentrant)):
        torch.manual_seed(11)
        x = qkv.detach().requires_grad_()
        out = function(x)
        out.float().square().sum().backward()
        results.append((out, x.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_ops_seen_by_a_dispatch_mode_are_the_registered_ones(backend):
    """Calls skip the dispatcher, except where something listens to it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    q, k, v = tensors(backend, *((1, 9, 2, 64),) * 3)
    with Listen():
        hf_flash.flash_attn_func(q, k, v, return_lse=True)
    assert "hf_flash.forward.default" in seen


def test_meta_tensors_have_the_shapes_of_the_result():
    q, k = torch.empty(2, 9, 4, 64, device="meta"), torch.empty(2, 9, 2, 64, device="meta")
    out, lse = hf_flash.flash_attn_func(q, k, k, return_lse=True)
    assert out.shape == q.shape and lse.shape == (2, 4, 9) and lse.dtype == torch.float32
    out, lse = hf_flash.flash_attn_func(q.requires_grad_(), k, k, return_lse=True)
    out.sum().backward()
    assert q.grad.shape == q.shape


def test_second_derivatives_are_refused(backend):
    q, k, v = (x.requires_grad_() for x in tensors(backend, *((1, 9, 2, 64),) * 3))
    out, _ = hf_flash.flash_attn_func(q, k, v, return_lse=True)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        dq.sum().backward()
