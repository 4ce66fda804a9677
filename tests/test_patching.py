"""Patched models against stock eager in fp32: logits, loss and all gradients, for every kind of batch."""

import warnings

import pytest
import torch
from families import (
    ENCODERS,
    EVERY,
    FAMILIES,
    MASKS,
    VERSION,
    assert_documents_alone,
    assert_gradients_close,
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


@pytest.mark.filterwarnings("ignore:hf_flash.*a sliding window over a mask with holes")
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", EVERY)
def test_logits_loss_and_gradients_equal_stock(name, kind):
    """Rows 7, 10, 11, 45, 73, 85: any padding, models with a window or fewer kv heads; every layer is fused."""
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
    """Row 9."""
    stock, ours = pair(name)
    ids = tokens()
    found = hidden_of(ours(input_ids=ids))
    assert_rows_close(found, hidden_of(stock(input_ids=ids)), torch.ones_like(ids))
    torch.testing.assert_close(found, hidden_of(ours(input_ids=ids, attention_mask=torch.ones_like(ids))))
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 90 + 3
    same = torch.equal(hidden_of(ours(input_ids=changed))[:, :-1], found[:, :-1])
    assert same is (name not in ENCODERS)


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("rows", [((3, 4, 2),), ((3, 5), (6, 2))], ids=["one row", "two rows"])
@pytest.mark.parametrize("name", EVERY)
def test_packed_documents_equal_their_lone_runs(name, rows, first):
    """Rows 16, 17, 20: also where positions begin at 2."""
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
    """Row 25."""
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


@pytest.mark.parametrize("mask", [True, False], ids=["encoder padding", "no encoder padding"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_cross_attention_hides_the_encoders_padding(name, mask):
    """Row 13."""
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
