"""Patched models with what fine-tuning brings along: quantised and sharded projections, Liger-Kernel, TRL, checkpoints
of the Trainer."""

import os
import sys
from pathlib import Path
from types import MethodType

import pytest
import torch
import transformers
from families import FAMILIES, VERSION, assert_gradients_close, assert_rows_close, make, mask_of, pair, tokens
from transformers.modeling_outputs import CausalLMOutputWithPast

import hf_flash

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import common  # noqa: E402

transformers.logging.set_verbosity_error()
ATTENTION = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "out_proj",
    "qkv_proj",
    "c_attn",
    "c_proj",
    "query",
    "key",
    "value",
)


def batch(kind="right", length=12):
    mask, ids = mask_of(kind), tokens(length=length)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 0] = -100
    labels[:, 1:] = labels[:, 1:].masked_fill(mask[:, :-1] == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


# ---- projections whose weights cannot be read ------------------------------------------------------------------------


class FourBit(torch.nn.Module):
    """A frozen projection in 16 steps under LoRA, as QLoRA has them: there is no weight to read."""

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach()
        weight = weight.T if isinstance(linear, transformers.pytorch_utils.Conv1D) else weight
        step = weight.abs().max() / 7
        self.register_buffer("codes", (weight / step).round().to(torch.int8))
        self.register_buffer("step", step)
        self.added = None if linear.bias is None else torch.nn.Parameter(linear.bias.detach(), requires_grad=False)
        torch.manual_seed(weight.numel())
        self.down = torch.nn.Parameter(torch.randn(4, weight.shape[1]) / 8)
        self.up = torch.nn.Parameter(torch.randn(weight.shape[0], 4) / 8)

    @property
    def weight(self):
        raise RuntimeError("the weight of a 4-bit projection was read")

    def forward(self, x):
        base = torch.nn.functional.linear(x, self.codes.to(x.dtype) * self.step, self.added)
        return base + x @ self.down.T @ self.up.T


def in_four_bits(model):
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in ATTENTION and hasattr(child, "weight"):
                setattr(module, name, FourBit(child))
    return model


@pytest.mark.parametrize("order", ["patch first", "patch last"])
@pytest.mark.parametrize("name", ["llama", "gptj", "codegen", "gpt2", "bert"])
def test_adapters_on_frozen_projections_whose_weight_must_not_be_read(name, order):
    stock, ours = in_four_bits(make(name)).train(), make(name)
    if order == "patch first":
        in_four_bits(hf_flash.patch_model(ours)).train()
    else:
        hf_flash.patch_model(in_four_bits(ours)).train()
    given = batch()
    for model in (stock, ours):
        model(**given).loss.backward()
    assert_gradients_close(ours, stock)
    assert any(key.endswith("up") for key, p in ours.named_parameters() if p.grad is not None)


def shard(model):
    """ZeRO-3's rule: outside a module's own forward, and its backward, its parameters are empty."""
    whole = {id(p): p.data for p in model.parameters()}

    def fill(module, *_):
        for p in module.parameters(recurse=False):
            p.data = whole[id(p)]

    def empty(module, *_):
        for p in module.parameters(recurse=False):
            p.data = torch.empty(0, dtype=p.dtype)

    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            empty(module)
            module.register_forward_pre_hook(fill)
            module.register_forward_hook(empty)
            module.register_full_backward_pre_hook(fill)
    return model


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("keep_logits", [True, False])
@pytest.mark.parametrize("name", ["llama", "gptj", "codegen", "gpt2", "bert"])
def test_weights_are_used_by_their_own_modules_alone(name, keep_logits, checkpointed, monkeypatch):
    monkeypatch.setattr(hf_flash.loss, "PART", 97 * 8)
    if name == "bert" and not keep_logits:
        pytest.skip("not a causal language model")
    # A head that shares its weight with the embedding is gathered by either module: apart, each must do it itself.
    stock, ours = (make(name, tie_word_embeddings=False).train() for _ in range(2))
    shard(hf_flash.patch_model(ours, keep_logits=keep_logits))
    given = batch()
    if checkpointed:
        ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for model in (stock, ours):
        model(**given).loss.backward()
    assert_gradients_close(ours, stock)


# ---- Liger-Kernel ----------------------------------------------------------------------------------------------------


def liger(model):
    """What apply_liger_kernel_to_llama(model=...) replaces, with PyTorch in place of its Triton kernels."""

    def norm(self, x):
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)

    def mlp(self, x):
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    def lce_forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None,
                    inputs_embeds=None, labels=None, use_cache=None, logits_to_keep=0, **kwargs):  # fmt: skip
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, inputs_embeds=inputs_embeds, use_cache=use_cache,
        )  # fmt: skip
        hidden, logits = outputs[0], None
        if self.training and labels is not None:
            scores = torch.nn.functional.linear(hidden, self.lm_head.weight)[:, :-1]
            loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten())
        else:
            logits = self.lm_head(hidden)
            loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            module.forward = MethodType(norm, module)
        if type(module).__name__ == "LlamaMLP":
            module.forward = MethodType(mlp, module)
    model.forward = MethodType(lce_forward, model)
    return model


