"""Patched models against stock eager in fp32: logits, loss and all gradients, for every kind of batch."""

import re
import types
import warnings

import pytest
import torch
import transformers
from families import (
    CAUSAL,
    ENCODERS,
    EVERY,
    FAMILIES,
    MASKS,
    VERSION,
    assert_gradients_close,
    assert_rows_close,
    hidden_of,
    make,
    mask_of,
    pair,
    position_ids,
    tokens,
)

import hf_flash
from hf_flash import interface, library, patching


def batch_of(name, kind):
    """Inputs with labels that no padding predicts: a row's first token, and one after padding, have none."""
    mask = mask_of(kind)
    ids = tokens().masked_fill(mask == 0, 0)
    labels = ids.masked_fill(mask == 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if name not in ENCODERS:
        batch["position_ids"] = position_ids(mask)
        labels[:, 0] = -100
        labels[:, 1:] = labels[:, 1:].masked_fill(mask[:, :-1] == 0, -100)
    return batch


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", EVERY)
def test_logits_loss_and_gradients_equal_stock(name, kind):
    stock, ours = pair(name)
    batch = batch_of(name, kind)
    expected, found = stock.train()(**batch), ours.train()(**batch)
    assert_rows_close(found.logits, expected.logits, batch["attention_mask"])
    torch.testing.assert_close(found.loss, expected.loss, atol=1e-5, rtol=1e-5)
    expected.loss.backward()
    found.loss.backward()
    assert_gradients_close(ours, stock)
    report = hf_flash.report(ours)
    if name == "mistral-window" and kind == "holes":
        assert "holes" in str(report)
    else:
        assert (report.fused_calls, report.stock_calls) == (2, 0)


@pytest.mark.parametrize("name", EVERY)
def test_no_mask_equals_a_mask_of_ones_and_is_causal(name):
    stock, ours = pair(name)
    ids = tokens()
    found = hidden_of(ours(input_ids=ids))
    assert_rows_close(found, hidden_of(stock(input_ids=ids)), torch.ones_like(ids))
    torch.testing.assert_close(found, hidden_of(ours(input_ids=ids, attention_mask=torch.ones_like(ids))))
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 90 + 3
    same = torch.equal(hidden_of(ours(input_ids=changed))[:, :-1], found[:, :-1])
    assert same is (name not in ENCODERS)


def positions_of(rows, first=0):
    return torch.stack([torch.cat([torch.arange(first, first + n) for n in row]) for row in rows])


def assert_documents_alone(name, stock, output, ids, rows, first=0):
    """Each document's output equals that of the stock model run on it alone."""
    for i, row in enumerate(rows):
        start = 0
        for n in row:
            positions = torch.arange(first, first + n)[None]
            lone = hidden_of(stock(input_ids=ids[i : i + 1, start : start + n], position_ids=positions))
            assert_rows_close(output[i : i + 1, start : start + n], lone, torch.ones(1, n))
            start += n


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("rows", [((3, 4, 2),), ((3, 5), (6, 2))], ids=["one row", "two rows"])
@pytest.mark.parametrize("name", EVERY)
def test_packed_documents_equal_their_lone_runs(name, rows, first):
    stock, ours = pair(name)
    ids = tokens(len(rows), sum(rows[0]))
    positions = positions_of(rows, first)
    output = hidden_of(ours(input_ids=ids, position_ids=positions))
    assert_documents_alone(name, stock, output, ids, rows, first)
    edited = ids.clone()
    edited[:, 0] = (edited[:, 0] + 1) % 90 + 3
    again = hidden_of(ours(input_ids=edited, position_ids=positions))
    for i, row in enumerate(rows):
        assert torch.equal(again[i, row[0] :], output[i, row[0] :])


@pytest.mark.parametrize("dropped", [None, "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"])
@pytest.mark.parametrize("name", FAMILIES)
def test_cu_seq_lens_isolate_documents_also_when_one_is_missing(name, dropped):
    stock, ours = pair(name)
    ids, offsets = tokens(1, 9), torch.tensor([0, 3, 7, 9], dtype=torch.int32)
    given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 4, "max_length_k": 4}
    given.pop(dropped, None)
    output = hidden_of(ours(input_ids=ids, position_ids=positions_of([(3, 4, 2)]), **given))
    assert_documents_alone(name, stock, output, ids, [(3, 4, 2)])


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_loss_and_gradients_equal_the_documents_alone(name):
    stock, ours = pair(name)
    ids, positions = tokens(1, 9), positions_of([(3, 4, 2)])
    labels = ids.clone()
    if name not in ENCODERS:
        labels[positions == 0] = -100
    ours(input_ids=ids, position_ids=positions, labels=labels).loss.backward()
    kept = int((labels != -100).sum())
    for start, n in ((0, 3), (3, 4), (7, 2)):
        part = slice(start, start + n)
        alone = {"input_ids": ids[:, part], "position_ids": positions[:, part], "labels": labels[:, part]}
        (stock(**alone).loss * int((labels[:, part] != -100).sum()) / kept).backward()
    assert_gradients_close(ours, stock)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_registered_name_serves_a_model_that_is_not_patched(name):
    if VERSION < (5, 0) and name == "bert":
        pytest.skip("BERT of transformers 4.57 has no attention interface")
    stock, ours = make(name), make(name, attention="hf_fused")
    for kind in MASKS:
        batch = batch_of(name, kind)
        found, expected = ours(**batch), stock(**batch)
        assert_rows_close(found.logits, expected.logits, batch["attention_mask"])
    rows = [(3, 4, 2)]
    ids, positions = tokens(1, 9), positions_of(rows)
    offsets = torch.tensor([0, 3, 7, 9], dtype=torch.int32)
    packed = [{"position_ids": positions, "use_cache": False}] if name != "bert" else []
    if VERSION >= (5, 0) or name == "llama":
        packed.append({"position_ids": positions, "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets})
    for given in packed:
        assert_documents_alone(name, stock, hidden_of(ours(input_ids=ids, **given)), ids, rows)
    report = hf_flash.report(ours)
    assert report.patched and report.stock_calls == 0 and report.fused_calls > 0


def test_heads_on_top_of_the_base_model_equal_stock():
    mask = mask_of("right")
    ids = tokens().masked_fill(mask == 0, 0)
    for name, head in [
        ("llama", "AutoModelForSequenceClassification"),
        ("gpt2", "AutoModelForSequenceClassification"),
        ("gptj", "AutoModelForSequenceClassification"),
        ("bert", "AutoModelForSequenceClassification"),
        ("bert", "AutoModelForTokenClassification"),
        ("llama", "AutoModel"),
    ]:
        stock, ours = pair(name, head)
        expected, found = stock(input_ids=ids, attention_mask=mask), ours(input_ids=ids, attention_mask=mask)
        if "last_hidden_state" in expected or "Token" in head:
            assert_rows_close(hidden_of(found), hidden_of(expected), mask)
        else:
            torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-5)


def test_pooled_output_and_hidden_states_equal_stock():
    stock, ours = pair("bert", "AutoModel")
    mask = mask_of("right")
    given = {"input_ids": tokens(), "attention_mask": mask, "token_type_ids": mask, "output_hidden_states": True}
    expected, found = stock(**given), ours(**given)
    torch.testing.assert_close(found.pooler_output, expected.pooler_output, atol=1e-5, rtol=0)
    assert len(found.hidden_states) == len(expected.hidden_states) == 3
    for ours_state, stock_state in zip(found.hidden_states, expected.hidden_states):
        assert_rows_close(ours_state, stock_state, mask)


@pytest.mark.parametrize("whole_model", [True, False])
@pytest.mark.parametrize("kind", MASKS)
def test_the_pooler_equals_stock_where_the_first_place_is_padding(kind, whole_model):
    stock, ours = make("bert", "AutoModel"), hf_flash.patch_model(make("bert", "AutoModel"), whole_model=whole_model)
    given = {"input_ids": tokens(), "attention_mask": mask_of(kind)}
    found, expected = ours(**given).pooler_output, stock(**given).pooler_output
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_pooling_with_the_mask_equals_stock_and_padding_is_zero(name):
    """Row 36: outputs at padding are zeros where stock leaves values, so pooling without the mask differs."""
    stock, ours = pair(name, "AutoModel")
    mask = mask_of("right")
    given = {"input_ids": tokens(), "attention_mask": mask, **({} if name in ENCODERS else {"use_cache": False})}
    found, expected = ours(**given).last_hidden_state, stock(**given).last_hidden_state
    weight = mask[:, :, None] / mask.sum(1)[:, None, None]
    torch.testing.assert_close((found * weight).sum(1), (expected * weight).sum(1), atol=1e-5, rtol=1e-5)
    assert not found[mask == 0].any() and expected[mask == 0].any()
    assert (found.mean(1) - expected.mean(1)).abs().max() > 1e-3
    torch.testing.assert_close(found[:, 0], expected[:, 0], atol=1e-5, rtol=1e-5)  # BERT's [CLS]


# ---- what cannot be fused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["right", "left", None])
@pytest.mark.parametrize("name", FAMILIES)
def test_attention_weights_come_from_the_stock_path(name, kind):
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
    config = transformers.Gemma2Config(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                                       num_attention_heads=2, num_key_value_heads=1, head_dim=16)  # fmt: skip
    with pytest.raises(NotImplementedError, match="no adapter for model type 'gemma2'"):
        hf_flash.patch_model(transformers.AutoModelForCausalLM.from_config(config))


def test_older_versions_of_transformers_are_refused(monkeypatch):
    monkeypatch.setattr(patching, "transformers_version", lambda: (4, 56))
    with pytest.raises(NotImplementedError, match="needs transformers 4.57 or later, found 4.56"):
        hf_flash.patch_model(make("llama"))


def test_head_dims_above_the_kernels_are_known_at_patch_time():
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
    """Rows 46, 90, 97: such calls take the stock path, and the notice and the report name the remedy."""
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
    model = hf_flash.patch_model(make("llama"))
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
    model = make("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("OtherAttention", (torch.nn.Module,), {})
    with pytest.raises(NotImplementedError, match="expected attention modules of class LlamaAttention"):
        hf_flash.patch_model(model)
    assert "_hf_flash_patch" not in model.__dict__ and model.config._attn_implementation == "eager"


@pytest.mark.parametrize("mask", [True, False], ids=["encoder padding", "no encoder padding"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_cross_attention_hides_the_encoders_padding(name, mask):
    changes = {"is_decoder": True, "add_cross_attention": True}
    stock, ours = pair(name, "AutoModel", **changes)
    encoder_mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    given = {"input_ids": tokens(), "attention_mask": mask_of("right"), "encoder_hidden_states": torch.randn(3, 4, 64)}
    if mask:
        given["encoder_attention_mask"] = encoder_mask
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = ours(**given).last_hidden_state
    assert_rows_close(found, stock(**given).last_hidden_state, mask_of("right"))
    assert hf_flash.report(ours).fused_calls >= 2


def test_report_prints_a_row_for_every_attention_module():
    model = make("gpt2")
    assert [row.reason for row in hf_flash.report(model)] == ["not patched"] * 2
    hf_flash.patch_model(model)
    assert [row.fused for row in hf_flash.report(model)] == [None, None]
    model(input_ids=tokens())
    report = hf_flash.report(model)
    assert [row.name for row in report] == ["transformer.h.0.attn", "transformer.h.1.attn"]
    assert "GPT2Attention" in str(report) and "yes" in str(report) and "CPU backend" in str(report)
