"""Attention kernels against the fastest there are: FlashAttention-2 and cuDNN through PyTorch, FlashAttention-3 and -4.

    python benchmarks/attention.py --grid dense --head-dims 64,128 --passes forward --minutes 4
    python benchmarks/attention.py --grid grouped,varlen,long,decode

Each cell is checked against fp32 first, then timed as hf_flash/bench.py describes, and saved to the record at once, so
that a run can be cut into pieces and cut off. The contenders of a cell are always measured in the same run.
"""

import argparse
import contextlib
import random
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record as records  # noqa: E402
from tqdm import tqdm  # noqa: E402

from hf_flash import bench, flash_attn_with_kvcache  # noqa: E402

TOKENS = 16384
HEADS = {32: 64, 64: 32, 80: 16, 96: 16, 128: 16, 160: 8, 192: 8, 256: 8}
PEERS = ("hf_flash", "hf_flash_portable", "fa2", "cudnn", "fa3", "fa4")
GRIDS = ("dense", "grouped", "varlen", "long", "decode")

# (batch, cached keys, heads, kv_heads, head_dim)
DECODE = (
    (1, 32768, 32, 8, 128),
    (1, 131072, 32, 8, 128),
    (16, 8192, 32, 8, 128),
    (64, 4096, 32, 8, 128),
    (16, 4096, 16, 16, 256),
    (16, 4096, 32, 32, 128),
)


# ---- peers -----------------------------------------------------------------------------------------------------------


def first(result):
    return result[0] if isinstance(result, (tuple, list)) else result


def varlen_arguments(case, device):
    cu = torch.tensor((0, *case.lengths)).cumsum(0).to(device, torch.int32)
    return cu, max(case.lengths)


def fa2_varlen(case, device):
    from torch.nn.attention.varlen import varlen_attn

    cu, longest = varlen_arguments(case, device)
    if case.causal:
        return lambda q, k, v: varlen_attn(q, k, v, cu, cu, longest, longest, window_size=(-1, 0))
    return lambda q, k, v: varlen_attn(q, k, v, cu, cu, longest, longest)


def flash_attention(case, device, module):
    """FlashAttention-3 or -4's functions, whose names and shapes are the same."""
    if case.lengths:
        cu, longest = varlen_arguments(case, device)
        options = {"max_seqlen_q": longest, "max_seqlen_k": longest, "causal": case.causal}
        return lambda q, k, v: first(
            module.flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, **options)
        )
    return lambda q, k, v: first(module.flash_attn_func(q, k, v, causal=case.causal))


def load_peers(names):
    """The FlashAttention-3 and -4 packages that can be imported: name -> module."""
    modules = {}
    for name, module in (("fa3", "fa3_fwd_interface"), ("fa3", "flash_attn_interface"), ("fa4", "flash_attn.cute")):
        if name in names and name not in modules:
            try:
                modules[name] = __import__(module, fromlist=["flash_attn_func"])
            except Exception as reason:
                print(f"{name} ({module}) is left out: {str(reason).splitlines()[:1]}", file=sys.stderr)
    return modules


def contenders(case, which, device, names, modules):
    found = {}
    for name, attend in bench.contenders(case, device).items():
        if name in names or name in ("sdpa", "standard") and device.type == "cpu":
            found[name] = attend
    if case.lengths:
        if device.type == "cuda" and "hf_flash_portable" in names:
            found["hf_flash_portable"] = bench.ours(case, "portable")
        with contextlib.suppress(ImportError):
            if device.type == "cuda" and "fa2" in names:
                found["fa2"] = fa2_varlen(case, device)
    for name, module in modules.items():
        if which == "forward" or "fwd" not in module.__name__:  # fa3-fwd has no backward
            found[name] = flash_attention(case, device, module)
    return found


# ---- cases -----------------------------------------------------------------------------------------------------------


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


# ---- decode ----------------------------------------------------------------------------------------------------------


def decode_contenders(q, k, v, names, modules):
    """One query per sequence against caches (batch, cached, kv_heads, head_dim): name -> function without arguments."""
    batch, cached = k.shape[:2]
    used = torch.full((batch,), cached, dtype=torch.int32, device=k.device)

    def sdpa(backend):
        def call():
            with sdpa_kernel(backend) if q.is_cuda else contextlib.nullcontext():
                views = (x.transpose(1, 2) for x in (q, k, v))
                return F.scaled_dot_product_attention(*views, enable_gqa=q.shape[2] != k.shape[2]).transpose(1, 2)

        return call

    found = {"hf_flash": lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True)}
    found |= {"fa2": sdpa(SDPBackend.FLASH_ATTENTION)}
    if q.is_cuda:
        found |= {"cudnn": sdpa(SDPBackend.CUDNN_ATTENTION)}
    if "fa3" in modules:
        found["fa3"] = lambda: first(modules["fa3"].flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True))
    if "fa4" in modules:
        found["fa4"] = lambda: first(modules["fa4"].flash_attn_func(q, k, v, causal=True))
    return {name: call for name, call in found.items() if name in names}


