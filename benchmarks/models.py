"""Stock Hugging Face models end to end, patched and not: tokens/s, peak memory; prefill and decoding steps.

    python benchmarks/models.py --rows gpt2-355m --minutes 3
    python benchmarks/models.py --rows llama-1b/train --modes hf_flash,sdpa,hf_flash+compile,sdpa+compile
    python benchmarks/models.py --rows llama-1b/train/1x --modes hf_flash+liger,sdpa+liger,sdpa
    python benchmarks/models.py --rows llama-1b/generate --modes hf_flash,hf_flash+graphs,sdpa,sdpa+static
    python benchmarks/models.py --longest="--limit 262144"    # the longest context that trains, by an example's program

Random weights in bf16, text of Python's standard library byte by byte, fused AdamW; a training step is forward,
backward, clipping and the optimiser, and tokens/s count real tokens only. Each mode has a model of its own, in turns
that go forth and back over the modes. A mode is an attention (hf_flash is stock sdpa, or eager where sdpa is not
offered, patched) and what is added to it: "+compile", "+liger" (fused_layers=True; stock with Liger-Kernel, which knows
Llama alone of these models), "+no_logits" (keep_logits=False; stock as it is), "+graphs" or "+static" (generation).
"""

import argparse
import contextlib
import signal
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import record as records
import torch
import transformers
from tqdm import tqdm
from workloads import ROWS, build, clean, common, optimiser, prompt_batch, shrunk, train_step, training_batch

from hf_flash import timing

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


def peak_gib(device):
    return round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if device.type == "cuda" else None


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
    results, errors = {}, {}
    for turn in range(options.turns):
        for mode in modes if turn % 2 == 0 else modes[::-1]:
            if mode in errors:
                continue
            try:
                with time_limit(options.seconds):
                    measured = measure_mode(row, mode, text, device, options)
                    results.setdefault(mode, []).append(measured)
            except Exception as error:
                errors[mode] = reason_of(error, row)
                tqdm.write(f"{row.name} {mode}: {errors[mode]}")
            report(record_rows(row, results, errors))


def split_mode(mode):
    """ "sdpa+compile" -> ("sdpa", "compile"). Both sides' ways to capture a decoding step are one addition."""
    attention, *additions = mode.split("+")
    return attention, "+".join("captured step" if a in ("graphs", "static") else a for a in additions)


def record_rows(row, results, errors):
    """A row of the record per addition, so that like stands beside like."""
    rows = {}

    def put(mode, name, value):
        attention, addition = split_mode(mode)
        merged = rows.setdefault(addition, {**asdict(row), **({"with": addition} if addition else {})})
        merged.setdefault(name, {})[attention] = value

    for mode, measured in results.items():
        for name in measured[0]:
            values = [m[name] for m in measured if m[name] is not None]
            if values:
                middle = max(values) if name == "peak_gib" else statistics.median(values)
                put(mode, name, float(f"{middle:.5g}"))
    for mode, reason in errors.items():
        put(mode, "errors", reason)
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
    return " | ".join(words)


def longest_context(modes, arguments, tiny):
    """The row of examples/lora_long_context.py: the longest context that trains, by kind of attention."""
    import lora_long_context  # an example, which workloads made importable

    kinds = ["patched" if mode == "hf_flash" else mode for mode in modes]
    limits = ["--start", "64", "--limit", "128", "--steps", "1", "--refine", "0"] if tiny else []
    found = lora_long_context.main(["--kinds", ",".join(kinds), "--plot", "", *limits, *arguments])
    row = {"model": "llama-1b", "task": "longest context", "batch": 1, "seq": 0, "fill": 1}
    for mode, points in zip(modes, found.values(), strict=True):
        best = lora_long_context.longest(points)
        row.setdefault("longest", {})[mode] = best
        if best:
            row.setdefault("peak_gib", {})[mode] = round(points[best][1], 2)
        line = [[context, round(gib, 3), round(speed, 1)] for context, (fits, gib, speed, _) in points.items() if fits]
        row.setdefault("contexts", {})[mode] = sorted(line)
    return row


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help="parts of the rows' names: " + ", ".join(row.name for row in ROWS))
    parser.add_argument("--modes", default="hf_flash,sdpa,eager")
    parser.add_argument("--steps", type=int, default=8, help="training steps to time")
    parser.add_argument("--new-tokens", type=int, default=32, help="decoding steps to time")
    parser.add_argument("--turns", type=int, default=2, help="times that each mode is measured")
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
    wanted = [word for word in options.rows.split(",") if word]
    rows = [row for row in ROWS if not wanted or any(word in row.name for word in wanted)]
    if options.tiny:
        rows = list(dict.fromkeys(map(shrunk, rows)))
    transformers.logging.set_verbosity_error()
    text = common.standard_library()
    began = time.monotonic()
    limits = timing.ceilings(device, 5)
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
