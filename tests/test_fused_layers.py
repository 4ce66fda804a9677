"""patch_model(fused_layers=True). On the CPU stand-ins for Liger-Kernel overwrite what its kernels overwrite."""

import copy
import pickle
import sys
from types import MethodType, ModuleType

import pytest
import torch
import transformers
from families import (
    EVERY,
    MASKS,
    VERSION,
    assert_gradients_close,
    assert_rows_close,
    batch_of,
    gradients,
    make,
    mask_of,
    positions_of,
    tokens,
)

import hf_flash
from hf_flash import fused_layers

transformers.logging.set_verbosity_error()
LLAMAS = ["llama", "llama-mqa", "mistral", "qwen2", "qwen3", "phi3"]
GELUS = ["gpt2", "gptj", "codegen"]
NAME = "liger_kernel.transformers.functional"


# ---- stand-ins -------------------------------------------------------------------------------------------------------


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, in_place):
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.in_place = eps, in_place
        return torch.nn.functional.rms_norm(x, weight.shape, weight.to(x.dtype), eps)

    @staticmethod
    def backward(ctx, grad):
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            out = torch.nn.functional.rms_norm(x, weight.shape, weight.to(x.dtype), ctx.eps)
        found = torch.autograd.grad(out, (x, weight), grad)
        return grad.copy_(found[0]) if ctx.in_place else found[0], found[1], None, None


class SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        a, b = a.contiguous(), b.contiguous()
        ctx.save_for_backward(a, b)
        return torch.nn.functional.silu(a) * b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        x, y = (t.clone().requires_grad_() for t in (a, b))
        with torch.enable_grad():
            out = torch.nn.functional.silu(x) * y
        found = torch.autograd.grad(out, (x, y), grad)
        return a.data.copy_(found[0]), b.data.copy_(found[1])


def turned(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


class Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return tuple(x.data.copy_(turned(x, cos, sin)) for x in (q, k))

    @staticmethod
    def backward(ctx, *grads):
        cos, sin = ctx.saved_tensors
        return *(turned(x, cos, -sin) for x in grads), None, None


@pytest.fixture
def calls(monkeypatch):
    """Liger-Kernel's functions on the CPU; the names of those that are called."""
    called, stand_in = [], ModuleType(NAME)

    def liger_rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
        called.append("norm")
        return Norm.apply(X, W, eps, in_place)

    def liger_swiglu(a, b):
        called.append("mlp")
        return SwiGlu.apply(a, b)

    def liger_rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        called.append("rope")
        return Rope.apply(q, k, cos, sin)

    vars(stand_in).update(liger_rms_norm=liger_rms_norm, liger_swiglu=liger_swiglu, liger_rope=liger_rope)
    for package in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, NAME, stand_in)
    monkeypatch.setattr(fused_layers, "DEVICES", ("cuda", "cpu"))
    return called


def fused(name, head=None, **options):
    return hf_flash.patch_model(make(name, head), fused_layers=True, **options)


def lora(model, targets):
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, lora_dropout=0.0)
    return peft.get_peft_model(model, config)


def assert_trains_as(ours, stock, given):
    found, expected = ours(**given).loss, stock(**given).loss
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    found.backward()
    expected.backward()
    assert gradients(ours)
    assert_gradients_close(ours, stock)


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", LLAMAS)
def test_llamas_layers_run_in_ligers_kernels_with_stocks_loss_and_gradients(name, kind, calls):
    assert_trains_as(fused(name).train(), make(name).train(), batch_of(name, kind))
    norms = 9 if name == "qwen3" else 5
    assert sorted(calls) == ["mlp"] * 2 + ["norm"] * norms + ["rope"] * 2


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", GELUS)
def test_gelus_run_in_pytorchs_kernel_with_stocks_loss_and_gradients(name, kind, monkeypatch):
    calls, gelu = [], torch.nn.functional.gelu
    monkeypatch.setattr(torch.nn.functional, "gelu", lambda *a, **k: (calls.append(1), gelu(*a, **k))[1])
    assert_trains_as(fused(name).train(), make(name).train(), batch_of(name, kind))
    assert len(calls) == 2


def test_gelu_in_bf16_is_no_further_from_the_exact_one_than_stocks():
    x = torch.randn(1000) * 3
    stock = transformers.activations.NewGELUActivation()
    exact = stock(x.bfloat16().double())
    theirs, found = stock(x.bfloat16()), fused_layers.tanh_gelu(stock, x.bfloat16())
    assert (found - exact).abs().max() <= (theirs - exact).abs().max()


