"""Attention on this machine, against PyTorch's own backends: `python -m hf_flash bench`.

hf_flash/timing.py says how time is taken. FLOPs are 4 * batch * heads * seq_q * seq_k * head_dim forward, half of that
when causal, and 2.5 times that backward. benchmarks/attention.py measures more contenders and more cases.
"""

import argparse
import contextlib
import dataclasses
import functools
import math
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import library
from .attention import flash_attn_func, flash_attn_varlen_func
from .timing import Timer, ceilings, side_stream, take_turns

# Largest error against fp32, as a share of the largest value, that still counts as the right result in half precision.
TOLERANCE = 0.03


@dataclasses.dataclass(frozen=True)
class Case:
    """Self-attention over `batch` sequences of `seq` tokens; lengths: a packed batch of these lengths instead."""

    head_dim: int
    seq: int
    batch: int = 1
    heads: int = 16
    kv_heads: int = 0  # 0: as many as heads
    causal: bool = False
    dtype: torch.dtype = torch.bfloat16
    lengths: tuple = ()

    @property
    def key_heads(self):
        return self.kv_heads or self.heads

    def flops(self, which):
        pairs = sum(n * n for n in self.lengths) if self.lengths else self.batch * self.seq**2
        forward = 4 * self.heads * pairs * self.head_dim * (0.5 if self.causal else 1)
        return forward * (1 if which == "forward" else 2.5)

    def inputs(self, device, generator=None):
        """q, k, v and a gradient for the output: (batch, seq, heads, head_dim), or (tokens, heads, head_dim) packed."""
        leading = (sum(self.lengths),) if self.lengths else (self.batch, self.seq)
        counts = (self.heads, self.key_heads, self.key_heads, self.heads)
        shapes = [(*leading, count, self.head_dim) for count in counts]
        return [torch.randn(shape, dtype=self.dtype, device=device, generator=generator) for shape in shapes]

    def label(self):
        mask = "causal" if self.causal else "full"
        heads = f"{self.heads}/{self.key_heads}"
        tokens = f"{len(self.lengths)} ragged" if self.lengths else f"{self.batch}x{self.seq}"
        return f"head dim {self.head_dim} {mask} {tokens} heads {heads} {str(self.dtype).removeprefix('torch.')}"


# ---- contenders: q, k, v -> out, all (batch, seq, heads, head_dim), or packed ----------------------------------------


def ours(case, kernel="auto", deterministic=False):
    """hf_flash on kernels of one family; `kernel` is an attribute of what is returned, for its backward pass."""
    options = {"causal": case.causal, "deterministic": deterministic}
    longest = max(case.lengths, default=0)

    @functools.cache
    def offsets(device):
        return torch.tensor((0, *case.lengths)).cumsum(0).to(device, torch.int32)

    def attend(q, k, v):
        with library.force_kernel(kernel):
            if case.lengths:
                return flash_attn_varlen_func(q, k, v, *[offsets(q.device)] * 2, longest, longest, **options)
            return flash_attn_func(q, k, v, **options)

    attend.kernel = kernel
    return attend


def sdpa(case, *backends):
    """PyTorch's fused attention, restricted to the given backends."""

    def call(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = case.key_heads != case.heads
        with sdpa_kernel(list(backends)) if backends else contextlib.nullcontext():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return call


def standard(case):
    """softmax(QK^T)V, one operation at a time, with the whole matrix in memory."""
    visible = {}

    def call(q, k, v):
        group = case.heads // case.key_heads
        q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
        scores = q @ k.transpose(-1, -2) * case.head_dim**-0.5
        if case.causal:
            if q.device not in visible:
                visible[q.device] = torch.ones(case.seq, case.seq, dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~visible[q.device], float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2)

    return call


def contenders(case, device):
    """hf_flash and what PyTorch itself offers on this device."""
    found = {"hf_flash": ours(case)}
    if device.type == "cuda" and not case.lengths:
        if torch.cuda.get_device_capability(device)[0] == 9:
            found["hf_flash_portable"] = ours(case, "portable")
        found["fa2"] = sdpa(case, SDPBackend.FLASH_ATTENTION)
        found["cudnn"] = sdpa(case, SDPBackend.CUDNN_ATTENTION)
        found["memeff"] = sdpa(case, SDPBackend.EFFICIENT_ATTENTION)
    elif not case.lengths:
        found["sdpa"] = sdpa(case)
    if not case.lengths and case.batch * case.heads * case.seq**2 <= 2**30:
        found["standard"] = standard(case)
    return found


# ---- right before fast -----------------------------------------------------------------------------------------------


def reference(case, q, k, v, grad_out):
    """out, dq, dk, dv of the first sequence and first key head in fp32, a block of queries at a time."""
    rows = case.lengths[0] if case.lengths else case.seq
    group = case.heads // case.key_heads
    first = (slice(0, rows),) if case.lengths else (0,)
    q, grad_out = (x[first][:, :group].float().transpose(0, 1) for x in (q, grad_out))
    k, v = (x[first][:, 0].float() for x in (k, v))
    scale = case.head_dim**-0.5
    out, dq, dk, dv = torch.empty_like(q), torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, rows, 1024):
        block = slice(start, min(start + 1024, rows))
        scores = q[:, block] @ k.T * scale
        if case.causal:
            i = torch.arange(block.start, block.stop, device=q.device)[:, None]
            scores.masked_fill_(torch.arange(rows, device=q.device) > i, float("-inf"))
        p = scores.softmax(-1)
        out[:, block] = p @ v
        dp = grad_out[:, block] @ v.T
        ds = p * (dp - (grad_out[:, block] * out[:, block]).sum(-1, keepdim=True))
        dq[:, block] = ds @ k * scale
        dk += (ds.transpose(1, 2) @ q[:, block]).sum(0) * scale
        dv += (p.transpose(1, 2) @ grad_out[:, block]).sum(0)
    return out.transpose(0, 1), dq.transpose(0, 1), dk[:, None], dv[:, None]