def measure_decode(shape, device, dtype, names, modules, rounds):
    batch, cached, heads, kv_heads, head_dim = shape
    timers, errors = {}, {}
    with bench.side_stream(device), torch.no_grad():
        q = torch.randn(batch, 1, heads, head_dim, dtype=dtype, device=device)
        k, v = (torch.randn(batch, cached, kv_heads, head_dim, dtype=dtype, device=device) for _ in range(2))
        group = heads // kv_heads
        scores = q[0, 0, :group].float() @ k[0, :, 0].float().T * head_dim**-0.5
        expected = scores.softmax(-1) @ v[0, :, 0].float()
        for name, call in decode_contenders(q, k, v, names, modules).items():
            try:
                found = call()[0, 0, :group].float()
                errors[name] = ((found - expected).abs().max() / expected.abs().max()).item()
                if errors[name] <= bench.TOLERANCE:
                    timers[name] = bench.Timer(call, device)
            except Exception as reason:
                errors[name] = (str(reason).strip() or type(reason).__name__).splitlines()[0][:200]
        seconds = bench.take_turns(timers, rounds)
    moved = 2 * batch * cached * kv_heads * head_dim * k.element_size()
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "batch": batch,
        "cached": cached,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "dtype": str(dtype).removeprefix("torch."),
        "us": {name: round(s * 1e6, 1) for name, s in medians.items()},
        "tb_s": {name: round(moved / s / 1e12, 3) for name, s in medians.items()},
    }, errors


# ---- run -------------------------------------------------------------------------------------------------------------


def complaints(errors):
    """The contenders that did not run or were wrong, in words, and the largest error of those that were right."""
    bad = {n: e if isinstance(e, str) else f"wrong by {e:.1%}" for n, e in errors.items()
           if isinstance(e, str) or not e <= bench.TOLERANCE}  # fmt: skip
    return bad, max((e for n, e in errors.items() if n not in bad), default=0.0)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", default="dense", help=f"any of {','.join(GRIDS)}, or all")
    parser.add_argument("--head-dims", type=bench.integers, default=[64, 80, 96, 128, 256])
    parser.add_argument("--seqs", type=bench.integers, default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--masks", default="full,causal")
    parser.add_argument("--passes", default="forward,backward")
    parser.add_argument("--contenders", default=",".join(PEERS))
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
    names = options.contenders.split(",")
    modules = load_peers(names) if device.type == "cuda" else {}
    began = time.monotonic()

    limits = bench.ceilings(device, options.rounds)
    print(f"product {limits['matmul_tflops']} TFLOP/s, copy {limits['copy_tb_s']} TB/s", flush=True)
    recorder = records.Recorder(options.output, device.type, limits)
    passes = options.passes.split(",")
    work = [(which, case) for case in attention_cases(options, tokens) for which in passes]
    if "decode" in options.grid:
        # The decode table first: its rows are few and its caches are large.
        work = [("decode", (b, max(16, n * tokens // TOKENS), *rest)) for b, n, *rest in DECODE] + work
    left_out = 0
    for which, case in tqdm(work, unit="cell", disable=None):
        if time.monotonic() - began > 60 * options.minutes:
            left_out += 1
            continue
        try:
            if which == "decode":
                dtype = getattr(torch, options.dtype)
                row, errors = measure_decode(case, device, dtype, names, modules, options.rounds)
                text = f"decode {case} us {row['us']} TB/s {row['tb_s']}"
            else:
                found = contenders(case, which, device, names, modules)
                seconds, errors = bench.measure(case, which, device, found, options.rounds)
                row = bench.row_of(case, which, seconds)
                text = f"{which:8} {case.label()} TFLOP/s {row['tflops']}"
            bad, worst = complaints(errors)
            if bad:
                row["errors"] = bad
            recorder.add("decode" if which == "decode" else "attention", row)
            tqdm.write(f"{text} error {worst:.1e}" + (f" left out: {bad}" if bad else ""))
        except torch.OutOfMemoryError as reason:
            tqdm.write(f"{which} {case}: {str(reason).splitlines()[0]}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"{recorder.path}: {len(work) - left_out} cells" + (f", {left_out} for want of time" if left_out else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
