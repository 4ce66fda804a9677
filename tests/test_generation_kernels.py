"""The decode kernel as generation calls it: over a cache that grows, a static one, and replayed from a graph."""

import pytest
import torch
from families import make
from replay import Recorder
from test_generation import generate, prompt

import hf_flash
from hf_flash import graphs


@pytest.mark.parametrize("name", ["llama", "gptj", "mistral"])
def test_growing_static_and_replayed_caches_give_one_text(name, backend, monkeypatch):
    ids, mask = (x.to(backend.device) for x in prompt("left"))
    ours = make(name).to(backend.device, torch.bfloat16 if backend.kernels else torch.float32)
    hf_flash.patch_model(ours, strict=True)
    growing = generate(ours, ids, mask, do_sample=False)
    static = generate(ours, ids, mask, do_sample=False, cache_implementation="static", disable_compile=True)
    if backend.device.type == "cpu":
        monkeypatch.setattr(graphs, "CAPTURE", Recorder())
    hf_flash.patch_model(ours, strict=True, cuda_graphs=True)
    replayed = generate(ours, ids, mask, do_sample=False)
    assert torch.equal(growing, static) and torch.equal(replayed, static)
    assert "decoding steps replayed from CUDA graphs (11x)" in hf_flash.report(ours).notes
