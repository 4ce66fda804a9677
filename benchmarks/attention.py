"""Attention kernels against the fastest there are: FlashAttention-2 and cuDNN through PyTorch, FlashAttention-3 and -4.

    python benchmarks/attention.py --grid dense --head-dims 64,128 --passes forward --minutes 4
    python benchmarks/attention.py --grid grouped,varlen,long,decode --isolate

Each cell is checked against fp32 first, then timed as hf_flash/timing.py describes, and saved to the record at once, so
that a run can be cut into pieces and cut off. The contenders of a cell are always measured in the same run; with
--isolate each is a process of its own, whose crash costs its own figures alone.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import contenders  # noqa: E402
import record as records  # noqa: E402
from tqdm import tqdm  # noqa: E402

from hf_flash import bench, timing  # noqa: E402

TOKENS = 16384
HEADS = {32: 64, 64: 32, 80: 16, 96: 16, 128: 16, 160: 8, 192: 8, 256: 8}
GRIDS = ("decode", "dense", "grouped", "varlen", "long")

# (batch, cached keys, heads, kv_heads, head_dim)
DECODE = (
    (1, 32768, 32, 8, 128),
    (1, 131072, 32, 8, 128),
    (16, 8192, 32, 8, 128),
    (64, 4096, 32, 8, 128),
    (16, 4096, 16, 16, 256),
    (16, 4096, 32, 32, 128),
)


def ragged_lengths(total, low, high, seed=1):
    """Lengths between low and high, spread evenly over their logarithms, that add up to total."""
    draw, lengths = random.Random(seed), []
    while (left := total - sum(lengths)) > 0:
        length = round(low * (high / low) ** draw.random())
        lengths.append(left if left - length < low else length)
    return tuple(lengths)


def attention_cases(options, tokens):
    dtype = getattr(torch, options.dtype)
    masks = [mask == "causal" for mask in options.masks.split(",")]
    for head_dim in options.head_dims if "dense" in options.grid else ():
        for causal in masks:
            for seq in options.seqs:
                heads = HEADS.get(head_dim, max(1, 2048 // head_dim))
                yield bench.Case(head_dim, seq, max(1, tokens // seq), heads, causal=causal, dtype=dtype)
    if "grouped" in options.grid:
        for kv_heads in (8, 1):
            yield bench.Case(128, tokens // 2, 2, 32, kv_heads, causal=True, dtype=dtype)
    if "varlen" in options.grid:
        lengths = ragged_lengths(tokens, max(1, 100 * tokens // TOKENS), tokens // 2)
        for head_dim in (64, 128):
            for causal in masks:
                yield bench.Case(
                    head_dim, max(lengths), heads=2048 // head_dim, causal=causal, dtype=dtype, lengths=lengths
                )
    if "long" in options.grid:
        yield bench.Case(128, 4 * tokens, 1, 16, causal=True, dtype=dtype)


def work_of(options, tokens):
    """[(pass, case)]: the decode table first, as its rows are few and its caches are large."""
    work = []
    if "decode" in options.grid:
        dtype = getattr(torch, options.dtype)
        shapes = [(batch, max(16, cached * tokens // TOKENS), *rest) for batch, cached, *rest in DECODE]
        work += [("decode", contenders.Cache(*shape, dtype)) for shape in shapes]
    return work + [(which, case) for case in attention_cases(options, tokens) for which in options.passes.split(",")]


def measure(entrants, which, case, rounds):
    """Seconds per call of each contender, {name: median}, and {name: error or the reason why it has none}."""
    errors = {name: entrant.enter(which, case) for name, entrant in entrants.items()}
    errors = {name: error for name, error in errors.items() if error is not None}
    right = [name for name, error in errors.items() if not isinstance(error, str) and error <= bench.TOLERANCE]
    turns = timing.take_turns({name: entrants[name] for name in right}, rounds)
    for entrant in entrants.values():
        entrant.leave()
    seconds = {name: statistics.median(times) for name, times in turns.items()}
    crashed = [name for name, time in seconds.items() if time != time]
    errors |= dict.fromkeys(crashed, "its process crashed or hung while it was timed")
    return {name: time for name, time in seconds.items() if name not in crashed}, errors


def complaints(errors):
    """The contenders that did not run or were wrong, in words, and the largest error of those that were right."""
    bad = {n: e if isinstance(e, str) else f"wrong by {e:.1%}" for n, e in errors.items()
           if isinstance(e, str) or not e <= bench.TOLERANCE}  # fmt: skip
    return bad, max((e for n, e in errors.items() if n not in bad), default=0.0)


def row_of(which, case, seconds, matmul_tflops):
    """(section of the record, row): figures of one cell, and our share of the product's rate in the same run."""
    if which != "decode":
        row = bench.row_of(case, which, seconds)
        if "hf_flash" in seconds:
            row["of_matmul"] = round(row["tflops"]["hf_flash"] / matmul_tflops, 3)
        return "attention", row
    shape = {name: getattr(case, name) for name in ("batch", "cached", "heads", "kv_heads", "head_dim")}
    return "decode", {
        **shape,
        "dtype": str(case.dtype).removeprefix("torch."),
        "us": {name: round(s * 1e6, 1) for name, s in seconds.items()},
        "tb_s": {name: round(case.bytes() / s / 1e12, 3) for name, s in seconds.items()},
    }


