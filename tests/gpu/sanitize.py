"""Small shapes of every kernel and feature, for compute-sanitizer:

    compute-sanitizer --tool memcheck  python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py
    compute-sanitizer --tool initcheck python tests/gpu/sanitize.py --cleared

Exits with 1 where a result is not finite; the tool's own exit code says the rest. --kernels and --head-dims narrow it.
initcheck does not see what the copy engine writes: with --cleared the Hopper kernels' results (not their workspace) lie
in memory that was cleared before.
"""

import argparse
import contextlib
import os
import sys
from unittest import mock

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # each tensor is an allocation of its own to the tool

import torch  # noqa: E402

import hf_flash  # noqa: E402
from hf_flash import library  # noqa: E402

FEATURES = (
    {},
    {"causal": True},
    {"window_size": (20, 0), "deterministic": True},
    {"softcap": 5.0, "causal": True},
    {"alibi": True},
    {"dropout_p": 0.2, "causal": True},
)


def normal(*shape, dtype):
    return torch.randn(*shape).to(dtype).cuda().requires_grad_()


def training(head_dim, dtype):
    """Dense and packed, forward and backward, over the features; yields every result."""
    for features in FEATURES:
        features = dict(features)
        slopes = torch.rand(4).cuda() if features.pop("alibi", False) else None
        q = normal(2, 70, 4, head_dim, dtype=dtype)
        k, v = normal(2, 133, 2, head_dim, dtype=dtype), normal(2, 133, 2, head_dim, dtype=dtype)
        out = hf_flash.flash_attn_func(q, k, v, alibi_slopes=slopes, **features)
        yield from (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))
    cu_q = torch.tensor([0, 0, 70, 71, 135], dtype=torch.int32).cuda()
    cu_k = torch.tensor([0, 10, 10, 75, 139], dtype=torch.int32).cuda()
    q = normal(140, 2, head_dim, dtype=dtype)
    k, v = normal(140, 1, head_dim, dtype=dtype), normal(140, 1, head_dim, dtype=dtype)
    for causal in (False, True):
        out = hf_flash.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 70, 65, causal=causal)
        yield from (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))


def decoding(head_dim, dtype):
    """Contiguous and paged caches, append with rotary, left padding, several splits."""
    with torch.no_grad():
        caches = [torch.randn(3, 600, 2, head_dim).to(dtype).cuda() for _ in "kv"]
        pages = [x.reshape(-1, 20, 2, head_dim).clone() for x in caches]
        table = torch.arange(90, dtype=torch.int32).view(3, 30).cuda()
        lengths = torch.tensor([3, 520, 77], dtype=torch.int32).cuda()
        pads = torch.tensor([1, 100, 0], dtype=torch.int32).cuda()
        cos, sin = torch.randn(600, 8).to(dtype).cuda(), torch.randn(600, 8).to(dtype).cuda()
        q, k, v = (torch.randn(3, 2, h, head_dim).to(dtype).cuda() for h in (4, 2, 2))
        options = dict(rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths, causal=True)
        yield hf_flash.flash_attn_with_kvcache(q, *caches, k, v, **options, cache_leftpad=pads)
        yield hf_flash.flash_attn_with_kvcache(q, *pages, k, v, **options, block_table=table, num_splits=3)
        yield hf_flash.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, window_size=(50, 0), softcap=5.0)


def cleared_results():
    """Within the block torch.empty and torch.empty_like give zeros, except as bytes, which workspaces are."""
    empty, empty_like = torch.empty, torch.empty_like

    def clear(x):
        return x if x.dtype == torch.uint8 else x.zero_()

    return mock.patch.multiple(
        torch, empty=lambda *a, **k: clear(empty(*a, **k)), empty_like=lambda *a, **k: clear(empty_like(*a, **k))
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--head-dims", default="64,80,128,256", help="comma separated")
    parser.add_argument("--kernels", default="portable,hopper", help="comma separated; those this GPU lacks are named")
    parser.add_argument("--cleared", action="store_true", help="for initcheck")
    arguments = parser.parse_args()
    bad = 0
    for head_dim in map(int, arguments.head_dims.split(",")):
        dtype = torch.float16 if head_dim == 64 else torch.bfloat16
        jobs = [(training, kernel) for kernel in arguments.kernels.split(",")] + [(decoding, "auto")]
        for job, kernel in jobs:
            cleared = cleared_results() if arguments.cleared and kernel == "hopper" else contextlib.nullcontext()
            name = f"{job.__name__} head_dim {head_dim} {kernel}"
            try:
                with library.force_kernel(kernel), cleared:
                    finite = all([bool(torch.isfinite(x).all()) for x in job(head_dim, dtype)])
            except NotImplementedError as error:
                print(f"{name}: not there ({error})")
                continue
            print(f"{name}: {'finite' if finite else 'NOT FINITE'}", flush=True)
            bad += not finite
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
