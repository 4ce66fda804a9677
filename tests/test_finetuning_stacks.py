"""Patched models inside what fine-tuning puts around them: checkpointing, autocast, PEFT, Trainer, torch.compile."""

import contextlib
import inspect

import pytest
import torch
import transformers
from families import (
    ENCODERS,
    FAMILIES,
    VERSION,
    assert_gradients_close,
    assert_rows_close,
    gradients,
    hidden_of,
    make,
    mask_of,
    pair,
    position_ids,
    tokens,
)

import hf_flash
from hf_flash import interface, layout

transformers.logging.set_verbosity_error()
DROPOUT = {
    "llama": {"attention_dropout": 0.3},
    "gptj": {"attn_pdrop": 0.3},
    "codegen": {"attn_pdrop": 0.3},
    "gpt2": {"attn_pdrop": 0.3},
    "bert": {"attention_probs_dropout_prob": 0.3},
}


def batch_of(name, kind="right"):
    mask = mask_of(kind)
    ids = tokens().masked_fill(mask == 0, 0)
    labels = ids.masked_fill(mask == 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if name not in ENCODERS:
        labels[:, 0] = -100
        labels[:, 1:] = labels[:, 1:].masked_fill(mask[:, :-1] == 0, -100)
        batch["position_ids"] = position_ids(mask)
    return batch


# ---- gradient checkpointing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["right", "holes", "packed"])
@pytest.mark.parametrize("name", ["llama", "gptj", "codegen", "gpt2", "bert"])
def test_checkpointed_gradients_equal_stock_with_the_cache_left_on(name, kind, reentrant):
    """Row 74."""
    stock, ours = pair(name)
    if kind == "packed":
        batch = {"input_ids": tokens(1, 9), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1]])}
        batch["labels"] = batch["input_ids"].masked_fill(batch["position_ids"] == 0, -100)
        hf_flash.patch_model(stock)  # stock leaks here: compare with the patched model without checkpoints
    else:
        batch = batch_of(name, kind)
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for model in (stock, ours):
        model.train()
        if reentrant:
            model.enable_input_require_grads()
        model(**batch).loss.backward()
    assert_gradients_close(ours, stock)
    assert hf_flash.report(ours).stock_calls == 0 and hf_flash.report(ours).fused_calls == 4  # recomputed once


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", DROPOUT)
def test_recomputed_dropout_is_the_same(name, reentrant):
    """Row 58."""
    found = []
    for checkpointed in (False, True):
        model = hf_flash.patch_model(make(name, **DROPOUT[name])).train()
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        torch.manual_seed(5)
        mask = mask_of("right")
        ids = tokens(seed=2).masked_fill(mask == 0, 0)
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        found.append(gradients(model))
    for key, grad in found[0].items():
        assert torch.equal(found[1][key], grad), key


@pytest.mark.parametrize("name", DROPOUT)
def test_attention_dropout_acts_in_training_only(name):
    """Row 59."""
    model = hf_flash.patch_model(make(name, **DROPOUT[name]))
    given = {"input_ids": tokens(), "attention_mask": mask_of("right")}
    assert torch.equal(hidden_of(model(**given)), hidden_of(model(**given)))
    model.train()
    assert not torch.equal(hidden_of(model(**given)), hidden_of(model(**given)))
    model.eval()
    assert torch.equal(hidden_of(model(**given)), hidden_of(model(**given)))


# ---- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_autocast_keeps_weights_and_gradients_in_fp32(name, use_cache):
    """Row 72."""
    stock, ours = pair(name)
    batch = batch_of(name)
    if name not in ENCODERS:
        batch["use_cache"] = use_cache
    exact = stock(**batch).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = ours(**batch).loss
    loss.backward()
    assert abs(loss - exact) < 0.15
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in ours.parameters() if p.grad is not None)
    assert (hf_flash.report(ours).fused_calls, hf_flash.report(ours).stock_calls) == (2, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAMILIES)