@pytest.mark.parametrize("keep_logits", [True, False])
@pytest.mark.parametrize("order", ["liger first", "liger last"])
def test_liger_before_or_after_the_patch(order, keep_logits):
    stock, ours = make("llama").train(), make("llama").train()
    if order == "liger first":
        hf_flash.patch_model(liger(ours), keep_logits=keep_logits)
    else:
        liger(hf_flash.patch_model(ours, keep_logits=keep_logits))
    seen = []
    ours.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:2].numel()))
    given = batch()
    found, expected = ours(**given), stock(**given)
    assert "logits" not in found and seen == [int(given["attention_mask"].sum())]
    found.loss.backward()
    expected.loss.backward()
    assert_gradients_close(ours, stock)
    ours.eval(), stock.eval()
    found, expected = ours(**given), stock(**given)
    torch.testing.assert_close(found.loss, expected.loss, atol=1e-5, rtol=1e-5)
    assert_rows_close(found.logits, expected.logits, given["attention_mask"])
    liger_forward = ours.forward if order == "liger last" else None
    hf_flash.unpatch_model(ours)
    assert_rows_close(ours(**given).logits, expected.logits, given["attention_mask"])
    assert liger_forward is None or ours.forward == liger_forward


def test_a_cross_entropy_that_another_library_put_into_torch_is_used(monkeypatch):
    def replacement(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    calls, original = [], torch.nn.functional.cross_entropy
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", replacement)
    stock, ours = pair("llama")
    given = batch()
    torch.testing.assert_close(ours(**given).loss, stock(**given).loss, atol=1e-5, rtol=1e-5)
    assert len(calls) == 2


# ---- packing collators -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("offsets", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_flattened_batches_are_the_documents_alone(name, offsets, training):
    """In training and evaluation, with the default cache, where stock lets documents see each other."""
    stock, ours = (model.train(training) for model in pair(name))
    documents = [tokens(1, n)[0].tolist() for n in (5, 3, 9)]
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=offsets)
    given = collator([{"input_ids": document} for document in documents])
    assert ("cu_seq_lens_q" in given) == offsets and "attention_mask" not in given
    found = ours(**given)
    logits, start, losses, kept = found.logits, 0, [], 0
    for document in documents:
        ids = torch.tensor([document])
        labels = ids.clone()
        labels[:, 0] = -100
        alone = stock(input_ids=ids, labels=labels)
        assert_rows_close(logits[:, start : start + len(document)], alone.logits, torch.ones_like(ids))
        start += len(document)
        losses.append(alone.loss * (len(document) - 1))
        kept += len(document) - 1
    torch.testing.assert_close(found.loss, sum(losses) / kept, atol=1e-5, rtol=1e-5)
    if training:
        found.loss.backward()
        (sum(losses) / kept).backward()
        assert_gradients_close(ours, stock)


# ---- trainers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_accelerate():
    """The precision of a Trainer stays in its process, in singletons and the environment."""
    from accelerate.state import AcceleratorState

    def forget():
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
        AcceleratorState._reset_state(reset_partial_state=True)

    forget()
    yield
    forget()


def lora(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))


