"""Find the longest context that trains with LoRA, patched and stock, and draw memory against context.

    python examples/lora_long_context.py --model path/or/hub-name --memory-gib 80
    accelerate launch --config_file examples/accelerate/fsdp2.yaml examples/lora_long_context.py --split-sequences \
        --kinds patched

Without --model a Llama with random weights: of a billion parameters on a GPU, a tiny one on the CPU. Every length runs
whole training steps with gradient checkpointing, first doubling until one does not fit, then halving the gap. With
--split-sequences the processes share each sequence, so that a context may exceed what one GPU holds. The patched model
trains without keeping its logits (keep_logits=False): the loop reads the loss alone.
"""

import argparse
import gc
import threading
import time
from pathlib import Path

import common
import torch
import transformers
from accelerate import Accelerator
from tqdm import tqdm

import hf_flash


def arguments(argv=None):
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="Hub path or folder (default: a Llama with random weights)")
    parser.add_argument("--text", help="a text file (default: Python's standard library)")
    parser.add_argument("--kinds", default="patched,sdpa,eager", help="what to compare")
    parser.add_argument("--start", type=int, default=4096 if cuda else 256, help="first context")
    parser.add_argument("--limit", type=int, default=1 << 20 if cuda else 2048, help="try no longer context")
    parser.add_argument("--steps", type=int, default=2, help="training steps per length")
    parser.add_argument("--refine", type=int, default=3 if cuda else 1, help="times to halve the gap")
    parser.add_argument(
        "--memory-gib", type=float, default=0 if cuda else 0.15, help="count as full; 0: the GPU's memory"
    )
    parser.add_argument("--step-seconds", type=float, default=180 if cuda else 15, help="give up on slower steps")
    parser.add_argument("--minutes", type=float, default=30 if cuda else 2, help="shared evenly by the kinds")
    parser.add_argument("--rank", type=int, default=16, help="of the LoRA adapters")
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--split-sequences", action="store_true", help="share each sequence among the processes")
    parser.add_argument("--plot", default="lora_long_context.png")
    options = parser.parse_args(argv)
    if options.split_sequences and options.kinds != "patched":
        parser.error("--split-sequences: stock models cannot share a sequence; add --kinds patched")
    return options


