"""What this machine can do, and where something is missing, the one thing to do: `python -m hf_flash doctor`."""

import argparse
import importlib.metadata
import platform
import re
import time
from dataclasses import dataclass

import torch

from . import library, reference
from .attention import flash_attn_func, flash_attn_varlen_func

OLDEST_GPU = 80
HEAD_DIMS = (64, 80, 128, 256)


@dataclass(frozen=True)
class Finding:
    """One line of the report; remedy: what to do about it, empty where all is well."""

    topic: str
    text: str
    remedy: str = ""

    def __str__(self):
        return f"{self.topic:<13}{self.text}" + (f"\n{'':<13}-> {self.remedy}" if self.remedy else "")


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions():
    found = [("Python", platform.python_version()), *((p, version(p)) for p in ("torch", "transformers", "accelerate"))]
    text = ", ".join(f"{name} {number}" for name, number in found if number)
    if version("transformers") is None:
        return Finding("versions", text, "for patch_model: pip install 'hf_flash[hf]'")
    from .patching import OLDEST, transformers_version

    remedy = "" if transformers_version() >= OLDEST else "pip install --upgrade transformers"
    return Finding("versions", text, remedy)


def gpu():
    if torch.cuda.is_available():
        names = []
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            names.append(f"{facts.name} ({facts.major}.{facts.minor}, {facts.total_memory / 2**30:.0f} GiB)")
        old = [index for index in range(len(names)) if capability(index) < OLDEST_GPU]
        remedy = "the kernels need compute capability 8.0; on this GPU models stay stock" if old else ""
        return Finding("GPU", ", ".join(names), remedy)
    if torch.version.cuda is None:
        return Finding("GPU", "none that this torch can use: it is a CPU build; the CPU backend serves")
    return Finding("GPU", "none visible; the CPU backend serves")


def capability(device=0):
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def serves(architectures, wanted):
    """Whether a library built for `architectures`, "80;90a+PTX", has code for compute capability `wanted` (90).

    Machine code runs on its own major version from its minor version on; PTX on anything later.
    """
    for number, suffix, ptx in re.findall(r"(\d+)([af]?)(\+PTX)?", architectures):
        number = int(number)
        if number == wanted or ptx and wanted >= number:
            return True
        if not suffix and number // 10 == wanted // 10 and wanted >= number:
            return True
    return False


def kernels():
    status = library.status()
    if not status.available:
        return Finding("kernels", status.reason, status.remedy)
    text = f"{status.path}, for {status.architectures}"
    if torch.cuda.is_available():
        mine = capability()
        if not serves(status.architectures, mine):
            wanted = "9.0a" if mine == 90 else f"{mine // 10}.{mine % 10}"
            return Finding("kernels", text, f"not for this GPU: rebuild with HF_FLASH_ARCHS={wanted}")
        if mine == 90 and "90a" not in status.architectures:
            return Finding("kernels", text, "without the Hopper kernels: rebuild with HF_FLASH_ARCHS=9.0a")
        text += "; Hopper kernels for this GPU" if mine == 90 else "; portable kernels for this GPU"
    return Finding("kernels", text)


def families():
    if version("transformers") is None:
        return Finding("models", "none without transformers")
    from .patching import supported_models

    return Finding("models", ", ".join(supported_models()))


def largest_error(found, expected):
    return max((a.double() - b).abs().max().item() for a, b in zip(found, expected, strict=True))


def check_once(head_dim, causal, packed, device, dtype):
    """Forward and backward against fp64: (our largest error, that of plain PyTorch in the same dtype)."""
    heads, kv_heads, lengths = 4, 2, (65, 128, 7)
    leading = (sum(lengths),) if packed else (2, 100)
    shapes = [(*leading, count, head_dim) for count in (heads, kv_heads, kv_heads, heads)]
    *inputs, grad_out = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    offsets = (torch.tensor((0, *lengths)).cumsum(0).to(device, torch.int32),) * 2 if packed else ()

    def ours(q, k, v):
        if packed:
            return flash_attn_varlen_func(q, k, v, *offsets, max(lengths), max(lengths), causal=causal)
        return flash_attn_func(q, k, v, causal=causal)

    def plain(q, k, v):
        return reference.attention_reference(q, k, v, *offsets, causal=causal)[0]

    def results(attend, inputs):
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = attend(*inputs)
        return (out.detach(), *torch.autograd.grad(out, inputs, grad_out.to(out.dtype)))

    exact = results(plain, [x.double() for x in inputs])
    return largest_error(results(ours, inputs), exact), largest_error(results(plain, inputs), exact)


def self_test():
    """Right means: at most twice the error of plain PyTorch in the same dtype, plus 1e-5."""
    cuda = torch.cuda.is_available() and library.available() and capability() >= OLDEST_GPU
    device = torch.device("cuda" if cuda else "cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    began, worst, cases = time.perf_counter(), 0.0, 0
    forked = torch.random.fork_rng(devices=[0] if cuda else [])
    try:
        with forked:
            torch.manual_seed(0)
            for head_dim in HEAD_DIMS:
                for causal in (False, True):
                    for packed in (False, True):
                        error, usual = check_once(head_dim, causal, packed, device, dtype)
                        cases, worst = cases + 1, max(worst, error / (2 * usual + 1e-5))
    except Exception as reason:
        first = (str(reason).strip() or type(reason).__name__).splitlines()[0]
        return Finding("self-test", f"failed on the {device.type}: {first}", "report this with the text above")
    where = f"{cases} cases forward and backward on the {device.type} in {str(dtype).removeprefix('torch.')}"
    took = f"{time.perf_counter() - began:.1f} s"
    if worst <= 1:
        return Finding("self-test", f"passed: {where}, {took}, at {worst:.2f} of the error allowed")
    return Finding(
        "self-test", f"WRONG: {where}, {worst:.1f} times the error allowed", "report this with the text above"
    )


def examine():
    """Every finding, in the order in which it is printed."""
    return [versions(), gpu(), kernels(), families(), self_test()]


def main(arguments=None):
    argparse.ArgumentParser(prog="python -m hf_flash doctor", description=__doc__).parse_args(arguments)
    findings = examine()
    for finding in findings:
        print(finding)
    failed = any(f.topic == "self-test" and not f.text.startswith("passed") for f in findings)
    return 1 if failed else 0
