"""What two GPUs show: a model spread over them, and sequences that they share."""

import sys
from pathlib import Path

import pytest
import torch
from families import assert_rows_close, hidden_of, make, mask_of, tokens

import hf_flash

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
BF16, DEVICES = torch.bfloat16, ("cuda:0", "cuda:1")


def spread(module, devices, prefix=""):
    """A device map: layers in turn over the devices, the rest on the first."""
    for name, child in module.named_children():
        if isinstance(child, torch.nn.ModuleList):
            yield from ((f"{prefix}{name}.{i}", devices[i % len(devices)]) for i in range(len(child)))
        elif any(isinstance(inner, torch.nn.ModuleList) for inner in child.modules()):
            yield from spread(child, devices, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", devices[0]


@pytest.fixture(params=[0, 1], ids=["first is current", "second is current"])
def current(request):
    with torch.cuda.device(request.param):
        yield


@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("name", ["llama", "gptj", "gpt2", "bert"])
def test_a_model_spread_over_two_gpus(name, patch_first, current):
    """Row 53: as a device map leaves it, patched before or after: forward, backward and generation as on one GPU."""
    accelerate = pytest.importorskip("accelerate")
    mask = mask_of("left").to(DEVICES[0])
    given = {"input_ids": tokens().to(DEVICES[0]).masked_fill(mask == 0, 0), "attention_mask": mask}
    whole = hf_flash.patch_model(make(name).to(DEVICES[0], BF16))
    model = make(name).to(BF16)
    if patch_first:
        hf_flash.patch_model(model)
    places = dict(spread(model, DEVICES))
    assert set(places.values()) == set(DEVICES)
    accelerate.dispatch_model(model, places, main_device=DEVICES[0], force_hooks=True)
    if not patch_first:
        hf_flash.patch_model(model)
    for each in (whole, model):
        each.train()
        out = hidden_of(each(**given))
        (out.float() * mask[:, :, None].to(out.device)).square().mean().backward()
        each.eval()
    assert (hf_flash.report(model).fused_calls, hf_flash.report(model).stock_calls) == (2, 0)
    assert_rows_close(hidden_of(model(**given)).to(DEVICES[0]).float(), hidden_of(whole(**given)).float(), mask, 1e-2)
    for (key, expected), found in zip(whole.named_parameters(), model.parameters(), strict=True):
        if expected.grad is None:
            assert found.grad is None
            continue
        scale = expected.grad.abs().max().clamp(min=1e-2)
        assert (found.grad.to(DEVICES[0]) - expected.grad).abs().max() <= 2e-2 * scale, key
    if name != "bert":
        options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        assert torch.equal(model.generate(**given, **options), whole.generate(**given, **options))


def test_sequences_shared_by_two_gpus_have_the_gradients_of_one(tmp_path):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import multi_gpu
    import record

    arguments = ["--tiny", "--steps", "2", "--cells", "sequences/gradients,sequences/train", "--output", str(tmp_path)]
    assert multi_gpu.main(arguments) == 0
    (row,) = record.load(next(tmp_path.glob("*.json")))["models"]
    assert row["gradients"]["shared"] < 3 * row["gradients"]["sdpa"] and row["peak_gib"]["hf_flash"] > 0