def run(options, device, tokens, entrants):
    limits = timing.ceilings(device, options.rounds)
    print(f"product {limits['matmul_tflops']} TFLOP/s, copy {limits['copy_tb_s']} TB/s", flush=True)
    recorder = records.Recorder(options.output, device.type, limits)
    work, began, left_out = work_of(options, tokens), time.monotonic(), 0
    for which, case in tqdm(work, unit="cell", disable=None):
        if time.monotonic() - began > 60 * options.minutes:
            left_out += 1
            continue
        seconds, errors = measure(entrants, which, case, options.rounds)
        bad, worst = complaints(errors)
        section, row = row_of(which, case, seconds, limits["matmul_tflops"])
        if bad:
            row["errors"] = bad
        if seconds:
            recorder.add(section, row)
        figures = row.get("tflops") or row.get("us")
        text = f"{which:8} {case.label()} {'us' if which == 'decode' else 'TFLOP/s'} {figures} error {worst:.1e}"
        tqdm.write(text + (f" left out: {bad}" if bad else ""))
    late = f", {left_out} for want of time" if left_out else ""
    print(f"{recorder.path}: {len(work) - left_out} cells in {time.monotonic() - began:.0f} s{late}")


def enlist(names, device, isolate):
    """Name -> contender, without those whose package is not there."""
    entrants, kind = {}, contenders.Isolated if isolate else contenders.Contender
    for name in names:
        try:
            entrants[name] = kind(name, device)
        except ImportError as reason:
            print(f"{name} is left out: {reason}", file=sys.stderr)
    return entrants


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", default="dense", help=f"any of {','.join(GRIDS)}, or all")
    parser.add_argument("--head-dims", type=bench.integers, default=[64, 80, 96, 128, 256])
    parser.add_argument("--seqs", type=bench.integers, default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--masks", default="full,causal")
    parser.add_argument("--passes", default="forward,backward")
    parser.add_argument("--contenders", default=",".join(contenders.NAMES))
    parser.add_argument("--isolate", action="store_true", help="a process for each contender")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--minutes", type=float, default=60, help="start no cell after this long")
    parser.add_argument("--output", type=Path, default=records.RESULTS, help="folder of the record, or a .json file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, help=f"tokens in all (default {TOKENS}; 256 on the CPU)")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    tokens = options.tokens or (TOKENS if device.type == "cuda" else 256)
    options.grid = GRIDS if options.grid == "all" else options.grid.split(",")
    entrants = enlist(options.contenders.split(","), device, options.isolate)
    try:
        with timing.side_stream(device):
            run(options, device, tokens, entrants)
    finally:
        for entrant in entrants.values():
            entrant.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
