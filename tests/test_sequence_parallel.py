"""Sequences split over two processes: loss, gradients and logits are those of one process.

Each check below runs in two processes, over gloo: this file as a program.
"""

import json
import os
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from families import CAUSAL, assert_gradients_close, make, mask_of, tokens
from torch.nn.parallel import DistributedDataParallel

import hf_flash

CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def batches():
    """Batches of every kind, the same in every process; 21 to 36 tokens, some in odd numbers."""
    for kind in ("right", "left", "both", "holes"):
        mask = mask_of(kind)
        ids = tokens(seed=1).masked_fill(mask == 0, 0)
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, 1:] = labels[:, 1:].masked_fill(mask[:, :-1] == 0, -100)
        labels[:, 0] = -100
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}
    ids = tokens(1, 11, seed=2)
    yield {"input_ids": ids, "labels": ids}
    labels = ids.clone()
    labels[:, [0, 3, 7]] = -100
    yield {"input_ids": ids, "labels": labels, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3]])}


def assert_equal_to_one_process(split, whole, batch):
    """One step of both: `split` shares sequences and leaves its gradients' average to this function."""
    expected, found = whole(**batch), split(**batch, num_items_in_batch=None)
    torch.testing.assert_close(found.loss, expected.loss, atol=1e-6, rtol=1e-5)
    expected.loss.backward()
    found.loss.backward()
    for parameter in split.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= dist.get_world_size()
    assert_gradients_close(split, whole)
    for model in (split, whole):
        model.zero_grad()


