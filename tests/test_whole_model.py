"""Whole-model unpadding: layers see tokens alone, outputs equal stock at every token, and where it cannot be exact the
report says why padding was skipped inside attention only."""

import warnings

import pytest
import torch
import transformers
from families import (
    ENCODERS,
    FAMILIES,
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
from hf_flash import layout

transformers.logging.set_verbosity_error()
PADDED = ("right", "left", "both", "holes")


def first_layer(model):
    return next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))[0]


def widths(model):
    """The number of places that the first layer works on, one entry for each forward."""
    seen = []
    first_layer(model).register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"]).shape[:2].numel()),
        with_kwargs=True,
    )
    return seen


def no_cache(name):
    return {} if name in ENCODERS else {"use_cache": False}


@pytest.mark.parametrize("kind", PADDED)
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_see_tokens_alone_and_hidden_states_equal_stock(name, kind):
    stock, ours = pair(name)
    mask, seen = mask_of(kind), widths(ours)
    given = {"input_ids": tokens(), "attention_mask": mask, "output_hidden_states": True, **no_cache(name)}
    found, expected = ours(**given), stock(**given)
    assert seen == [int(mask.sum())]
    assert_rows_close(found.logits, expected.logits, mask)
    assert len(found.hidden_states) == len(expected.hidden_states)
    for ours_state, stock_state in zip(found.hidden_states, expected.hidden_states):
        assert ours_state.shape == stock_state.shape
        assert_rows_close(ours_state, stock_state, mask)
    assert "padding skipped by the whole model (1x)" in str(hf_flash.report(ours))


@pytest.mark.parametrize("name", FAMILIES)
def test_training_unpads_by_default_and_evaluation_keeps_the_cache(name):
    model = hf_flash.patch_model(make(name))
    seen, given = widths(model), {"input_ids": tokens(), "attention_mask": mask_of("right")}
    model.train()(**given)
    assert seen.pop() == int(given["attention_mask"].sum())
    output = model.eval()(**given)
    if name in ENCODERS:
        assert seen.pop() == int(given["attention_mask"].sum())
    else:
        assert seen.pop() == 36 and output.past_key_values is not None
        assert "inside attention only: a cache is kept (pass use_cache=False) (1x)" in str(hf_flash.report(model))


@pytest.mark.parametrize("how", ["input_ids", "inputs_embeds", "tuple"])
@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "gptj"])
def test_other_inputs_and_outputs_are_gathered_and_spread(name, how):
    stock, ours = pair(name, "AutoModel")
    mask = mask_of("right")
    given = {"input_ids": tokens(), "attention_mask": mask, **no_cache(name)}
    if name in ("bert", "gpt2"):
        given["token_type_ids"] = torch.randint(0, 2, mask.shape)
    if how == "inputs_embeds":
        given["inputs_embeds"] = stock.get_input_embeddings()(given.pop("input_ids")).detach()
    if how == "tuple":
        given["return_dict"] = False
    seen = widths(ours)
    found, expected = ours(**given), stock(**given)
    assert seen == [int(mask.sum())] and len(found) == len(expected)
    for ours_value, stock_value in zip(found if how == "tuple" else found.values(), tuple(expected) if how == "tuple"
                                       else expected.values()):  # fmt: skip
        assert ours_value.shape == stock_value.shape
        assert_rows_close(ours_value, stock_value, mask if ours_value.ndim == 3 else torch.ones(3))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_checkpointed_gradients_equal_stock(name, reentrant):
    stock, ours = pair(name)
    mask = mask_of("holes")
    ids = tokens()
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for model in (stock, ours):
        model.train()
        if reentrant:
            model.enable_input_require_grads()
        logits = model(input_ids=ids, attention_mask=mask, position_ids=position_ids(mask)).logits
        logits[mask.bool()].square().mean().backward()
    assert_gradients_close(ours, stock)


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_and_padded_rows_are_unpadded_with_their_positions(name):
    stock, ours = pair(name)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 0], [0, 1, 2, 3, 4, 0, 1, 2, 3]])
    mask = torch.tensor([[1] * 7 + [0] * 2, [1] * 9])
    ids, seen = tokens(2, 9), widths(ours)
    found = hidden_of(ours(input_ids=ids, attention_mask=mask, position_ids=positions, **no_cache(name)))
    assert seen == [16]
    for row, start, n in ((0, 0, 3), (0, 3, 4), (1, 0, 5), (1, 5, 4)):
        part = slice(start, start + n)
        lone = hidden_of(stock(input_ids=ids[row : row + 1, part], position_ids=positions[row : row + 1, part]))
        assert_rows_close(found[row : row + 1, part], lone, torch.ones(1, n))