def error(case, found, expected):
    """Largest error of tensors against `reference`, as a share of the largest expected value; NaN where not finite."""
    worst = 0.0
    for x, r in zip(found, expected, strict=True):
        part = (x[: r.shape[0]] if case.lengths else x[0])[:, : r.shape[1]].float()
        if not torch.isfinite(x).all():
            return float("nan")
        worst = max(worst, ((part - r).abs().max() / r.abs().max().clamp_min(1e-6)).item())
    return worst


def enter(prepare, judge, device):
    """One contender's (error, Timer), or (error or reason in words, None) where it is wrong or fails.

    prepare: gives the call and its first results; judge: the error of those. Call it on the stream to be recorded on.
    """
    try:
        call, results = prepare()
        worst = judge(results)
        return worst, Timer(call, device) if worst <= TOLERANCE else None
    except Exception as reason:  # a contender that cannot run this case drops out, whatever it raised
        return (str(reason).strip() or type(reason).__name__).splitlines()[0][:200], None


def prepare(attend, which, q, k, v, grad_out):
    """The call of one pass, "forward" or "backward", and its first results."""
    if which == "forward":

        def call():
            with torch.no_grad():
                return attend(q, k, v)

        return call, (call(),)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out, kernel = attend(*inputs), getattr(attend, "kernel", "auto")

    def call():
        with library.force_kernel(kernel):
            return torch.autograd.grad(out, inputs, grad_out, retain_graph=True)

    return call, call()


def entry(attend, which, case, tensors, expected, device):
    """`enter` for one pass of one case. tensors: the case's inputs; expected: `reference` of them."""
    right = expected[:1] if which == "forward" else expected[1:]
    return enter(lambda: prepare(attend, which, *tensors), lambda found: error(case, found, right), device)


def measure(case, which, device, found=None, rounds=15):
    """Seconds per call and error of each contender for one pass of one case.

    which: "forward" or "backward". found: name -> q, k, v -> out (default: `contenders`). Returns two dictionaries,
    {name: median seconds} and {name: error, or the reason why it did not run}; wrong results are not timed.
    """
    found = contenders(case, device) if found is None else found
    with side_stream(device), torch.no_grad():
        tensors = case.inputs(device)
        expected = reference(case, *tensors)
        with torch.enable_grad():
            entries = {name: entry(attend, which, case, tensors, expected, device) for name, attend in found.items()}
        seconds = take_turns({name: timer for name, (_, timer) in entries.items() if timer}, rounds)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return {name: statistics.median(times) for name, times in seconds.items()}, {n: e for n, (e, _) in entries.items()}


# ---- python -m hf_flash bench ----------------------------------------------------------------------------------------


def default_cases(device, head_dims=None, seqs=None):
    """Full and causal self-attention over the same number of tokens at every length."""
    cuda = device.type == "cuda"
    tokens = 16384 if cuda else 1024
    head_dims = head_dims or ((64, 80, 128, 256) if cuda else (64, 128))
    seqs = seqs or ((512, 1024, 2048, 4096, 8192, 16384) if cuda else (128, 256, 512, 1024))
    dtype = torch.bfloat16 if cuda else torch.float32
    width = 2048 if cuda else 256
    for head_dim in head_dims:
        for causal in (False, True):
            for seq in seqs:
                batch, heads = max(1, tokens // seq), max(1, width // head_dim)
                yield Case(head_dim, seq, batch, heads, causal=causal, dtype=dtype)


def progress(items, **options):
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, **options)