def test_half_precision_models_attend_in_one_dtype(name, dtype):
    """Row 64: GPT-J's and CodeGen's rotated queries and keys may be fp32 beside half values."""
    exact = make(name)
    stock, ours = (model.to(dtype) for model in pair(name))
    batch = batch_of(name)
    with torch.no_grad():
        reference, theirs, found = (hidden_of(m(**batch)).float() for m in (exact, stock, ours))
    rows = batch["attention_mask"].bool()
    bound = 3 * (theirs - reference)[rows].abs().max() + 1e-3
    assert (found - reference)[rows].abs().max() <= bound
    if name not in ENCODERS:
        cache = ours(input_ids=tokens(), use_cache=True)
        cache = cache["cache" if VERSION >= (5, 24) else "past_key_values"]
        assert cache.layers[0].keys.dtype == dtype


@pytest.mark.parametrize("name", ["llama", "gptj", "codegen", "gpt2", "bert"])
def test_fp32_norms_before_half_projections(name, monkeypatch):
    """Row 71: QLoRA keeps norms in fp32; attention runs in bf16, and its output fits the next projection."""
    dtypes, original = [], layout.flash_attn_varlen_func
    monkeypatch.setattr(
        layout, "flash_attn_varlen_func", lambda *a, **k: (dtypes.extend(x.dtype for x in a[:3]), original(*a, **k))[1]
    )
    exact, model = make(name), hf_flash.patch_model(make(name)).to(torch.bfloat16)
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.float()
    batch = batch_of(name)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch).loss
    assert abs(loss - exact(**batch).loss) < 0.15
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert set(dtypes) == {torch.bfloat16} and hf_flash.report(model).stock_calls == 0


@pytest.mark.parametrize("dtypes", ["32 16 16", "16 32 16", "32 32 16", "16 16 32"])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_mixed_inputs_attend_in_the_half_precision_among_them(dtypes, half):
    """Rows 64, 71: fp32 queries or keys of a rotary embedding or a norm, outside autocast."""
    module = torch.nn.Module()
    module.is_causal = True
    kinds = [half if number == "16" else torch.float32 for number in dtypes.split()]
    q, k, v = (torch.randn(1, 2, 5, 8).to(kind).requires_grad_() for kind in kinds)
    out, _ = interface.fused_attention(module, q, k, v)
    expected, _ = interface.fused_attention(module, *(x.to(half) for x in (q, k, v)))
    assert out.dtype == half and torch.equal(out, expected)
    out.float().sum().backward()
    assert [x.grad.dtype for x in (q, k, v)] == kinds


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "gptj", "bert"])
def test_recomputation_outside_autocast_attends_in_the_same_dtype(name, reentrant, monkeypatch):
    """Row 76."""
    dtypes, original = [], layout.flash_attn_varlen_func
    monkeypatch.setattr(
        layout,
        "flash_attn_varlen_func",
        lambda *a, **k: (dtypes.append({x.dtype for x in a[:3]}), original(*a, **k))[1],
    )
    model = hf_flash.patch_model(make(name)).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch_of(name, "both")).loss
    loss.backward()
    assert dtypes == [{torch.bfloat16}] * 4


# ---- PEFT ------------------------------------------------------------------------------------------------------------

TARGETS = {"llama": ["q_proj", "v_proj"], "gptj": ["q_proj", "v_proj"], "codegen": ["qkv_proj"], "gpt2": ["c_attn"],
           "bert": ["query", "value"]}  # fmt: skip


def lora(model, name, **options):
    peft = pytest.importorskip("peft")
    options = {"init_lora_weights": False, **options}
    config = peft.LoraConfig(r=4, target_modules=TARGETS[name], fan_in_fan_out=name == "gpt2", **options)
    torch.manual_seed(2)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("order", ["patch first", "adapter first"])
