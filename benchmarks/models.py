"""Stock Hugging Face models end to end, patched and not: tokens/s, peak memory, losses; prefill and decoding steps.

    python benchmarks/models.py --rows gpt2-355m --minutes 3
    python benchmarks/models.py --rows llama-1b/train --modes hf_flash,sdpa,hf_flash+compile,sdpa+compile
    python benchmarks/models.py --rows llama-1b/generate --modes hf_flash,hf_flash+graphs,sdpa,sdpa+static
    python benchmarks/models.py --losses 50 --rows llama-1b/train
    python benchmarks/models.py --longest="--limit 262144"    # the longest context that trains, by an example's program

Random weights in bf16, text of Python's standard library byte by byte, fused AdamW; a training step is forward,
backward, clipping and the optimiser, and tokens/s count real tokens only. Each mode has a model of its own, in turns
that go forth and back over the modes. A mode is an attention (hf_flash is stock sdpa, or eager where sdpa is not
offered, patched) and what is added to it: "+compile", "+liger", "+graphs" or "+static" (generation).
"""

import argparse
import contextlib
import gc
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]
import common  # noqa: E402
import lora_long_context  # noqa: E402
import record as records  # noqa: E402
import transformers  # noqa: E402
from tqdm import tqdm  # noqa: E402

import hf_flash  # noqa: E402
from hf_flash import bench  # noqa: E402


@dataclass(frozen=True)
class Row:
    model: str
    task: str  # "train", "packed" (documents one after another in one row) or "generate"
    batch: int
    seq: int
    fill: float  # share of real tokens; training pads on the right, generation on the left

    @property
    def name(self):
        return f"{self.model}/{self.task}/{self.batch}x{self.seq}"


ROWS = (
    Row("gpt2-355m", "train", 16, 1024, 1),
    Row("gpt2-355m", "train", 4, 4096, 1),
    Row("bert-large", "train", 64, 512, 0.6),
    Row("llama-1b", "train", 4, 4096, 0.6),
    Row("llama-1b", "packed", 4, 4096, 0.6),
    Row("llama-1b", "train", 1, 16384, 1),
    Row("llama-1b", "train", 1, 32768, 1),
    Row("gptj-6-layers", "train", 4, 2048, 0.6),
    Row("codegen-12-layers", "train", 4, 2048, 0.6),
    Row("gpt-1.3b", "train", 2, 8192, 1),
    Row("llama-1b", "generate", 8, 8192, 0.75),
    Row("llama-1b", "generate", 1, 128, 1),
    Row("gptj-6-layers", "generate", 8, 2048, 0.75),
)


def configuration(model, seq, tiny=False):
    """The configuration of a model by its name here; tiny: two narrow layers with the same head dim."""
    seq = seq + 256
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    if model in ("gpt2-355m", "gpt-1.3b"):
        layers, width = (24, 1024) if model == "gpt2-355m" else (24, 2048)
        layers, width, heads = (2, 128, 2) if tiny else (layers, width, 16)
        return transformers.GPT2Config(n_embd=width, n_layer=layers, n_head=heads, n_positions=seq, **no_dropout)
    if model == "bert-large":
        layers, width, heads = (2, 128, 2) if tiny else (24, 1024, 16)
        return transformers.BertConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width,
            max_position_embeddings=seq, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
    if model == "llama-1b":
        layers, width, heads, kv_heads = (2, 256, 2, 1) if tiny else (16, 2048, 16, 8)
        return transformers.LlamaConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
            intermediate_size=4 * width, max_position_embeddings=seq, tie_word_embeddings=True,
        )  # fmt: skip
    if model == "gptj-6-layers":
        layers, width, heads = (2, 512, 2) if tiny else (6, 4096, 16)
        return transformers.GPTJConfig(
            n_embd=width, n_layer=layers, n_head=heads, n_positions=seq, rotary_dim=64, **no_dropout
        )
    if model == "codegen-12-layers":
        layers, width, heads = (2, 320, 4) if tiny else (12, 2560, 32)
        return transformers.CodeGenConfig(
            n_embd=width, n_layer=layers, n_head=heads, n_positions=seq, n_ctx=seq, rotary_dim=64, vocab_size=51200,
            **no_dropout,
        )  # fmt: skip
    raise ValueError(f"no model is called {model!r}")