@pytest.mark.parametrize("head", [None, "AutoModel"])
@pytest.mark.parametrize("name", ["llama", "gptj", "codegen", "gpt2"])
def test_a_tuple_in_training_has_the_cache_in_its_place(name, head):
    stock, ours = (model.train() for model in pair(name, head))
    given = {"input_ids": tokens(), "attention_mask": mask_of("right"), "return_dict": False}
    if head is None:
        given["labels"] = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    found, expected = ours(**given), stock(**given)
    assert [type(item) for item in found] == [type(item) for item in expected]
    assert found[-1].get_seq_length() == 12
    assert len(ours(**given, use_cache=False)) == len(stock(**given, use_cache=False)) == len(expected) - 1


HEADS = [("llama", "Sequence"), ("gpt2", "Sequence"), ("gptj", "Sequence"), ("bert", "Sequence"), ("llama", "Token"),
         ("gpt2", "Token"), ("bert", "Token")]  # fmt: skip


@pytest.mark.parametrize("checkpointed", [None, True, False], ids=["kept", "reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", ["right", "left"])
@pytest.mark.parametrize(("name", "head"), HEADS)
def test_classifiers_train_on_tokens_alone_and_equal_stock(name, head, kind, checkpointed):
    stock, ours = (model.train() for model in pair(name, f"AutoModelFor{head}Classification", classifier_dropout=0.0))
    mask, seen = mask_of(kind), widths(ours)
    ids = tokens().masked_fill(mask == 0, 0)
    labels = torch.randint(2, (3,)) if head == "Sequence" else torch.randint(2, ids.shape).masked_fill(mask == 0, -100)
    if checkpointed is not None:
        ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointed})
        ours.enable_input_require_grads()
    losses = [model(input_ids=ids, attention_mask=mask, labels=labels).loss for model in (ours, stock)]
    pooled_padding = name == "bert" and head == "Sequence" and kind == "left"
    assert seen == [36 if pooled_padding else int(mask.sum())]
    torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-5)
    for loss in losses:
        loss.backward()
    assert_gradients_close(ours, stock)
    reason = "the pooler reads the first place, which is padding" if pooled_padding else "by the whole model"
    assert reason in str(hf_flash.report(ours))