def test_packed_documents_without_logits_train_as_stock_alone(calls):
    ours = fused("llama", keep_logits=False).train()
    stock, ids, positions = make("llama").train(), tokens(1, 9), positions_of([(3, 4, 2)])
    labels = ids.masked_fill(positions == 0, -100)
    found = ours(input_ids=ids, position_ids=positions, labels=labels)
    assert "logits" not in found
    found.loss.backward()
    for start, n in ((0, 3), (3, 4), (7, 2)):
        part = slice(start, start + n)
        alone = {"input_ids": ids[:, part], "labels": labels[:, part]}
        (stock(**alone).loss * (n - 1) / 6).backward()
    assert_gradients_close(ours, stock)


def test_a_gradient_that_belongs_to_another_summand_too_stays_as_it_is(calls):
    extra, found = [torch.zeros(3, 12, 64, requires_grad=True) for _ in range(2)], []
    for model, summand in zip((fused("llama", "AutoModel"), make("llama", "AutoModel")), extra):
        before = summand * 2  # its gradient is worked out after the norm's
        out = model(input_ids=tokens(seed=1), use_cache=False).last_hidden_state + before
        (out * torch.linspace(-1, 1, 64)).sum().backward()
        found.append(summand.grad)
    assert torch.equal(*found)


def test_a_second_backward_of_a_forward_raises(calls):
    """The first has overwritten what the forward saved: the second would be wrong in silence."""
    loss = fused("llama").train()(**batch_of("llama", "right")).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward for each forward.*fused_layers=False"):
        loss.backward()


def test_generation_writes_what_stock_writes(calls):
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    mask = mask_of("left")
    given = {"input_ids": tokens().masked_fill(mask == 0, 0), "attention_mask": mask}
    assert torch.equal(fused("llama").generate(**given, **options), make("llama").generate(**given, **options))
    assert {"norm", "mlp", "rope"} == set(calls)


# ---- what fine-tuning puts around them -------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_checkpointed_layers_train_as_stock(name, reentrant, calls):
    ours, stock = fused(name).train(), make(name).train()
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        ours.enable_input_require_grads()
    assert_trains_as(ours, stock, batch_of(name, "right"))
    assert name == "gpt2" or calls.count("mlp") == 4


@pytest.mark.parametrize("order", ["patch first", "adapter first"])
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_lora_on_every_projection_trains_as_stock(name, order, calls):
    stock, ours = lora(make(name), "all-linear").train(), make(name)
    if order == "patch first":
        ours = lora(hf_flash.patch_model(ours, fused_layers=True), "all-linear").train()
    else:
        ours = hf_flash.patch_model(lora(ours, "all-linear").train(), fused_layers=True)
    assert_trains_as(ours, stock, batch_of(name, "right"))
    assert calls.count("norm") == 5 and calls.count("mlp") == 2 and calls.count("rope") == 2
    hf_flash.unpatch_model(ours)
    calls.clear()
    ours(**batch_of(name, "right"))
    assert calls == []


def test_autocast_keeps_weights_and_gradients_in_fp32(calls):
    ours, given = fused("llama").train(), batch_of("llama", "right")
    exact = make("llama")(**given).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = ours(**given).loss
    loss.backward()
    assert abs(loss - exact) < 0.15 and {p.grad.dtype for p in ours.parameters()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_compiler_fuses_stocks_layers_in_one_graph(name, calls):
    torch.compiler.reset()
    ours, stock = fused(name).train(), make(name).train()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    given = {**batch_of(name, "full"), "use_cache": False}
    found, expected = compiled(**given).loss, stock(**given).loss
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    found.backward()
    expected.backward()
    assert_gradients_close(ours, stock)
    assert calls == []


def test_layers_that_liger_has_patched_already_stay_its_own(calls):
    def forward(self, hidden):
        return torch.nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.variance_epsilon)

    model = make("llama")
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = MethodType(forward, module)
    before = model.model.norm.forward
    hf_flash.patch_model(model, fused_layers=True)
    assert model.model.norm.forward == before
    assert "layers fused: 2 rotary embedding, 2 LlamaMLP" in str(hf_flash.report(model))


# ---- the life of the patch -------------------------------------------------------------------------------------------