def build(row, mode, device, tiny):
    """The row's model with random weights (the same for every mode), in bf16, ready for the mode."""
    attention, *additions = mode.split("+")
    config = configuration(row.model, row.seq, tiny)
    kind = transformers.AutoModelForMaskedLM if row.model.startswith("bert") else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    stock = ("sdpa", "eager") if attention == "hf_flash" else (attention,)
    for implementation in stock:
        try:
            with torch.device(device):
                model = kind.from_config(config, attn_implementation=implementation, dtype=torch.bfloat16)
            break
        except ValueError:
            if implementation == stock[-1]:
                raise NotImplementedError(f"not offered by transformers {transformers.__version__}") from None
    if "liger" in additions:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    if attention == "hf_flash":
        hf_flash.patch_model(model, **({"cuda_graphs": True} if "graphs" in additions else {}))
    return torch.compile(model) if "compile" in additions else model


# ---- batches ---------------------------------------------------------------------------------------------------------


def training_batch(row, text, step, device):
    """The step's batch, the same for every mode: (keyword arguments of the model, lengths of its documents)."""
    generator = torch.Generator().manual_seed(step)
    ids = common.rows(text, row.batch, row.seq, generator)
    lengths = common.ragged_lengths(row.batch, row.seq, row.fill, generator)
    mask = torch.arange(row.seq) < lengths[:, None]
    labels = ids.masked_fill(~mask, -100)
    if row.model.startswith("bert"):
        chosen = (torch.rand(ids.shape, generator=generator) < 0.15) & mask
        labels = ids.masked_fill(~chosen, -100)
        ids = ids.masked_fill(chosen, common.EOS)
    batch = {"input_ids": ids.masked_fill(~mask, 0), "labels": labels}
    if row.task == "packed":
        positions = torch.arange(row.seq).expand_as(ids)
        labels = labels.masked_fill(positions == 0, -100)
        batch = {"input_ids": ids[mask][None], "labels": labels[mask][None], "position_ids": positions[mask][None]}
    elif row.fill < 1:
        batch["attention_mask"] = mask.long()
    return {name: tensor.to(device) for name, tensor in batch.items()}, lengths.tolist()


def prompt_batch(row, text, device):
    generator = torch.Generator().manual_seed(1)
    ids = common.rows(text, row.batch, row.seq, generator)
    lengths = common.ragged_lengths(row.batch, row.seq, row.fill, generator)
    mask = torch.arange(row.seq) >= row.seq - lengths[:, None]
    return {
        "input_ids": ids.masked_fill(~mask, 0).to(device),
        "attention_mask": mask.long().to(device),
    }, lengths.tolist()


# ---- measuring -------------------------------------------------------------------------------------------------------


class OutOfTime(Exception):
    pass


@contextlib.contextmanager
def time_limit(seconds):
    """Raises OutOfTime in the block after so many seconds."""

    def ring(*_):
        raise OutOfTime(f"not done within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clean(device):
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device):
    return round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if device.type == "cuda" else None


def optimiser(model, device):
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")


def train_step(model, optimizer, batch):
    loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def training_flops(model, row, lengths):
    """FLOPs of one step's mathematics: 6 per weight and real token, and the attention of the real pairs."""
    config = model.config
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name
                  and "wte" not in name and "wpe" not in name)  # fmt: skip
    head = model.get_output_embeddings()
    if head is not None and config.tie_word_embeddings:
        weights += head.weight.numel()
    causal = 1 if row.model.startswith("bert") else 0.5
    attention = 3.5 * 4 * config.hidden_size * config.num_hidden_layers * sum(n * n for n in lengths) * causal
    return 6 * weights * sum(lengths) + attention