@pytest.mark.parametrize("name", TARGETS)
def test_lora_gradients_and_merged_weights_equal_stock(name, order):
    stock, ours = lora(make(name), name), make(name)
    if order == "patch first":
        hf_flash.patch_model(ours)
    ours = lora(ours, name)
    signature = inspect.signature(ours.forward)
    if order == "adapter first":
        assert hf_flash.patch_model(ours) is ours
    assert inspect.signature(ours.forward) == signature
    batch = batch_of(name)
    found, expected = ours(**batch), stock(**batch)
    assert_rows_close(found.logits, expected.logits, batch["attention_mask"])
    found.loss.backward()
    expected.loss.backward()
    assert gradients(ours) and all("lora" in key for key in gradients(ours))
    assert_gradients_close(ours, stock)
    assert hf_flash.report(ours).fused_calls == 2
    merged = ours.merge_and_unload()
    assert_rows_close(merged(**batch).logits, expected.logits, batch["attention_mask"])
    assert hf_flash.report(merged).fused_calls == 4
    hf_flash.unpatch_model(merged)
    assert merged.config._attn_implementation == "eager"


def test_lora_on_a_base_model_that_peft_calls_by_forward():
    stock, ours = (lora(make("bert", "AutoModel"), "bert") for _ in range(2))
    hf_flash.patch_model(ours)
    batch = {"input_ids": tokens(), "attention_mask": mask_of("both")}
    assert_rows_close(ours(**batch).last_hidden_state, stock(**batch).last_hidden_state, batch["attention_mask"])
    assert hf_flash.report(ours).fused_calls == 2