def trainer_for(model, folder, kind=transformers.Trainer, steps=4, **options):
    options = {"max_steps": steps, "per_device_train_batch_size": 2, "use_cpu": True, "report_to": [],
               "disable_tqdm": True, "logging_steps": 1, "learning_rate": 1e-2, "lr_scheduler_type": "constant",
               "save_strategy": "no", **options}  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (6, 9, 4, 12, 7, 5, 10, 8)]
    if kind is transformers.Trainer:
        pad = [[*row, *[0] * (12 - len(row))] for row in rows]
        masks = [[1] * len(row) + [0] * (12 - len(row)) for row in rows]
        labels = [[*row, *[-100] * (12 - len(row))] for row in rows]
        data = [{"input_ids": a, "attention_mask": b, "labels": c} for a, b, c in zip(pad, masks, labels)]
        return kind(model, transformers.TrainingArguments(folder, **options), train_dataset=data)
    data = pytest.importorskip("datasets").Dataset.from_dict({"input_ids": rows})
    arguments = pytest.importorskip("trl").SFTConfig(folder, **{"max_length": None, **options})
    return kind(model, arguments, train_dataset=data, processing_class=common.byte_tokenizer())


def losses_of(trainer):
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("keep_logits", [True, False])
@pytest.mark.parametrize("bf16", [True, False])
def test_resumed_training_is_bit_equal_and_merges(tmp_path, fresh_accelerate, bf16, keep_logits):
    options = {"save_strategy": "steps", "save_steps": 2, "bf16": bf16}
    if VERSION < (5, 0):
        options["save_safetensors"] = True
    through = trainer_for(hf_flash.patch_model(lora(make("llama")), keep_logits=keep_logits), tmp_path, **options)
    through.train()
    model = hf_flash.patch_model(lora(make("llama")), keep_logits=keep_logits)
    resumed = trainer_for(model, tmp_path / "again", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses_of(resumed) == losses_of(through) and len(losses_of(through)) == 4
    trained = dict(through.model.named_parameters())
    assert any("lora_B" in name and p.abs().max() > 0 for name, p in trained.items())
    for name, p in model.named_parameters():
        assert torch.equal(p, trained[name]), name
    if bf16:
        return
    given = batch()
    before = model.eval()(**given)
    merged = hf_flash.unpatch_model(model.merge_and_unload())
    assert_rows_close(merged(**given).logits, before.logits, given["attention_mask"], tolerance=1e-4)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_trainer_has_the_losses_of_stock(tmp_path, fresh_accelerate, accumulate):
    """Accumulated steps divide by the labels of the whole step, with logits and without."""
    found = []
    for options in (None, {"keep_logits": True}, {"keep_logits": False}):
        model = make("llama")
        if options:
            hf_flash.patch_model(model, **options)
        trainer = trainer_for(model, tmp_path, gradient_accumulation_steps=accumulate, steps=3, max_grad_norm=1e9)
        trainer.train()
        found.append(losses_of(trainer))
    assert found[1] == pytest.approx(found[0], abs=1e-4) and found[2] == pytest.approx(found[0], abs=1e-4)


@pytest.mark.parametrize("order", ["patch first", "patch last"])
@pytest.mark.parametrize("kind", ["padded", "padding_free", "packing", "packing, wrapped"])
def test_sft_trainer_has_the_losses_of_stock(tmp_path, fresh_accelerate, kind, order):
    trl = pytest.importorskip("trl")
    options = {"padding_free": {"padding_free": True}, "packing": {"packing": True, "max_length": 16},
               "packing, wrapped": {"packing": True, "max_length": 16, "packing_strategy": "wrapped"}}  # fmt: skip
    found = []
    for patched in (False, True):
        model = make("llama", vocab_size=common.VOCABULARY)
        if patched and order == "patch first":
            hf_flash.patch_model(model)
        trainer = trainer_for(model, tmp_path, trl.SFTTrainer, bf16=False, steps=3, **options.get(kind, {}))
        if patched and order == "patch last":
            hf_flash.patch_model(trainer.model)
        trainer.train()
        found.append(losses_of(trainer))
        if patched:
            assert hf_flash.report(model).stock_calls == 0 and hf_flash.report(model).fused_calls >= 6
    assert found[1] == pytest.approx(found[0], abs=1e-3) and len(found[0]) == 3
