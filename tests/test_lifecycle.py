"""The life of a patch: one instance only, undone bit for bit, copied, pickled, saved, wrapped and hooked."""

import copy
import inspect
import io
import json
import pickle
import subprocess
import sys

import pytest
import torch
import transformers
from families import CAUSAL, FAMILIES, VERSION, assert_rows_close, hidden_of, make, mask_of, tokens

import hf_flash

HEADS = [(name, None) for name in FAMILIES] + [("bert", "AutoModel"), ("llama", "AutoModel")]


def state_of(model):
    """Everything of a module tree that a patch could change: attributes of every module but parameters' values."""
    return {
        name: {k: v for k, v in module.__dict__.items() if k != "_hf_hook"} for name, module in model.named_modules()
    }


def padded():
    mask = mask_of("right")
    return {"input_ids": tokens().masked_fill(mask == 0, 0), "attention_mask": mask}


@pytest.mark.parametrize("name, head", HEADS)
def test_patch_and_unpatch_leave_the_model_bit_equal(name, head):
    """Row 84."""
    model = make(name, head)
    before, attributes = hidden_of(model(**padded_once())), state_of(model)
    parameters = {key: id(value) for key, value in model.named_parameters()}
    outside = (repr(model), inspect.signature(model.forward), list(model.state_dict()), type(model).__name__)
    config = model.config
    assert hf_flash.patch_model(model) is model
    assert {key: id(value) for key, value in model.named_parameters()} == parameters
    assert (repr(model), inspect.signature(model.forward), list(model.state_dict()), type(model).__name__) == outside
    assert model.config is not config and config._attn_implementation == "eager"
    model(**padded_once())
    assert hf_flash.unpatch_model(model) is model
    assert model.config is config
    after = state_of(model)
    assert after.keys() == attributes.keys()
    for key, value in attributes.items():
        assert after[key].keys() == value.keys(), key
        assert all(after[key][attribute] is old for attribute, old in value.items()), key
    assert torch.equal(hidden_of(model(**padded_once())), before)
    assert hf_flash.unpatch_model(model) is model


def padded_once():
    mask = mask_of("right")
    return {"input_ids": tokens(seed=11).masked_fill(mask == 0, 0), "attention_mask": mask}


@pytest.mark.parametrize("name", FAMILIES)
def test_patching_twice_is_patching_once(name):
    """Row 84."""
    model = hf_flash.patch_model(make(name))
    attributes = state_of(model)
    hf_flash.patch_model(model)
    assert all(
        now is attributes[key][attribute] for key, value in state_of(model).items() for attribute, now in value.items()
    )
    model(**padded_once())
    assert hf_flash.report(model).fused_calls == 2
    hf_flash.unpatch_model(model)
    assert "eager" == model.config._attn_implementation and not hf_flash.report(model).patched