def load_model(options, kind, device):
    """A LoRA model in bf16 on a GPU, patched or with stock attention."""
    from peft import LoraConfig, get_peft_model

    attention = "sdpa" if kind == "patched" else kind
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    if options.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, attn_implementation=attention, dtype=dtype
        )
    else:
        large = torch.cuda.is_available()
        layers, width, heads, kv_heads, words = (16, 2048, 16, 8, 32000) if large else (2, 128, 4, 2, common.VOCABULARY)
        config = transformers.LlamaConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
            intermediate_size=4 * width, vocab_size=words, max_position_embeddings=options.limit,
        )  # fmt: skip
        torch.manual_seed(0)
        with device:
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    model = get_peft_model(model, LoraConfig(r=options.rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    if not options.no_checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if options.split_sequences:
        hf_flash.split_sequences(model)
    return hf_flash.patch_model(model, keep_logits=False) if kind == "patched" else model


class PeakMemory:
    """The most memory in use while the block ran, in GiB: the allocator's count, or on the CPU the process's growth."""

    def __init__(self, device):
        self.device, self.gib = device, 0.0

    @staticmethod
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def watch(self):
        while not self.done.wait(0.002):
            self.gib = max(self.gib, (self.resident() - self.before) / 2**30)

    def __enter__(self):
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self.before, self.done = self.resident(), threading.Event()
            self.thread = threading.Thread(target=self.watch, daemon=True)
            self.thread.start()
        return self

    def __exit__(self, *_):
        if self.device.type == "cuda":
            self.gib = torch.cuda.max_memory_allocated(self.device) / 2**30
        else:
            self.done.set()
            self.thread.join()


def try_context(model, optimizer, accelerator, ids, context, options):
    """Trains some steps at one length: (whether it fits, peak GiB, tokens/s, last loss)."""
    device, generator = accelerator.device, torch.Generator().manual_seed(context)
    copies = -(-(context + 1) // len(ids))
    text = ids.repeat(copies + 1) if copies > 1 else ids
    seconds, loss = [], float("nan")
    try:
        with PeakMemory(device) as memory:
            for _ in range(options.steps):
                batch = common.rows(text, 1, context, generator).to(device)
                before = time.perf_counter()
                output = model(input_ids=batch, labels=batch, use_cache=False)
                accelerator.backward(output.loss)
                optimizer.step()
                optimizer.zero_grad()
                loss = output.loss.item()
                del output
                seconds.append(time.perf_counter() - before)
                if seconds[-1] > options.step_seconds and accelerator.num_processes == 1:
                    break
    except torch.OutOfMemoryError:
        optimizer.zero_grad()
        return False, float("nan"), 0.0, loss
    fits = not options.memory_gib or memory.gib <= options.memory_gib
    return fits and seconds[-1] <= options.step_seconds, memory.gib, context / min(seconds), loss


def prepare(kind, options, accelerator):
    model = load_model(options, kind, accelerator.device).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    return accelerator.prepare(model, optimizer)


def explore(kind, ids, options, bar, accelerator):
    """Measured points of one kind: context -> (fits, peak GiB, tokens/s, loss)."""
    prepared, points, late = prepare(kind, options, accelerator), {}, False
    deadline = time.monotonic() + 60 * options.minutes / len(options.kinds.split(","))

    def attempt(context):
        nonlocal prepared, late
        bar.set_description(f"{kind} {context}")
        fits, gib, speed, loss = try_context(*prepared, accelerator, ids, context, options)
        late = time.monotonic() > deadline
        if accelerator.num_processes > 1:  # what one cannot do all cannot
            facts = torch.tensor([not fits, gib, late], device=accelerator.device)
            failed, gib, late = accelerator.gather(facts[None]).amax(0).tolist()
            fits = not failed
            if failed:  # a backward pass that was cut short leaves DDP and FSDP in the middle of it
                prepared = accelerator.free_memory()
                gc.collect()
                prepared = prepare(kind, options, accelerator)
        points[context] = fits, gib, speed, loss
        bar.update()
        bar.set_postfix(GiB=f"{points[context][1]:.2f}", fits=points[context][0])
        return points[context][0]

    attempt(min(options.start, 128))  # what is allocated once must not count for the first length
    points.clear()
    context = options.start
    while attempt(context) and context < options.limit and not late:
        context = min(2 * context, options.limit)
    low, high = longest(points), context
    for _ in range(options.refine if low and low < high and not points[high][0] else 0):
        middle = (low + high) // 2 // 64 * 64
        if late or middle in (low, high):
            break
        low, high = (middle, high) if attempt(middle) else (low, middle)
    if late:
        bar.write(f"{kind}: no time for other lengths (--minutes {options.minutes:g})")
    accelerator.free_memory()
    return points


def longest(points):
    return max((context for context, point in points.items() if point[0]), default=0)


def main(argv=None):
    options = arguments(argv)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    ids = common.load_ids(options.model, options.text)
    results = {}
    with tqdm(unit="length", disable=not accelerator.is_main_process) as bar:
        for kind in options.kinds.split(","):
            results[kind] = explore(kind, ids, options, bar, accelerator)
            gc.collect()
    if not accelerator.is_main_process:
        return results
    lines = []
    for kind, points in results.items():
        best = longest(points)
        _, peak, speed, loss = points[best] if best else (False, float("nan"), 0, float("nan"))
        lines.append([kind, f"{best:,}", f"{peak:.2f}", f"{speed:,.0f}", f"{loss:.3f}"])
    budget = f"{options.memory_gib:g} GiB" if options.memory_gib else "the GPU's memory"
    common.print_table(
        f"longest context that trains within {budget} (tried up to {options.limit:,})",
        ["", "tokens", "peak GiB", "tokens/s", "loss"], lines,
    )  # fmt: skip
    if options.plot:
        lines = {kind: [(n, gib, speed) for n, (fits, gib, speed, _) in points.items() if fits]
                 for kind, points in results.items()}  # fmt: skip
        common.draw_contexts(lines, options.plot)
        print(f"  plot: {options.plot}")
    return results


if __name__ == "__main__":
    main()
