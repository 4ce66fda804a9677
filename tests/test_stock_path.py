"""What cannot be fused takes stock's path for that call, or is refused at patch time, and the reason is told."""

import re
import types
import warnings

import pytest
import torch
import transformers
from families import (
    CAUSAL,
    FAMILIES,
    MASKS,
    VERSION,
    assert_documents_alone,
    assert_rows_close,
    batch_of,
    hidden_of,
    make,
    mask_of,
    pair,
    positions_of,
    tokens,
)

import hf_flash
from hf_flash import interface, library, patching


@pytest.mark.parametrize("kind", ["right", "left", None])
@pytest.mark.parametrize("name", FAMILIES)
def test_attention_weights_come_from_the_stock_path(name, kind):
    """Rows 81, 90."""
    stock, ours = pair(name)
    given = {"input_ids": tokens(), "output_attentions": True}
    if kind is not None:
        given["attention_mask"] = mask_of(kind)
    mask = given.get("attention_mask", torch.ones(3, 12))
    with pytest.warns(UserWarning, match="attention weights are wanted"):
        found = ours(**given)
    expected = stock(**given)
    assert_rows_close(hidden_of(found), hidden_of(expected), mask)
    assert len(found.attentions) == len(expected.attentions) == 2
    for ours_weights, stock_weights in zip(found.attentions, expected.attentions):
        assert_rows_close(ours_weights.transpose(1, 2), stock_weights.transpose(1, 2), mask)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="hf_flash")  # each reason is told once
        ours(**given)
    report = hf_flash.report(ours)
    assert report.stock_calls == 4 and "attention weights are wanted (output_attentions=True) (2x)" in str(report)
    ours(input_ids=given["input_ids"])
    assert hf_flash.report(ours).fused_calls == 2


@pytest.mark.parametrize("boolean", [True, False], ids=["bool", "float"])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_mask_of_four_dimensions_is_honoured(name, boolean):
    """Row 15."""
    stock, ours = pair(name)
    ids = tokens()
    seen = torch.ones(12, 12, dtype=torch.bool).tril()[None, None].repeat(3, 1, 1, 1)
    seen[:, :, 7, 2] = False
    additive = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    with pytest.warns(UserWarning, match="a dense attention mask was given"):
        found = hidden_of(ours(input_ids=ids, attention_mask=seen if boolean else additive))
    assert_rows_close(found, hidden_of(stock(input_ids=ids, attention_mask=additive)), torch.ones(3, 12))


@pytest.mark.parametrize("shape", ["queries by keys", "keys alone"])
def test_a_dense_mask_of_an_encoder_is_honoured(shape):
    """Row 15."""
    stock, ours = pair("bert")
    seen = torch.ones(3, 1, 12, 12, dtype=torch.bool)
    if shape == "queries by keys":
        seen[:, :, 7, 2] = False
    else:
        seen[:, :, :, 9:] = False
    ids, mask = tokens(), torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    if VERSION < (5, 0):  # takes three axes of ones and zeros
        mask = seen[:, 0].float()
    with pytest.warns(UserWarning, match="a dense attention mask was given"):
        found = hidden_of(ours(input_ids=ids, attention_mask=mask))
    expected = hidden_of(stock(input_ids=ids, attention_mask=mask))
    assert_rows_close(found, expected, torch.ones(3, 12))
    assert (expected - hidden_of(stock(input_ids=ids))).abs().max() > 1e-3


@pytest.mark.skipif(VERSION >= (5, 0), reason="transformers 5 has no head masks")
@pytest.mark.parametrize("name", ["gpt2", "gptj", "codegen", "bert"])
def test_a_head_mask_is_honoured(name):
    """Row 81."""
    stock, ours = pair(name)
    mask = mask_of("right")
    given = {"input_ids": tokens(), "attention_mask": mask, "head_mask": torch.tensor([[1.0, 0, 1, 1], [0, 1, 1, 1]])}
    with pytest.warns(UserWarning, match="a head mask was given"):
        found = hidden_of(ours(**given))
    assert_rows_close(found, hidden_of(stock(**given)), mask)


def test_strict_raises_where_a_call_cannot_be_fused():
    ours = hf_flash.patch_model(make("llama"), strict=True)
    ours(input_ids=tokens(), attention_mask=mask_of("holes"))
    with pytest.raises(RuntimeError, match=r"cannot fuse model.layers.0.self_attn .*output_attentions"):
        ours(input_ids=tokens(), output_attentions=True)
    hf_flash.patch_model(ours, strict=False)
    with pytest.warns(UserWarning):
        ours(input_ids=tokens(), output_attentions=True)


def test_unknown_families_are_refused_with_the_list():
    config = transformers.OPTConfig(vocab_size=50, hidden_size=32, ffn_dim=32, num_hidden_layers=1,
                                    num_attention_heads=2, word_embed_proj_dim=32)  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(NotImplementedError, match="no adapter for model type 'opt'; it has bert, codegen, gpt2, gptj"):
        hf_flash.patch_model(model)
    assert model.config is model.model.config and model.config._attn_implementation != "hf_fused"
    with pytest.raises(TypeError, match="no transformers model"):
        hf_flash.patch_model(torch.nn.Linear(2, 2))