@pytest.mark.parametrize("name", FAMILIES)
def test_another_model_of_the_same_config_object_is_untouched(name):
    """Row 84."""
    first = make(name)
    second = type(first)(first.config).eval()
    second.load_state_dict(first.state_dict())
    assert second.config is first.config
    hf_flash.patch_model(first)
    attributes = state_of(second)
    assert second.config._attn_implementation == "eager" and not hf_flash.report(second).patched
    assert not any(key.startswith("_hf_flash") for value in attributes.values() for key in value)
    given = padded_once()
    assert_rows_close(hidden_of(first(**given)), hidden_of(second(**given)), given["attention_mask"])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_copy_uses_its_own_weights_and_unpatches_alone(name):
    """Row 87."""
    original = hf_flash.patch_model(make(name))
    given = padded_once()
    before = hidden_of(original(**given))
    twin = copy.deepcopy(original)
    assert torch.equal(hidden_of(twin(**given)), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    assert not torch.allclose(hidden_of(twin(**given)), before)
    assert torch.equal(hidden_of(original(**given)), before)
    assert hf_flash.report(twin).fused_calls > 0
    hf_flash.unpatch_model(twin)
    assert hf_flash.report(original).patched and not hf_flash.report(twin).patched
    assert torch.equal(hidden_of(original(**given)), before)


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_pickled_model_comes_back_patched(name, how):
    """Row 87."""
    original = hf_flash.patch_model(make(name))
    given = padded_once()
    before = hidden_of(original(**given))
    if how == "pickle":
        twin = pickle.loads(pickle.dumps(original))
    else:
        buffer = io.BytesIO()
        torch.save(original, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    called = hf_flash.report(twin).fused_calls
    assert torch.equal(hidden_of(twin(**given)), before)
    assert hf_flash.report(twin).fused_calls == called + 2
    assert hf_flash.report(hf_flash.unpatch_model(twin)).patched is False


def test_a_pickled_model_loads_in_a_fresh_process(tmp_path):
    """Row 87."""
    original = hf_flash.patch_model(make("gptj"))
    given = padded_once()
    torch.save((original, given, hidden_of(original(**given)).detach()), tmp_path / "model.pt")
    program = (
        "import sys, torch\n"
        "model, given, expected = torch.load(sys.argv[1], weights_only=False)\n"
        "torch.testing.assert_close(model(**given).logits, expected)\n"
        "import hf_flash\n"
        "assert hf_flash.report(model).patched\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "model.pt")], check=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_saved_is_what_stock_saves(name, tmp_path):
    """Row 91."""
    model = make(name)
    model.save_pretrained(tmp_path / "stock")
    hf_flash.patch_model(model)
    model.save_pretrained(tmp_path / "ours")
    for file in ("config.json", "generation_config.json"):
        if (tmp_path / "stock" / file).exists():
            assert (tmp_path / "ours" / file).read_text() == (tmp_path / "stock" / file).read_text()
    assert "hf_fused" not in json.dumps(model.config.to_dict(), default=str)
    loaded = type(model).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    assert loaded.state_dict().keys() == model.state_dict().keys()
    given = padded_once()
    assert_rows_close(hidden_of(model(**given)), hidden_of(loaded(**given)), given["attention_mask"])


def test_the_name_is_there_after_the_import_alone(tmp_path):
    make("llama").save_pretrained(tmp_path)
    program = (
        "import sys, torch, hf_flash\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation='hf_fused')\n"
        "model(input_ids=torch.ones(1, 4, dtype=torch.int64))\n"
        "assert hf_flash.report(model).fused_calls == 2, hf_flash.report(model)\n"
        "model.save_pretrained(sys.argv[1])\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    assert "hf_fused" not in (tmp_path / "config.json").read_text()


# ---- wrappers and hooks ----------------------------------------------------------------------------------------------


def hooked(name, order):
    """A model with accelerate's device hooks on every module, patched before or after they were put there."""
    accelerate = pytest.importorskip("accelerate")
    model = make(name)
    if order == "patch first":
        hf_flash.patch_model(model)
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    for module in model.modules():
        accelerate.hooks.add_hook_to_module(
            module, accelerate.hooks.AlignDevicesHook("cpu", io_same_device=True), append=True
        )
    if order == "hooks first":
        hf_flash.patch_model(model)
    return model


@pytest.mark.parametrize("order", ["patch first", "hooks first"])
@pytest.mark.parametrize("name", ["llama", "gptj", "bert", "gpt2"])
def test_device_hooks_before_or_after_the_patch(name, order):
    from accelerate.hooks import remove_hook_from_submodules

    model, stock, given = hooked(name, order), make(name), padded_once()
    expected = hidden_of(stock(**given))
    assert_rows_close(hidden_of(model(**given)), expected, given["attention_mask"])
    assert hf_flash.report(model).fused_calls == 2 and hf_flash.report(model).stock_calls == 0
    hf_flash.unpatch_model(model)
    assert torch.equal(hidden_of(model(**given)), expected)
    remove_hook_from_submodules(model)
    assert torch.equal(hidden_of(model(**given)), expected)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_removing_device_hooks_keeps_the_patch(name):
    from accelerate.hooks import remove_hook_from_submodules

    model, given = hooked(name, "hooks first"), padded_once()
    remove_hook_from_submodules(model)
    hf_flash.report(model)
    model(**given)
    assert hf_flash.report(model).fused_calls == 2


@pytest.mark.parametrize("order", ["patch first", "prepare first"])
@pytest.mark.parametrize("name, head", [("llama", None), ("gptj", None), ("bert", "AutoModel"), ("gpt2", None)])
def test_accelerate_prepare_before_or_after_the_patch(name, head, order):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model, given = make(name, head), padded_once()
    stock = hidden_of(model(**given))
    if order == "patch first":
        hf_flash.patch_model(model)
    prepared = accelerator.prepare(model)
    if order == "prepare first":
        assert hf_flash.patch_model(prepared) is prepared
    found = hidden_of(prepared(**given))
    assert hf_flash.report(prepared).fused_calls == 2
    assert found.dtype == torch.float32  # accelerate turns autocast's outputs back
    difference = (found - stock)[given["attention_mask"].bool()].abs().max()
    assert 1e-4 < difference < 0.2  # autocast is still on, after patching too
    hidden_of(prepared(**given)).sum().backward()
    plain = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert_rows_close(hidden_of(plain(**given)), stock, given["attention_mask"])
    hf_flash.unpatch_model(prepared)
    assert torch.equal(hidden_of(plain(**given)), stock)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_model_inside_other_modules_is_found():
    class Embedder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = make("bert", "AutoModel"), make("llama", "AutoModel")

    container = hf_flash.patch_model(torch.nn.Sequential(Embedder()))
    for model in (container[0].left, container[0].right):
        model(**padded_once())
    assert hf_flash.report(container).fused_calls == 4 and len(hf_flash.report(container)) == 4
    hf_flash.unpatch_model(container)
    assert not hf_flash.report(container).patched


def test_data_parallel_wrapper_is_unwrapped():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model, given = make("llama"), padded_once()
        expected = model(**given).logits
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        assert hf_flash.patch_model(wrapped) is wrapped
        assert_rows_close(wrapped(**given).logits, expected, given["attention_mask"])
        assert hf_flash.report(wrapped).fused_calls == 2
    finally:
        torch.distributed.destroy_process_group()


def test_patching_works_on_a_sdpa_model_too():
    for name in FAMILIES:
        if VERSION < (5, 24) and name in ("gptj", "codegen"):
            continue
        model, given = make(name, attention="sdpa"), padded_once()
        expected = hidden_of(model(**given))
        hf_flash.patch_model(model)
        assert_rows_close(hidden_of(model(**given)), expected, given["attention_mask"])
        assert hf_flash.report(model).fused_calls == 2
        hf_flash.unpatch_model(model)
        assert torch.equal(hidden_of(model(**given)), expected)


@pytest.mark.parametrize("name", CAUSAL)
def test_generate_sees_the_same_signature(name):
    model = make(name)
    plain = inspect.signature(model.forward), inspect.signature(model.base_model.forward)
    hf_flash.patch_model(model)
    assert (inspect.signature(model.forward), inspect.signature(model.base_model.forward)) == plain
    assert isinstance(model, transformers.PreTrainedModel)