def measure_training(model, row, text, device, steps):
    """Each step's seconds, tokens/s, FLOP/s and the peak memory of training for some steps after two that warm up."""
    optimizer = optimiser(model, device)
    batches = [training_batch(row, text, step, device) for step in range(steps + 2)]
    seconds, tokens, flops = [], 0, 0
    for step, (batch, lengths) in enumerate(batches):
        wait(device)
        before = time.perf_counter()
        train_step(model, optimizer, batch)
        wait(device)
        if step >= 2:
            seconds.append(time.perf_counter() - before)
            tokens, flops = tokens + sum(lengths), flops + training_flops(model, row, lengths)
    total = sum(seconds)
    return {"tokens_per_s": tokens / total, "model_tflops": flops / total / 1e12, "peak_gib": peak_gib(device)}


@torch.no_grad()
def measure_generation(model, row, mode, text, device, new_tokens, repeats=2):
    """Milliseconds of the prefill with the first token, and of each token after it."""
    batch, lengths = prompt_batch(row, text, device)
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    if "static" in mode:
        options["cache_implementation"] = "static"

    def run(count):
        wait(device)
        before = time.perf_counter()
        model.generate(**batch, max_new_tokens=count, min_new_tokens=count, **options)
        wait(device)
        return time.perf_counter() - before

    run(1 + new_tokens)
    first = statistics.median(run(1) for _ in range(repeats))
    rest = statistics.median(run(1 + new_tokens) for _ in range(repeats))
    step = max(rest - first, 1e-9) / new_tokens
    return {
        "prefill_ms": first * 1e3,
        "step_ms": step * 1e3,
        "tokens_per_s": row.batch / step,
        "peak_gib": peak_gib(device),
    }


def measure_losses(row, mode, text, device, tiny, steps):
    """The loss of every training step from the same weights on the same data."""
    clean(device)
    model = build(row, mode, device, tiny)
    model.train()
    optimizer = optimiser(model, device)
    losses = [train_step(model, optimizer, training_batch(row, text, step, device)[0]) for step in range(steps)]
    return [round(loss.item(), 4) for loss in losses]


def measure_mode(row, mode, text, device, options):
    clean(device)
    model = build(row, mode, device, options.tiny)
    if row.task == "generate":
        model.eval()
        return measure_generation(model, row, mode, text, device, options.new_tokens)
    model.train()
    return measure_training(model, row, text, device, options.steps)


def reason_of(error, row):
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def measure_row(row, modes, text, device, options, report):
    """Calls report(record rows) whenever a mode has been measured; later turns refine earlier ones."""
    results, errors, losses = {}, {}, {}
    for turn in range(options.turns):
        for mode in modes if turn % 2 == 0 else modes[::-1]:
            if mode in errors:
                continue
            try:
                with time_limit(options.seconds):
                    if options.losses:
                        losses[mode] = measure_losses(row, mode, text, device, options.tiny, options.losses)
                    else:
                        measured = measure_mode(row, mode, text, device, options)
                        results.setdefault(mode, []).append(measured)
            except Exception as error:
                errors[mode] = reason_of(error, row)
                tqdm.write(f"{row.name} {mode}: {errors[mode]}")
            report(record_rows(row, results, errors, losses))


def split_mode(mode):
    """ "sdpa+compile" -> ("sdpa", "compile"). Both sides' ways to capture a decoding step are one addition."""
    attention, *additions = mode.split("+")
    return attention, "+".join("captured step" if a in ("graphs", "static") else a for a in additions)


def record_rows(row, results, errors, losses):
    """A row of the record per addition, so that like stands beside like."""
    rows = {}

    def put(mode, name, value):
        attention, addition = split_mode(mode)
        fresh = {"model": row.model, "task": row.task, "batch": row.batch, "seq": row.seq, "fill": row.fill}
        merged = rows.setdefault(addition, {**fresh, **({"with": addition} if addition else {})})
        merged.setdefault(name, {})[attention] = value

    for mode, measured in results.items():
        for name in measured[0]:
            values = [m[name] for m in measured if m[name] is not None]
            if values:
                middle = max(values) if name == "peak_gib" else statistics.median(values)
                put(mode, name, float(f"{middle:.5g}"))
    for mode, reason in errors.items():
        put(mode, "errors", reason)
    for mode, values in losses.items():
        put(mode, "losses", values)
    return list(rows.values())


