"""A model whose layers lie on several devices, as device_map leaves it. The second device is meta: it has no values,
but everything that is on the wrong device fails there."""

import pytest
import torch
from families import ENCODERS, FAMILIES, assert_rows_close, hidden_of, make, mask_of, tokens

import hf_flash
from hf_flash import layout

accelerate = pytest.importorskip("accelerate")
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(3, -1)


def spread(model):
    """Embeddings and half of the layers on the CPU, the other half, the last norm and the head on meta."""
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    inside = {module for layer in layers for module in layer.modules()} - {*layers}
    for name, module in model.named_modules():
        outside = not any(True for _ in module.children()) and module not in inside
        if module in layers or outside:
            later = module in {*layers[len(layers) // 2 :]} or name.split(".")[0] in ("lm_head", "cls")
            later |= name.split(".")[-1] in ("norm", "ln_f")
            device = torch.device("meta" if later else "cpu")
            hook = accelerate.hooks.AlignDevicesHook(execution_device=device, io_same_device=False)
            accelerate.hooks.add_hook_to_module(module.to(device), hook)
    return model


@pytest.fixture
def moves(monkeypatch):
    """How often rows went to meta."""
    found, original = [], layout.Rows.to

    def counted(rows, device):
        if torch.device(device).type == "meta":
            found.append(rows)
        return original(rows, device)

    monkeypatch.setattr(layout.Rows, "to", counted)
    return found


@pytest.mark.parametrize("given", ["right", "left", "packed"])
@pytest.mark.parametrize("name", [*FAMILIES, "llama by name", "gpt2 by name"])
def test_metadata_moves_once_to_each_device_however_many_layers_are_there(name, given, moves):
    """Row 53."""
    name, by_name = name.removesuffix(" by name"), name.endswith("by name")
    depth = {"n_layer" if name in ("gpt2", "gptj", "codegen") else "num_hidden_layers": 8}
    model = spread(make(name, attention="hf_fused" if by_name else "eager", **depth))
    if not by_name:
        hf_flash.patch_model(model, strict=True)
    batch = {"input_ids": tokens()}
    batch |= {"position_ids": PACKED} if given == "packed" else {"attention_mask": mask_of(given)}
    if name not in ENCODERS:
        batch["use_cache"] = False
    out = hidden_of(model(**batch))
    assert out.device.type == "meta" and out.shape[:2] == (3, 12)
    report = hf_flash.report(model)
    assert (report.fused_calls, report.stock_calls) == (8, 0) and len(moves) <= 4


@pytest.mark.parametrize("name", ["llama", "gptj", "bert"])
def test_inputs_on_two_devices_are_refused_with_both_names(name):
    """Row 53."""
    model, given = hf_flash.patch_model(make(name)), {"input_ids": tokens(), "attention_mask": mask_of("right")}
    with pytest.raises(
        ValueError, match=r"attention_mask on cpu and position_ids on meta: .*\.to\(input_ids\.device\)"
    ):
        model(**given, position_ids=PACKED.to("meta"))


@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_a_model_whose_map_leaves_layers_on_disk(name, tmp_path):
    """Weights come in with a layer's inputs and go again: hooks on every module, put there by from_pretrained."""
    plain = make(name)
    plain.save_pretrained(tmp_path)
    layers = "model.layers" if name == "llama" else "transformer.h"
    places = {key.rsplit(".", 1)[0]: "cpu" for key in plain.state_dict() if not key.startswith(layers)}
    places |= {f"{layers}.0": "cpu", f"{layers}.1": "disk"}
    places |= {"model.rotary_emb": "cpu"} if name == "llama" else {}
    model = type(plain).from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "offload")
    hf_flash.patch_model(model.eval(), strict=True)
    mask = mask_of("left")
    given = {"input_ids": tokens().masked_fill(mask == 0, 0), "attention_mask": mask}
    assert any(parameter.device.type == "meta" for parameter in model.parameters())
    assert_rows_close(model(**given).logits, plain(**given).logits, mask)
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(**given, **options), plain.generate(**given, **options))


def test_under_torchs_context_parallelism_attention_is_left_to_sdpa(monkeypatch):
    """It puts a function of its own in sdpa's place, which alone knows of the other processes' keys."""
    original, calls = torch.nn.functional.scaled_dot_product_attention, []

    def shared(*args, **kwargs):
        calls.append(kwargs["is_causal"])
        return original(*args, **kwargs)

    shared.__module__ = "torch.distributed.tensor.experimental"
    model, ids = hf_flash.patch_model(make("llama")), tokens()
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", shared)
    with pytest.warns(UserWarning, match="context parallelism .*split_sequences"):
        found = model(ids, use_cache=False).logits
    assert calls == [True, True] and hf_flash.report(model).fused_calls == 0
    torch.testing.assert_close(found, make("llama")(ids).logits, atol=1e-5, rtol=1e-5)