def test_softcapped_models_without_an_adapter_are_refused():
    """Row 48."""
    config = transformers.Gemma2Config(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                                       num_attention_heads=2, num_key_value_heads=1, head_dim=16)  # fmt: skip
    with pytest.raises(NotImplementedError, match="no adapter for model type 'gemma2'"):
        hf_flash.patch_model(transformers.AutoModelForCausalLM.from_config(config))


def test_older_versions_of_transformers_are_refused(monkeypatch):
    """Row 89."""
    monkeypatch.setattr(patching, "transformers_version", lambda: (4, 56))
    with pytest.raises(NotImplementedError, match="needs transformers 4.57 or later, found 4.56"):
        hf_flash.patch_model(make("llama"))


def test_head_dims_above_the_kernels_are_known_at_patch_time():
    """Row 46."""
    changes = {"head_dim": 264, "num_attention_heads": 1, "num_key_value_heads": 1}
    with pytest.raises(RuntimeError, match="self_attn has head dim 264; hf_flash fuses up to 256"):
        hf_flash.patch_model(make("llama", **changes), strict=True)
    stock, ours = pair("llama", **changes)
    ids = tokens()
    with pytest.warns(UserWarning, match="head dim 264 is above 256"):
        found = ours(input_ids=ids, attention_mask=mask_of("both")).logits
    assert_rows_close(found, stock(input_ids=ids, attention_mask=mask_of("both")).logits, mask_of("both"))


@pytest.mark.parametrize(
    "device, dtype, reason",
    [
        ("cuda", torch.float32, "torch.float32 on CUDA outside autocast (the kernels take float16 and bfloat16)"),
        ("cuda", torch.bfloat16, None),
        ("cpu", torch.float64, None),
        ("xpu", torch.bfloat16, "no kernels for device xpu"),
    ],
)
def test_where_the_kernels_run(device, dtype, reason, monkeypatch):
    monkeypatch.setattr(interface, "_no_kernels", lambda device: None)
    query = types.SimpleNamespace(shape=(1, 2, 4, 64), device=torch.device(device), dtype=dtype)
    assert interface._obstacle(query, query, None, None, {}) == reason


@pytest.mark.parametrize("fault", ["corrupt library", "old GPU"])
def test_without_kernels_for_the_gpu_the_reason_is_told(fault, monkeypatch, tmp_path):
    """Rows 46, 90, 97: such calls take the stock path, and the notice and the report name the remedy; strict=True
    raises before anything is patched."""
    if fault == "corrupt library":
        (tmp_path / "broken.so").write_bytes(b"not a library")
        monkeypatch.setattr(library, "status", lambda: library._open(str(tmp_path / "broken.so"))[1])
        expected = r"broken.so cannot be loaded: .*\(remedy: rebuild it"
    else:
        monkeypatch.setattr(library, "status", lambda: library.Status(True, "libhf_flash.so", "80;90a"))
        monkeypatch.setattr(interface, "_capability", lambda index: (7, 5))
        expected = "the GPU is older than compute capability 8.0"
    query = types.SimpleNamespace(shape=(1, 2, 4, 64), device=torch.device("cuda"), dtype=torch.bfloat16)
    reason = interface._obstacle(query, query, None, None, {})
    assert re.search(expected, reason)
    on_gpu = types.SimpleNamespace(device=torch.device("cuda"), is_cuda=True)
    model = make("llama")
    with monkeypatch.context() as patch:
        patch.setattr(model, "parameters", lambda: [on_gpu])
        with pytest.raises(RuntimeError, match=f"cannot fuse anything on cuda: .*{expected}"):
            hf_flash.patch_model(model, strict=True)
    assert not hf_flash.report(model).patched
    hf_flash.patch_model(model)
    monkeypatch.setattr(interface, "_obstacle", lambda *a: reason)
    with pytest.warns(UserWarning, match=expected):
        model(input_ids=tokens())
    assert reason in str(hf_flash.report(model))


@pytest.mark.parametrize("kind", [*MASKS, "packed"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_layout_spelt_out_for_stock_attention_gives_the_same(name, kind, monkeypatch):
    """What happens to a true fp32 model on CUDA: every call takes the stock path, padding and documents included."""
    stock, ours = pair(name)
    monkeypatch.setattr(interface, "_obstacle", lambda *a: "for the test")
    with pytest.warns(UserWarning, match="stock attention for this call: for the test"):
        if kind == "packed":
            ids = tokens(2, 8)
            output = hidden_of(ours(input_ids=ids, position_ids=positions_of([(3, 5), (6, 2)])))
            assert_documents_alone(name, stock, output, ids, [(3, 5), (6, 2)])
        else:
            batch = batch_of(name, kind)
            assert_rows_close(ours(**batch).logits, stock(**batch).logits, batch["attention_mask"])
    assert hf_flash.report(ours).fused_calls == 0


def test_renamed_attention_classes_are_refused_before_anything_changes():
    """Rows 85, 89."""
    model = make("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("OtherAttention", (torch.nn.Module,), {})
    with pytest.raises(NotImplementedError, match="expected attention modules of class LlamaAttention"):
        hf_flash.patch_model(model)
    assert "_hf_flash_patch" not in model.__dict__ and model.config._attn_implementation == "eager"