def describe(merged):
    words = ["/".join(str(merged[n]) for n in ("model", "task", "batch", "seq", "with") if n in merged)]
    for mode, value in merged.get("tokens_per_s", {}).items():
        peak = merged.get("peak_gib", {}).get(mode)
        extra = [f"{peak:.1f} GiB"] if peak is not None else []
        if "step_ms" in merged:
            extra.append(f"prefill {merged['prefill_ms'][mode]:.1f} ms, step {merged['step_ms'][mode]:.2f} ms")
        else:
            extra.append(f"{merged['model_tflops'][mode]:.3g} TFLOP/s")
        words.append(f"{mode} {value:,.0f} tok/s ({', '.join(extra)})")
    for mode, losses in merged.get("losses", {}).items():
        words.append(f"{mode} loss {losses[0]:.4f} -> {statistics.mean(losses[-5:]):.4f}")
    return " | ".join(words)


def longest_context(modes, arguments, tiny):
    """The row of examples/lora_long_context.py: the longest context that trains, by kind of attention."""
    kinds = ["patched" if mode == "hf_flash" else mode for mode in modes]
    limits = ["--start", "64", "--limit", "128", "--steps", "1", "--refine", "0"] if tiny else []
    found = lora_long_context.main(["--kinds", ",".join(kinds), "--plot", "", *limits, *arguments])
    row = {"model": "llama-1b", "task": "longest context", "batch": 1, "seq": 0, "fill": 1}
    for mode, points in zip(modes, found.values(), strict=True):
        best = lora_long_context.longest(points)
        row.setdefault("longest", {})[mode] = best
        if best:
            row.setdefault("peak_gib", {})[mode] = round(points[best][1], 2)
    return row


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help="parts of the rows' names: " + ", ".join(row.name for row in ROWS))
    parser.add_argument("--modes", default="hf_flash,sdpa,eager")
    parser.add_argument("--steps", type=int, default=8, help="training steps to time")
    parser.add_argument("--new-tokens", type=int, default=32, help="decoding steps to time")
    parser.add_argument("--turns", type=int, default=2, help="times that each mode is measured")
    parser.add_argument("--losses", type=int, default=0, metavar="STEPS", help="compare losses instead of speed")
    parser.add_argument(
        "--longest", nargs="?", const="", metavar="ARGUMENTS", help="find the longest context that trains instead"
    )
    parser.add_argument("--seconds", type=float, default=120, help="time limit of one mode of one row")
    parser.add_argument("--minutes", type=float, default=60, help="start no row after this long")
    parser.add_argument("--output", type=Path, default=records.RESULTS, help="folder of the record, or a .json file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers and short sequences (the CPU's default)")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    options.tiny |= device.type == "cpu"
    if options.losses:
        options.turns = 1
    wanted = [word for word in options.rows.split(",") if word]
    rows = [row for row in ROWS if not wanted or any(word in row.name for word in wanted)]
    if options.tiny:
        rows = [Row(r.model, r.task, min(r.batch, 2), min(64, r.seq // 32), r.fill) for r in rows]
        rows = list(dict.fromkeys(rows))
    transformers.logging.set_verbosity_error()
    text = common.standard_library()
    began = time.monotonic()
    limits = bench.ceilings(device, 5)
    recorder = records.Recorder(options.output, device.type, limits)
    print(f"product {limits['matmul_tflops']} TFLOP/s, copy {limits['copy_tb_s']} TB/s", flush=True)
    if options.longest is not None:
        recorder.add("models", longest_context(options.modes.split(","), options.longest.split(), options.tiny))
        rows = []
    for row in tqdm(rows, unit="row", disable=None):
        if time.monotonic() - began > 60 * options.minutes:
            tqdm.write(f"{row.name}: no time left")
            continue
        last = []

        def report(rows, last=last):
            last[:] = rows
            for merged in rows:
                recorder.add("models", merged)

        measure_row(row, options.modes.split(","), text, device, options, report)
        for merged in last:
            tqdm.write(describe(merged))
    print(f"{recorder.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
