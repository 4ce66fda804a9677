"""The measure of right: at most twice the error of PyTorch's own computation in the same dtype, plus 1e-5.

Both errors are taken against fp64. PyTorch's own computation is the plain matrix of scores, `attention_reference`.
"""

import math
import random
from typing import NamedTuple

import torch

from hf_flash.reference import attention_reference

NAMES = ("out", "lse", "dq", "dk", "dv")


def worst(a, b):
    """The largest difference where b is finite."""
    finite = torch.isfinite(b)
    return (a.double() - b.double())[finite].abs().max().item() if finite.any() else 0.0


def assert_close(ours, exact, torchs, names, luck=()):
    """Tensors in three computations: ours, in fp64, in PyTorch at our dtype.

    luck: further pairs (exact, torchs) of the same kind, so that the allowance of a small tensor is not its luck.
    """
    for i, (name, a, b, c) in enumerate(zip(names, ours, exact, torchs)):
        if b is None or b.numel() == 0:
            continue
        assert a.shape == b.shape, f"{name}: shape {tuple(a.shape)}, expected {tuple(b.shape)}"
        infinite = ~torch.isfinite(b)
        assert torch.equal(a[infinite].double(), b[infinite]), f"{name}: not -inf where no key is seen"
        assert torch.isfinite(a[~infinite]).all(), f"{name}: not finite"
        allowed = 2 * max([worst(c, b), *(worst(t[i], e[i]) for e, t in luck)]) + 1e-5
        assert worst(a, b) <= allowed, f"{name}: error {worst(a, b):.3g}, allowed {allowed:.3g}"


class Case(NamedTuple):
    """One combination of features."""

    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    seq_q: int = 65
    seq_k: int = 65
    heads: int = 2
    kv_heads: int = 2
    causal: bool = False
    window: tuple = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    dropout: float = 0.0
    layout: str = "contiguous"
    grad_lse: bool = False
    deterministic: bool = False
    kernel: str = "auto"
    magnitude: float = 1.0

    def __str__(self):
        features = [f"d{self.head_dim}", str(self.dtype)[6:], f"{self.seq_q}x{self.seq_k}"]
        features.append(f"h{self.heads}/{self.kv_heads}")
        for name in ("causal", "alibi", "grad_lse", "deterministic"):
            if getattr(self, name):
                features.append(name)
        for name in ("softcap", "dropout"):
            if getattr(self, name):
                features.append(f"{name}{getattr(self, name)}")
        if self.window != (-1, -1):
            features.append("window{}.{}".format(*self.window))
        if self.magnitude != 1.0:
            features.append(f"x{self.magnitude:g}")
        return "-".join(features + [self.layout, self.kernel])


def sample(n, seed, **axes):
    """n Cases in which every value of every axis comes up equally often, in seeded random combinations."""
    generator, columns = random.Random(seed), {}
    for name, values in axes.items():
        column = list(values) * math.ceil(n / len(values))
        generator.shuffle(column)
        columns[name] = column[:n]
    cases = [dict(zip(columns, row)) for row in zip(*columns.values())]
    for case in cases:
        if case.get("dropout") and case["seq_k"] < 16:
            # With a key or two, PyTorch's dq is 0 but for nothing; any computation that forgets P has an error there.
            case["seq_k"] += 16
        if "group" in case:
            case["kv_heads"], group = divmod(case.pop("group"), 100)
            case["heads"] = case["kv_heads"] * group
    return [Case(**case) for case in cases]


def make(shape, dtype, device, layout="contiguous", magnitude=1.0):
    """A leaf's data of (…, seq, heads, head_dim) laid out as named; memory beside it is NaN."""
    data = (torch.randn(shape, device=device) * magnitude).to(dtype)
    *lead, heads, head_dim = shape
    nan = float("nan")
    if layout == "contiguous":
        return data
    if layout == "slice":  # of a fused projection: rows and heads lie apart
        buffer = torch.full((*lead, 3, heads, head_dim), nan, dtype=dtype, device=device)
        view = buffer[..., 1, :, :]
    elif layout == "heads first":  # (batch, heads, seq, head_dim), longer than what is used
        buffer = torch.full((*lead[:-1], heads, lead[-1] + 9, head_dim), nan, dtype=dtype, device=device)
        view = buffer.transpose(-2, -3)[..., : lead[-1], :, :]
    elif layout == "columns first":  # the last axis is strided
        buffer = torch.full((*lead, head_dim, heads), nan, dtype=dtype, device=device)
        view = buffer.transpose(-1, -2)
    else:  # "odd": rows do not start on 16 bytes
        buffer = torch.full((*lead, heads, head_dim + 3), nan, dtype=dtype, device=device)
        view = buffer[..., 1 : head_dim + 1]
    return view.copy_(data)


def leaves(*tensors):
    """Views that gradients stop at: the layout stays, requires_grad is set."""
    return tuple(x.detach().requires_grad_() for x in tensors)


def differentiate(out, lse, inputs, grad_out, grad_lse):
    """Gradients of sum(out * grad_out) + sum(lse * grad_lse) over the finite entries of lse."""
    if grad_lse is None:
        return torch.autograd.grad(out, inputs, grad_out.to(out.dtype))
    finite = torch.isfinite(lse)
    total = (out * grad_out.to(out.dtype)).sum() + (lse[finite] * grad_lse[finite].to(lse.dtype)).sum()
    return torch.autograd.grad(total, inputs)


def check(function, q, k, v, *, grad_lse=False, **features):
    """Runs function(q, k, v) -> (out, lse), and its gradients, against the oracle with the features given."""
    ours = leaves(q, k, v)
    out, lse = function(*ours)
    results = []
    for _ in range(1 if out[..., 0].numel() * k.shape[-3] > 1e5 else 4):
        grad_out = torch.randn_like(out)
        lse_gradient = torch.randn_like(lse) if grad_lse else None
        if not results:
            mine = (out, lse, *differentiate(out, lse, ours, grad_out, lse_gradient))
        pair = []
        for dtype in (torch.float64, q.dtype):
            inputs = leaves(*(x.to(dtype) for x in (q, k, v)))
            o, s = attention_reference(*inputs, **features)
            pair.append((o, s, *differentiate(o, s, inputs, grad_out, lse_gradient)))
        results.append(pair)
    assert_close(mine, *results[0], NAMES, luck=results[1:])
    return mine
