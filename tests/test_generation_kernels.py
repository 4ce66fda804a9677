"""The decode kernel as generation calls it: over a cache that grows, a static one, and replayed from a graph."""

import collections

import pytest
import torch
import transformers
from families import VERSION, make
from replay import Recorder
from test_generation import generate, prompt
from torch.utils._python_dispatch import TorchDispatchMode

import hf_flash
from hf_flash import caches, graphs, library, ops


@pytest.mark.parametrize("name", ["gptj", "codegen", "gpt2", "llama"])
def test_growing_static_and_replayed_caches_give_one_text(name, backend, monkeypatch):
    ids, mask = (x.to(backend.device) for x in prompt("left"))
    ours = make(name).to(backend.device, torch.bfloat16 if backend.kernels else torch.float32)
    hf_flash.patch_model(ours, strict=True)
    growing = generate(ours, ids, mask, do_sample=False)
    if name == "gpt2" or not backend.kernels:  # the kernel applies the others' angles without rounding in between
        static = generate(ours, ids, mask, do_sample=False, cache_implementation="static", disable_compile=True)
        assert torch.equal(growing, static)
    if backend.device.type == "cpu":
        monkeypatch.setattr(graphs, "CAPTURE", Recorder())
    hf_flash.patch_model(ours, strict=True, cuda_graphs=True)
    assert torch.equal(generate(ours, ids, mask, do_sample=False), growing)
    assert "decoding steps replayed from CUDA graphs (11x)" in hf_flash.report(ours).notes


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window", "gptj", "gptj-full-rotary", "codegen"])
def test_a_step_that_turns_keys_itself_is_as_exact_as_stock(name, backend):
    ids, mask = prompt("left")
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    dtype = torch.bfloat16 if backend.kernels else torch.float32
    models = [make(name), make(name).to(dtype), hf_flash.patch_model(make(name).to(dtype), strict=True)]
    logits = []
    for model in models:
        model.to(backend.device if model is models[2] else "cpu")
        cache = transformers.DynamicCache(config=model.config)
        if model is models[2]:
            assert caches.grow(cache)
        with torch.no_grad():
            for part in (slice(0, 11), slice(11, 12)):
                given = {"input_ids": ids[:, part], "position_ids": position_ids[:, part]}
                given = {
                    key: x.to(model.device) for key, x in {**given, "attention_mask": mask[:, : part.stop]}.items()
                }
                out = model(**given, **{"cache" if VERSION >= (5, 24) else "past_key_values": cache}, use_cache=True)
        logits.append(out.logits.float().cpu())
    exact, stock, ours = logits
    assert (ours - exact).abs().max() <= 2 * (stock - exact).abs().max() + 1e-5


class Counter(TorchDispatchMode):
    """Counts operations that are no views."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func.name() != "aten::_unsafe_view":
            self.counts[func.name().split("::")[1].split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


# Beside the products of the projections: CodeGen brings its fused one into order.
@pytest.mark.parametrize(("name", "rest"), [("llama", {}), ("gptj", {}), ("codegen", {"clone": 1})])
def test_attention_of_a_step_is_its_projections_and_one_call(name, rest, backend):
    if backend.kernels:
        pytest.skip("counts what the host does, on the CPU as anywhere")
    ids, mask = prompt("left")
    model, counts = hf_flash.patch_model(make(name, **({"n_head": 8} if name == "codegen" else {})), strict=True), []
    layer = next(m for m in reversed(list(model.modules())) if type(m).__name__.endswith("Attention"))
    forward = layer.forward

    def counted(*args, **kwargs):
        with Counter() as counter:
            out = forward(*args, **kwargs)
        counts.append(counter.counts)
        return out

    layer.forward = counted
    generate(model, ids, mask, do_sample=False)
    products = {"mm": 2 if name == "codegen" else 4}
    assert [dict(count) for count in counts[1:]] == [{**products, "decode": 1, **rest}] * (len(counts) - 1)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_layers_of_a_step_share_one_set_of_parameters(name, backend, monkeypatch):
    if not backend.kernels:
        pytest.skip("parameters are the kernels'")
    ids, mask = (x.to(backend.device) for x in prompt("left"))
    model = hf_flash.patch_model(make(name).to(backend.device, torch.bfloat16), strict=True)
    layers = sum(row.fused is None for row in hf_flash.report(model))
    counts, prepare, decode = collections.Counter(), library.prepare, ops.DecodeCalls.__call__

    def counted(function, what):
        return lambda *args: counts.update([what]) or function(*args)

    monkeypatch.setattr(library, "prepare", counted(prepare, "prepared"))
    monkeypatch.setattr(ops.DecodeCalls, "__call__", counted(decode, "layers"))
    monkeypatch.setattr(ops, "decode", counted(ops.decode, "alone"))
    generate(model, ids, mask, do_sample=False)
    assert layers > 1 and counts == {"prepared": counts["layers"] // layers, "layers": counts["layers"]}


@pytest.mark.parametrize("interleaved", [False, True])
def test_angles_given_for_new_tokens_equal_those_of_their_rows(interleaved, backend):
    batch, new, rows, half = 3, 2, 40, 12
    dtype = torch.bfloat16 if backend.kernels else torch.float32
    options = {"dtype": dtype, "device": backend.device}
    q, k, v = (torch.randn(batch, new, heads, 32, **options) for heads in (4, 2, 2))
    cos, sin = (torch.randn(rows, half, **options) for _ in range(2))
    lengths = torch.tensor([0, 17, 38], dtype=torch.int32, device=backend.device)
    at = lengths.long()[:, None] + torch.arange(new, device=backend.device)
    old, found = torch.randn(2, batch, rows, 2, 32, **options), []
    for tables in ((cos, sin), (cos[at].contiguous(), sin[at].contiguous())):
        keys, values = old.clone()
        out, lse = ops.decode(
            q, keys, values, k, v, *tables, lengths, None, None, None, None, 0.2, -1, 0, 0.0, interleaved, 0
        )
        found.append((out, lse, keys, values))
    assert all(torch.equal(x, y) for x, y in zip(*found))