@pytest.mark.parametrize("kind", ["right", "left"])
@pytest.mark.parametrize("method", ["PrefixTuningConfig", "PromptTuningConfig"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gptj"])
def test_prefix_and_prompt_tuning_equal_stock(name, method, kind):
    peft = pytest.importorskip("peft")
    models = []
    for model in pair(name):
        torch.manual_seed(2)
        models.append(peft.get_peft_model(model, getattr(peft, method)(task_type="CAUSAL_LM", num_virtual_tokens=3)))
    mask = mask_of(kind)
    batch = {"input_ids": tokens().masked_fill(mask == 0, 0), "attention_mask": mask}
    results = [model(**batch).logits for model in models]
    extra = results[0].shape[1] - mask.shape[1]
    rows = torch.nn.functional.pad(mask, (extra, 0), value=1)
    assert_rows_close(results[1], results[0], rows)
    for logits in results:
        logits[rows.bool()].square().mean().backward()
    assert_gradients_close(models[1], models[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_with_peft_and_cache_left_on(reentrant):
    """Row 74."""
    stock, ours = (lora(make("llama"), "llama") for _ in range(2))
    hf_flash.patch_model(ours)
    for model in (stock, ours):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.train()
        model(**batch_of_seeded()).loss.backward()
    assert_gradients_close(ours, stock)


def batch_of_seeded():
    mask = mask_of("right")
    ids = tokens(seed=4).masked_fill(mask == 0, 0)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


# ---- Trainer ---------------------------------------------------------------------------------------------------------


def test_trainer_packs_documents_without_losing_their_positions(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    import datasets

    model = hf_flash.patch_model(make("llama"))
    packed = []
    original = layout.flash_attn_varlen_func
    monkeypatch.setattr(layout, "flash_attn_varlen_func", lambda *a, **k: (packed.append(a[3]), original(*a, **k))[1])
    rows = [{"input_ids": tokens(1, n)[0].tolist(), "labels": tokens(1, n)[0].tolist()} for n in (3, 4, 5, 6)]
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=2, per_device_train_batch_size=2, bf16=True, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    collator = transformers.DataCollatorWithFlattening()
    trainer = transformers.Trainer(
        model, arguments, train_dataset=datasets.Dataset.from_list(rows), data_collator=collator
    )
    trainer.train()
    assert len(packed) == 2 * 2 and all(len(offsets) == 3 for offsets in packed)
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "adapter"])
def test_trainer_keeps_a_column_of_positions(tmp_path, monkeypatch, wrapped):
    """Row 23: columns that the signature of forward does not name are dropped, and documents would mix in silence."""
    datasets = pytest.importorskip("datasets")
    model, packed = hf_flash.patch_model(make("llama")), []
    model = lora(model, "llama", task_type="CAUSAL_LM") if wrapped else model
    original = layout.flash_attn_varlen_func
    monkeypatch.setattr(layout, "flash_attn_varlen_func", lambda *a, **k: (packed.append(a[3]), original(*a, **k))[1])
    ids = tokens(4, 9).tolist()
    rows = {"input_ids": ids, "labels": ids, "position_ids": [[0, 1, 2, 0, 1, 2, 3, 0, 1]] * 4, "source": ["x"] * 4}
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    transformers.Trainer(model, arguments, train_dataset=datasets.Dataset.from_dict(rows)).train()
    assert len(packed) == 2 * 2 and all(offsets.tolist() == [0, 3, 7, 9, 12, 16, 18] for offsets in packed)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_compiled_in_one_graph_forward_and_backward(name):
    stock, ours = pair(name)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    cases = [{"input_ids": tokens(), "use_cache": False}, {**batch_of(name, "holes"), "use_cache": False}]
    for given in cases:
        if name in ENCODERS:
            given.pop("use_cache")
        given.pop("labels", None)
        mask = given.get("attention_mask", torch.ones(3, 12))
        found, expected = hidden_of(compiled(**given)), hidden_of(stock(**given))
        assert_rows_close(found, expected, mask)
        for model, output in ((stock, expected), (ours, found)):
            model.zero_grad()
            (output * mask[:, :, None]).square().mean().backward()
        assert_gradients_close(ours, stock)


# ---- what is counted -------------------------------------------------------------------------------------------------


WITHOUT_READS = ("attention", "forward", "interface", "kvcache", "layout", "loss", "ops", "padding",
                 "wholemodel")  # fmt: skip


@contextlib.contextmanager
def host_reads():
    """Counts hf_flash's reads of device values by the host: on a GPU each would wait."""
    reads, names = [], ("item", "tolist", "__bool__", "__int__", "nonzero")
    originals = {name: getattr(torch.Tensor, name) for name in names}

    def counted(name):
        def method(self, *args, **kwargs):
            file = inspect.currentframe().f_back.f_code.co_filename
            if file.endswith(tuple(f"hf_flash/{name}.py" for name in WITHOUT_READS)):
                reads.append(name)
            return originals[name](self, *args, **kwargs)

        return method

    for name in names:
        setattr(torch.Tensor, name, counted(name))
    try:
        yield reads
    finally:
        for name in names:
            setattr(torch.Tensor, name, originals[name])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["right", "left", "holes", "packed", None])
@pytest.mark.parametrize("name", FAMILIES)
def test_at_most_one_host_read_for_a_forward(name, kind, training):
    """In training labels come along: whether padding has any is read together with the layout."""
    model = hf_flash.patch_model(make(name)).train(training)
    given = {"input_ids": tokens()}
    if kind == "packed":
        given["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]]).expand(3, -1)
    elif kind is not None:
        given["attention_mask"] = mask_of(kind)
    if training:
        given["labels"] = batch_of(name, kind if "attention_mask" in given else "full")["labels"]
    with host_reads() as reads:
        model(**given)
    assert reads == ([] if kind is None else ["tolist"])


@pytest.mark.parametrize("kind", ["left", "holes", "full"])
@pytest.mark.parametrize("name", ["llama", "gptj", "gpt2"])
def test_at_most_one_host_read_for_a_step_of_generation(name, kind):
    """Row 68: none for each layer, and one for the step."""
    model, mask = hf_flash.patch_model(make(name)), mask_of(kind)
    with torch.no_grad():
        cache = model(input_ids=tokens(), attention_mask=mask, use_cache=True).past_key_values
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        given = {"input_ids": tokens(3, 1), "attention_mask": mask, "use_cache": True}
        with host_reads() as reads:
            model(**given, past_key_values=cache)
    assert len(reads) <= 1 and hf_flash.report(model).stock_calls == 0