def lora(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def trained(model, split=None, steps=3):
    """Losses of some steps of SGD; the model is `split`, or what wraps it."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2)
    losses = []
    for batch in list(batches())[:steps]:
        loss = (split or model)(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@check
def loss_and_gradients_equal_one_process():
    for name in [*CAUSAL, "qwen3"]:
        whole = hf_flash.patch_model(make(name)).train()
        split = hf_flash.split_sequences(make(name)).train()
        for batch in batches():
            assert_equal_to_one_process(split, whole, batch)
        assert hf_flash.report(split).stock_calls == 0


@check
def the_report_counts_forwards_that_are_split_and_that_are_not():
    split = hf_flash.split_sequences(make("llama"))
    assert hf_flash.report(split).notes == ["sequences split among 2 processes (0x)"]
    ids = tokens(1, 11, seed=2)
    for _ in range(2):
        split(ids, use_cache=False)
    assert hf_flash.report(split).notes == ["sequences split among 2 processes (2x)"]
    split(ids, use_cache=True)
    assert "sequences not split: a cache is kept (1x)" in hf_flash.report(split).notes
    assert hf_flash.report(hf_flash.unpatch_model(split)).notes == []


@check
def logits_may_be_left_out():
    whole = hf_flash.patch_model(make("llama")).train()
    split = hf_flash.split_sequences(hf_flash.patch_model(make("llama"), keep_logits=False)).train()
    for batch in list(batches())[:2]:
        assert split(**batch).logits is None
        assert_equal_to_one_process(split, whole, batch)


@check
def a_window_reaches_into_the_other_share():
    whole, split = hf_flash.patch_model(make("mistral-window")), hf_flash.split_sequences(make("mistral-window"))
    for batch in list(batches())[:2]:
        assert_equal_to_one_process(split, whole, batch)


@check
def training_in_ddp_with_checkpointing_equals_one_process():
    for reentrant in (False, True):
        models = [lora(make("llama")).train() for _ in range(2)]
        for model in models:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        wrapped = DistributedDataParallel(hf_flash.split_sequences(models[1]))
        expected = trained(hf_flash.patch_model(models[0]))
        assert trained(models[1], wrapped) == pytest.approx(expected, abs=1e-5)


@check
def training_with_sharded_parameters_equals_one_process():
    from torch.distributed.fsdp import fully_shard

    whole, split = hf_flash.patch_model(make("gpt2")).train(), hf_flash.split_sequences(make("gpt2")).train()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for layer in split.transformer.h:
        fully_shard(layer, mesh=mesh)
    fully_shard(split, mesh=mesh)
    assert trained(split) == pytest.approx(trained(whole), abs=1e-5)


@check
def shares_of_the_logits_are_in_the_order_of_the_tokens():
    whole, split = hf_flash.patch_model(make("llama")), hf_flash.split_sequences(make("llama"))
    for batch in batches():
        labels, real = batch.pop("labels"), batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        with torch.no_grad():
            expected, share = whole(**batch, use_cache=False).logits[real], split(**batch).logits[0]
        every = [torch.empty_like(share) for _ in range(2)]
        dist.all_gather(every, share)
        assert len(share) == -(-len(expected) // 2) and labels.shape == real.shape
        torch.testing.assert_close(torch.cat(every)[: len(expected)], expected, atol=1e-5, rtol=1e-5)


@check
def generation_is_not_split_and_says_so_once():
    whole, split = hf_flash.patch_model(make("llama")), hf_flash.split_sequences(make("llama"))
    given = {"input_ids": tokens(2, 5, seed=3), "max_new_tokens": 4, "do_sample": False}
    with pytest.warns(UserWarning, match="keeps a cache is not split") as told:
        found = split.generate(**given)
    assert torch.equal(found, whole.generate(**given)) and len([w for w in told if "cache" in str(w.message)]) == 1


@check
def different_batches_are_refused_in_every_process():
    split = hf_flash.split_sequences(make("llama"))
    with pytest.raises(ValueError, match="different batches"):
        split(tokens(2, 6, seed=dist.get_rank()))
    with pytest.raises(ValueError, match="different batches"):
        split(tokens(2, 6 + dist.get_rank(), seed=0))


@check
def what_cannot_be_split_is_refused():
    for name, changes in (("llama", {"num_key_value_heads": 3, "num_attention_heads": 9, "hidden_size": 144}),):
        with pytest.raises(ValueError, match="9 query and 3 key/value heads cannot be shared by 2"):
            hf_flash.split_sequences(make(name, **changes))
    bert = make("bert")
    with pytest.raises(NotImplementedError, match="not in BertForMaskedLM"):
        hf_flash.split_sequences(bert)
    assert not hf_flash.report(bert).patched
    with pytest.raises(TypeError, match="no transformers model"):
        hf_flash.split_sequences(torch.nn.Linear(1, 1))
    split, ids = hf_flash.split_sequences(make("llama")), tokens(3, 12, seed=0)
    for given, reason in (
        ({"attention_mask": mask_of("right"), "labels": ids}, "padding carries labels"),
        ({"attention_mask": mask_of("right") * 0}, "no tokens"),
        ({"attention_mask": torch.ones(3, 1, 12, 12)}, "the mask's shape"),
        ({"output_attentions": True}, "attention weights are wanted"),
        ({"logits_to_keep": 1}, "logits_to_keep"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            split(ids, **given)
    hf_flash.unpatch_model(split)
    assert torch.equal(split(ids).logits, make("llama")(ids).logits)


# ---- the tests -------------------------------------------------------------------------------------------------------


def test_without_processes_the_error_names_the_launcher():
    with pytest.raises(RuntimeError, match="accelerate launch"):
        hf_flash.split_sequences(make("llama"))


def test_every_check_passes_in_two_processes(tmp_path):
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environ.pop("HF_FLASH_LIBRARY", None)
    processes = [subprocess.Popen([sys.executable, __file__, str(rank), tmp_path], env=environ) for rank in range(2)]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    for rank in range(2):
        outcomes = json.loads((tmp_path / f"{rank}.json").read_text())
        assert outcomes.keys() == CHECKS.keys()
        failed = {name: trace for name, trace in outcomes.items() if trace is not None}
        assert not failed, "\n".join([f"failed in process {rank}: {', '.join(failed)}", *failed.values()])


def run_checks(rank, folder):
    """One of the two processes: runs every check, and writes what failed, with its traceback."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    transformers.logging.set_verbosity_error()
    outcomes = dict.fromkeys(CHECKS)
    for name, function in CHECKS.items():
        try:
            function()
        except Exception:
            outcomes[name] = traceback.format_exc()
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


if __name__ == "__main__":
    run_checks(int(sys.argv[1]), Path(sys.argv[2]))
