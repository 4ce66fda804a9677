"""Fine-tune a causal language model with hf_flash, alone or under `accelerate launch`.

    python examples/finetune.py --compare --generate
    accelerate launch --config_file examples/accelerate/ddp.yaml examples/finetune.py --model path/or/hub-name

Without --model a small CodeGen learns Python's standard library byte by byte, from scratch. Batches are pieces of
different lengths padded on the right. --compare trains the stock model too, from the same weights on the same batches.
Under `accelerate launch` processes divide the rows of a batch, or with --split-sequences share every row.
"""

import argparse
import copy
from pathlib import Path

import common
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from tqdm import tqdm

import hf_flash


def arguments(argv=None):
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="Hub path or folder (default: a small CodeGen with random weights)")
    parser.add_argument("--text", help="a text file to learn (default: Python's standard library)")
    parser.add_argument("--steps", type=int, default=200 if cuda else 50)
    parser.add_argument("--batch", type=int, default=16 if cuda else 8, help="rows over all processes")
    parser.add_argument("--seq", type=int, default=2048 if cuda else 192)
    parser.add_argument("--fill", type=float, default=0.6, help="share of real tokens in a batch")
    parser.add_argument("--lr", type=float, help="default: 1e-3 from scratch, 2e-5 for a model that is loaded")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train LoRA adapters, not all weights")
    parser.add_argument("--precision", default="bf16" if cuda else "no", choices=("no", "bf16", "fp16"))
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--split-sequences", action="store_true", help="share every row among the processes")
    parser.add_argument("--stock", action="store_true", help="train the stock model, not a patched one")
    parser.add_argument("--compare", action="store_true", help="train the stock model as well and print both")
    parser.add_argument("--generate", action="store_true", help="let the trained model write a little")
    parser.add_argument("--output", help="folder to save the trained model in")
    parser.add_argument("--checkpoint", type=Path, help="folder for the training's state; what is there is taken up")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if options.split_sequences and (options.stock or options.compare):
        parser.error("--split-sequences: stock models cannot share a row")
    return options


def small_codegen(seq):
    """A CodeGen that learns bytes: CodeGen-350M's shape on a GPU, three narrow layers on the CPU."""
    layers, width, heads = (20, 1024, 16) if torch.cuda.is_available() else (3, 192, 4)
    config = transformers.CodeGenConfig(
        vocab_size=common.VOCABULARY, n_embd=width, n_layer=layers, n_head=heads, n_positions=max(seq, 1024),
        n_ctx=max(seq, 1024), rotary_dim=32, bos_token_id=common.EOS, eos_token_id=common.EOS,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def load_model(options):
    if options.model is None:
        return small_codegen(options.seq)
    return transformers.AutoModelForCausalLM.from_pretrained(options.model)


def with_adapters(model, rank):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))


def make_batch(ids, options, step):
    """The rows of one step over all processes: input_ids, attention_mask, labels, each int64 (batch, seq)."""
    generator = torch.Generator().manual_seed(options.seed + step)
    rows = common.rows(ids, options.batch, options.seq, generator)
    lengths = common.ragged_lengths(options.batch, options.seq, options.fill, generator)
    mask = torch.arange(options.seq) < lengths[:, None]
    return {"input_ids": rows * mask, "attention_mask": mask.long(), "labels": rows.masked_fill(~mask, -100)}


class Losses(list):
    """The losses so far. In a checkpoint their number is the step to go on from."""

    def state_dict(self):
        return {"losses": list(self)}

    def load_state_dict(self, state):
        self[:] = state["losses"]


def train(model, ids, options, accelerator, name):
    """Trains in place. Returns (the prepared model, its losses per step, tokens/s, peak GiB or None)."""
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    lr = options.lr or (2e-5 if options.model else 1e-3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, state = Losses(), options.checkpoint and options.checkpoint / name
    accelerator.register_for_checkpointing(schedule, losses)
    if state and state.is_dir():
        accelerator.load_state(state)
    parts = 1 if options.split_sequences else accelerator.num_processes
    part = accelerator.process_index % parts
    tokens, clock, first = 0, common.Clock(accelerator.device), len(losses)
    bar = tqdm(range(first, options.steps), desc=name, unit="step", disable=not accelerator.is_main_process)
    for step in bar:
        whole = make_batch(ids, options, step)
        batch = {key: value[part::parts].to(accelerator.device) for key, value in whole.items()}
        # Every target counts alike, however the rows are spread: processes average their gradients.
        share = (batch["labels"][:, 1:] != -100).sum() * parts / (whole["labels"][:, 1:] != -100).sum()
        loss = model(**batch).loss * share
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
        tokens += int(whole["attention_mask"].sum())
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
        if step == first:
            tokens, clock = 0, common.Clock(accelerator.device)  # the first step warms up
    if state:
        accelerator.save_state(state)
    return model, list(losses), tokens / clock.seconds(), clock.peak_gib()


def write(model, options, device, prompt="def main(", count=120):
    """The prompt and what the model makes of it."""
    tokenizer = common.load_tokenizer(options.model)
    batch = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(device)
    model.eval()
    with torch.no_grad():
        ids = model.generate(**batch, max_new_tokens=count, do_sample=True, top_k=20, pad_token_id=0)
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def tail(losses):
    """Mean of the last tenth of the losses."""
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def main(argv=None):
    options = arguments(argv)
    set_seed(options.seed)
    ids = common.load_ids(options.model, options.text)
    model = load_model(options)
    if options.lora:
        model = with_adapters(model, options.lora)
    kinds = ["stock"] if options.stock else ["patched"]
    kinds += ["stock"] if options.compare and not options.stock else []
    results, text = {}, None
    for kind in kinds:
        set_seed(options.seed)
        accelerator = Accelerator(mixed_precision=options.precision, cpu=not torch.cuda.is_available())
        trained = copy.deepcopy(model) if kind != kinds[-1] else model
        if kind == "patched":
            hf_flash.patch_model(trained)
        if options.split_sequences:
            hf_flash.split_sequences(trained)
        trained, *results[kind] = train(trained, ids, options, accelerator, kind)
        if kind == kinds[0]:
            whole = accelerator.unwrap_model(trained)
            if options.generate and accelerator.num_processes == 1:
                text = write(whole, options, accelerator.device)
            if kind == "patched":
                accelerator.print(hf_flash.report(whole))
            if options.output:
                state = accelerator.get_state_dict(trained)
                whole.save_pretrained(
                    options.output, state_dict=state, is_main_process=accelerator.is_main_process,
                    save_function=accelerator.save,
                )  # fmt: skip
        del trained
        accelerator.free_memory()
    if not accelerator.is_main_process:
        return results
    if text:
        print(f"\nWritten after {options.steps} steps:\n{text}")
    if options.output:
        print(f"\nsaved in {options.output}")
    common.print_table(
        f"{options.steps} steps of {options.batch} x {options.seq} tokens, {options.fill:.0%} of them real, "
        f"{accelerator.num_processes} process(es)",
        ["", "first loss", "last loss", "tokens/s", "peak GiB"],
        [[kind, f"{losses[0]:.4f}", f"{tail(losses):.4f}", f"{speed:,.0f}", common.gib(peak)]
         for kind, (losses, speed, peak) in results.items()],
    )  # fmt: skip
    if len(results) == 2:
        patched, stock = results["patched"], results["stock"]
        apart = max(abs(a - b) for a, b in zip(patched[0], stock[0], strict=True))
        print(f"  patched / stock: {patched[1] / stock[1]:.2f} times the tokens/s; losses at most {apart:.1e} apart")
    return results


if __name__ == "__main__":
    main()