def draw(rows, path, title):
    """One plot per pass, mask and head dim: TFLOP/s against the length, a line per contender; at most five in a row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {(row["pass"], row["causal"], row["head_dim"]) for row in rows}
    panels = sorted(panels, key=lambda p: (p[0] != "forward", *p))
    passes = [[p for p in panels if p[0] == which] for which in dict.fromkeys(p[0] for p in panels)]
    most = max(map(len, passes), default=1)
    columns = math.ceil(most / math.ceil(most / 5))
    # A pass begins a row of its own.
    grid = [p[i : i + columns] for p in passes for i in range(0, len(p), columns)] or [[]]
    lines = len(grid)
    figure, axes = pyplot.subplots(lines, columns, figsize=(3.2 * columns, 2.9 * lines), squeeze=False)
    names = list(dict.fromkeys(name for row in rows for name in row["tflops"]))
    for axis, panel in zip(axes.flat, (p for line in grid for p in line + [None] * (columns - len(line)))):
        if panel is None:
            axis.set_visible(False)
            continue
        which, causal, head_dim = panel
        chosen = [row for row in rows if (row["pass"], row["head_dim"], row["causal"]) == (which, head_dim, causal)]
        for index, name in enumerate(names):
            points = sorted((row["seq"], row["tflops"][name]) for row in chosen if name in row["tflops"])
            if points:
                strong = {"linewidth": 2.5, "zorder": 3} if name == "hf_flash" else {"linewidth": 1.2}
                axis.plot(*zip(*points), marker="o", markersize=3, label=name, color=f"C{index}", **strong)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_title(f"{which}, head dim {head_dim}, {'causal' if causal else 'full'}", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("tokens a sequence", fontsize=8)
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s", fontsize=8)
    named = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels())}
    beside = max(1, min(len(named), 2 * columns))  # a name takes half a plot's width
    figure.legend(named.values(), named, loc="lower center", ncols=beside, fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, (0.1 + 0.22 * math.ceil(len(named) / beside)) / (2.9 * lines), 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def table(rows):
    """The rows as text, a column per contender, the fastest of each row marked."""
    names = list(dict.fromkeys(name for row in rows for name in row["tflops"]))
    lines = [f"{'pass':<9}{'head dim':>9}{'mask':>8}{'tokens':>8}{'batch':>6}" + "".join(f"{n:>19}" for n in names)]
    for row in rows:
        mask = "causal" if row["causal"] else "full"
        best = max(row["tflops"].values(), default=0)
        cells = []
        for name in names:
            value = row["tflops"].get(name)
            cells.append(f"{'-' if value is None else f'{value:.4g}' + ('*' if value == best else ' '):>19}")
        head = f"{row['pass']:<9}{row['head_dim']:>9}{mask:>8}{row['seq']:>8}{row['batch']:>6}"
        lines.append(head + "".join(cells))
    return "\n".join(lines)


def row_of(case, which, seconds):
    """One measured cell, as the record keeps it."""
    return {
        "pass": which,
        "dtype": str(case.dtype).removeprefix("torch."),
        "head_dim": case.head_dim,
        "causal": case.causal,
        "batch": len(case.lengths) or case.batch,
        "seq": case.seq,
        "heads": case.heads,
        "kv_heads": case.key_heads,
        **({"varlen": True, "tokens": sum(case.lengths)} if case.lengths else {}),
        "tflops": {name: float(f"{case.flops(which) / s / 1e12:.4g}") for name, s in seconds.items()},
    }


def integers(text):
    return [int(word) for word in text.split(",")]


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m hf_flash bench", description=__doc__.splitlines()[0])
    parser.add_argument("--head-dims", type=integers, help="for instance 64,128")
    parser.add_argument("--seqs", type=integers, help="tokens a sequence, for instance 512,4096")
    parser.add_argument("--passes", default="forward,backward")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", default="hf_flash_bench.png", help="file for the plot; empty: none")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    limits = ceilings(device, 5)
    print(f"{name}, torch {torch.__version__}: a bf16 product reaches {limits['matmul_tflops']} TFLOP/s,", end=" ")
    print(f"a copy {limits['copy_tb_s']} TB/s")
    work = [(w, c) for w in options.passes.split(",") for c in default_cases(device, options.head_dims, options.seqs)]
    rows, reasons = [], {}
    bar = progress(work, unit="case")
    for which, case in bar:
        if hasattr(bar, "set_description"):
            bar.set_description(f"{which} {case.head_dim} x {case.seq}")
        seconds, errors = measure(case, which, device, rounds=options.rounds)
        rows.append(row_of(case, which, seconds))
        reasons |= {n: e for n, e in errors.items() if n not in seconds}
    print(f"TFLOP/s, median of {options.rounds} rounds in random order, * the fastest")
    print(table(rows))
    for contender, reason in reasons.items():
        print(f"{contender} left out somewhere: {reason if isinstance(reason, str) else f'wrong by {reason:.1%}'}")
    if options.plot:
        try:
            draw(rows, options.plot, f"{name}, torch {torch.__version__}")
            print(f"plot: {options.plot}")
        except ImportError:
            print("no plot: pip install matplotlib")
    return 0