def attributes(model):
    return {name: dict(module.__dict__) for name, module in model.named_modules()}


@pytest.mark.parametrize("name", EVERY)
def test_unpatching_leaves_the_model_as_it_was(name, calls):
    model = make(name)
    before, parameters = attributes(model), {key: id(p) for key, p in model.named_parameters()}
    outside = repr(model), list(model.state_dict()), [type(m) for m in model.modules()]
    hf_flash.patch_model(model, fused_layers=True)
    model(**batch_of(name, "right"))
    assert (repr(model), list(model.state_dict()), [type(m) for m in model.modules()]) == outside
    assert {key: id(p) for key, p in model.named_parameters()} == parameters
    hf_flash.unpatch_model(model)
    after = attributes(model)
    for key, values in before.items():
        assert after[key].keys() == values.keys(), key
        assert all(after[key][attribute] is old for attribute, old in values.items()), key


def test_patching_again_turns_the_layers_off_and_on(calls):
    model, given = make("llama"), batch_of("llama", "right")
    for wanted in (False, True, True, False):
        hf_flash.patch_model(model, fused_layers=wanted)
        calls.clear()
        model(**given)
        assert bool(calls) is wanted and hf_flash.report(model).stock_calls == 0
        assert ("5 LlamaRMSNorm" in str(hf_flash.report(model))) is wanted


def test_other_models_of_the_class_stay_stock(calls):
    other = make("llama")
    fused("llama")
    make("llama")(**batch_of("llama", "right"))
    other(**batch_of("llama", "right"))
    assert calls == []


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_copies_keep_their_own_fused_layers(name, way, calls):
    model = fused(name)
    given = batch_of(name, "right")
    expected = model(**given).logits
    other, count = way(model), len(calls)
    hf_flash.unpatch_model(model)
    assert_rows_close(other(**given).logits, expected, given["attention_mask"])
    assert len(calls) == 2 * count and "layers fused" in str(hf_flash.report(other))
    hf_flash.unpatch_model(other)
    assert not any("forward" in module.__dict__ for module in other.modules())


def test_a_missing_liger_kernel_is_named_and_nothing_is_changed(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    model = make("llama")
    before = attributes(model)
    with pytest.raises(ImportError, match="fused_layers=True.*llama.*pip install liger-kernel"):
        hf_flash.patch_model(model, fused_layers=True)
    assert attributes(model) == before


@pytest.mark.parametrize("name", ["gpt2", "gptj", "codegen", "bert"])
def test_models_without_such_layers_need_no_other_library(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    report = str(hf_flash.report(fused(name)))
    assert ("2 NewGELUActivation" if name in GELUS else "none that are not already") in report


def test_on_the_cpu_ligers_kernels_are_not_called(calls, monkeypatch):
    monkeypatch.setattr(fused_layers, "DEVICES", ("cuda",))
    assert_trains_as(fused("llama").train(), make("llama").train(), batch_of("llama", "right"))
    assert calls == []


def test_mlps_of_another_activation_and_partial_rotary_embeddings_stay_stock(calls):
    model = hf_flash.patch_model(make("llama", hidden_act="gelu"), fused_layers=True)
    model(**batch_of("llama", "right"))
    assert "mlp" not in calls and "norm" in calls
    calls.clear()
    change = {"partial_rotary_factor": 0.5}
    if VERSION >= (5, 0):
        change = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **change}}
    stock, ours = make("phi3", **change), hf_flash.patch_model(make("phi3", **change), fused_layers=True)
    given = batch_of("phi3", "right")
    assert_rows_close(ours(**given).logits, stock(**given).logits, given["attention_mask"])
    assert "rope" not in calls and "mlp" in calls


# ---- Liger-Kernel itself ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
def test_liger_kernels_gradients_are_as_near_to_fp32_as_stocks(name):
    pytest.importorskip("liger_kernel")
    given = {key: value.cuda() for key, value in batch_of(name, "right").items()}
    exact, stock, ours = (make(name).cuda().train() for _ in range(3))
    hf_flash.patch_model(ours, fused_layers=True)
    for model in (exact, stock.bfloat16(), ours.bfloat16()):
        model(**given).loss.backward()
    exact, stock, ours = (gradients(model) for model in (exact, stock, ours))
    for key, grad in exact.items():
        bound = 3 * (stock[key].float() - grad).norm() + 1e-2 * grad.norm()
        assert (ours[key].float() - grad).norm() <= bound, key