@pytest.mark.parametrize("kind", ["right", "left"])
@pytest.mark.parametrize(("method", "note"), [
    ("PromptTuningConfig", "by the whole model, its head and its loss"),
    ("PrefixTuningConfig", "inside attention only: the mask is longer than the input (a cache or a prefix)"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["llama", "gpt2", "gptj"])
def test_virtual_tokens_train_as_in_stock_and_the_report_says_how(name, method, note, kind):
    peft = pytest.importorskip("peft")
    mask, models = mask_of(kind), []
    ids = tokens().masked_fill(mask == 0, 0)
    labels = ids.masked_fill(mask == 0, -100)
    labels[torch.arange(3), mask.argmax(1)] = -100
    for model in pair(name):
        torch.manual_seed(2)
        model = peft.get_peft_model(model, getattr(peft, method)(task_type="CAUSAL_LM", num_virtual_tokens=3))
        models.append(model.train())
        models[-1](input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    assert_gradients_close(models[1], models[0])
    assert f"padding skipped {note} (1x)" in str(hf_flash.report(models[1]))


def test_metadata_is_made_once_and_nothing_is_gathered_without_padding(monkeypatch):
    made = []
    monkeypatch.setattr(layout, "_rows", lambda *a, f=layout._rows: (made.append(1), f(*a))[1])
    for name in FAMILIES:
        model = hf_flash.patch_model(make(name)).train()
        seen = widths(model)
        model(input_ids=tokens(), attention_mask=mask_of("both"))
        assert len(made) == 1, name
        made.clear()
        model(input_ids=tokens(), attention_mask=mask_of("full"))
        assert len(made) == 1 and seen[-1] == 36, name
        made.clear()
        assert len(hf_flash.report(model).notes) == 1


def test_it_can_be_switched_off():
    model = hf_flash.patch_model(make("llama"), whole_model=False).train()
    seen, given = widths(model), {"input_ids": tokens(), "attention_mask": mask_of("right")}
    model(**given)
    assert seen.pop() == 36 and not hf_flash.report(model).notes
    hf_flash.patch_model(model)(**given)
    assert seen.pop() == 25


@pytest.mark.parametrize("case", ["weights", "pooler", "window", "chunked", "longrope", "encoder"])
def test_it_steps_back_with_the_reason(case):
    mask = mask_of("left")
    given, head, changes = {"input_ids": tokens(), "use_cache": False}, None, {}
    if case == "weights":
        name, reason, given["output_attentions"] = "gpt2", "attention weights are wanted", True
    elif case == "pooler":
        name, head, reason = "bert", "AutoModel", "the pooler reads the first place, which is padding"
    elif case == "window":
        name, mask, reason = "mistral-window", mask_of("holes"), "a sliding window counts the padding between tokens"
    elif case == "chunked":
        name, reason, changes = "bert", "the feed-forward is chunked along the sequence", {"chunk_size_feed_forward": 4}
        given = {"input_ids": tokens()}
    elif case == "longrope":
        name, reason = "phi3", "rotary frequencies depend on the padded length"
        factors = {"rope_type": "longrope", "type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
                   "rope_theta": 10000.0}  # fmt: skip
        changes = {"rope_scaling": factors, "original_max_position_embeddings": 64}
    else:
        name, reason, changes = "gpt2", "encoder_hidden_states was given", {"add_cross_attention": True}
        given["encoder_hidden_states"] = torch.randn(3, 4, 64)
    stock, ours = pair(name, head, **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, expected = (hidden_of(model(attention_mask=mask, **given)) for model in (ours, stock))
    assert f"padding skipped inside attention only: {reason} (1x)" in str(hf_flash.report(ours))
    assert_rows_close(found, expected, mask)


def test_generation_without_a_cache_unpads_every_step():
    stock, ours = pair("llama")
    mask = mask_of("left")
    ids, seen = tokens().masked_fill(mask == 0, 0), widths(ours)
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": False, "pad_token_id": 0, "eos_token_id": None}
    found = ours.generate(input_ids=ids, attention_mask=mask, **options)
    assert torch.equal(found, stock.generate(input_ids=ids, attention_mask=mask, **options))
    assert seen == [25, 28, 31, 34]


def test_autocast_and_half_precision_come_back_in_their_dtype():
    for dtype in (torch.float32, torch.bfloat16):
        for name in FAMILIES:
            stock, ours = (model.to(dtype).train() for model in pair(name))
            given = {"input_ids": tokens(), "attention_mask": mask_of("right")}
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
                found, expected = hidden_of(ours(**given)), hidden_of(stock(**given))
            assert found.dtype == expected.dtype
            rows = given["attention_mask"].bool()
            assert (found - expected)[rows].abs().max() < 0.1 * expected[rows].abs().max()


def head_widths(model):
    seen = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:2].numel()))
    return seen


@pytest.mark.parametrize("kind", PADDED)
@pytest.mark.parametrize("name", FAMILIES)
def test_head_and_loss_skip_padding_where_it_carries_no_labels(name, kind):
    stock, ours = (model.train() for model in pair(name))
    mask, ids = mask_of(kind), tokens()
    labels = ids.masked_fill(mask == 0, -100)
    if name not in ENCODERS:  # stock lets padding predict these
        labels[:, 0] = -100
        labels[:, 1:] = labels[:, 1:].masked_fill(mask[:, :-1] == 0, -100)
    given = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    seen = head_widths(ours)
    found, expected = ours(**given), stock(**given)
    assert seen == [int(mask.sum())]
    torch.testing.assert_close(found.loss, expected.loss, atol=1e-5, rtol=1e-5)
    assert found.logits.shape == expected.logits.shape
    assert_rows_close(found.logits, expected.logits, mask)
    found.loss.backward()
    expected.loss.backward()
    assert_gradients_close(ours, stock)
    assert "by the whole model, its head and its loss (1x)" in str(hf_flash.report(ours))


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_with_labels_of_its_own_keeps_the_padded_loss(name):
    ours = hf_flash.patch_model(make(name)).train()
    mask, ids, seen = mask_of("right"), tokens(), head_widths(ours)
    layers = widths(ours)
    output = ours(input_ids=ids, attention_mask=mask, labels=ids)
    assert seen == [36] and layers == [25]
    shifted = (output.logits[:, :-1], ids[:, 1:]) if name not in ENCODERS else (output.logits, ids)
    loss = torch.nn.functional.cross_entropy(shifted[0].flatten(0, 1), shifted[1].flatten())
    torch.testing.assert_close(output.loss, loss)


def test_no_token_is_predicted_by_the_end_of_another_row():
    """Rows follow each other without padding between them: a row's first token is nobody's target."""
    stock, ours = (model.train() for model in pair("llama"))
    mask = mask_of("left")
    ids = tokens()
    labels = ids.masked_fill(mask == 0, -100)
    found = ours(input_ids=ids, attention_mask=mask, labels=labels).loss
    labels[torch.arange(3), mask.argmax(1)] = -100
    torch.testing.assert_close(found, stock(input_ids=ids, attention_mask=mask, labels=labels).loss, atol=1e-5, rtol=0)


def test_losses_divided_by_the_items_of_a_larger_batch_equal_stock():
    stock, ours = (model.train() for model in pair("llama"))
    mask, ids = mask_of("right"), tokens()
    labels = ids.masked_fill(mask == 0, -100)
    given = {"input_ids": ids, "attention_mask": mask, "labels": labels, "num_items_in_batch": torch.tensor(77)}
    torch.testing.assert_close(ours(**given).loss, stock(**given).loss, atol=1e-5, rtol=0)
