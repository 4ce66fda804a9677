"""Norms, rotary embeddings and MLPs in fused kernels of other libraries: `patch_model(model, fused_layers=True)`.

Stock computes these layers in one kernel for each operation, and reads and writes the hidden states in each. Llama and
its kin get Liger-Kernel's Triton kernels, GPT-2, GPT-J and CodeGen PyTorch's own kernel for their GELU; what BERT
consists of is fused in stock. The functions here stand in for the forward of one module, as a `BoundForward`. Where
Liger's kernels cannot run (on the CPU, for subclasses of tensors) or need not (torch.compile fuses stock's layers), the
class's own forward does.
"""

import functools
import importlib
import inspect
import types

import torch
import torch.nn.functional as F

from .forward import BoundForward
from .hooks import forward_name, kind_of
from .rotary import STATE

DEVICES = ("cuda",)


def liger():
    """Liger-Kernel's functions. Raises ImportError."""
    return importlib.import_module("liger_kernel.transformers.functional")


def _takes(x):
    """Whether Liger's kernels take this tensor."""
    plain = type(x) is torch.Tensor and x.device.type in DEVICES and x.numel() > 0
    return plain and not torch.compiler.is_compiling()


# ---- forwards --------------------------------------------------------------------------------------------------------


def rms_norm(module, hidden):
    """hidden (..., hidden size) -> the same shape: Llama's RMSNorm."""
    if not _takes(hidden):
        return type(module).forward(module, hidden)
    # Not in place: a gradient that arrives from an addition belongs to the other summand too.
    return liger().liger_rms_norm(hidden, module.weight, module.variance_epsilon, 0.0, "llama", False)


def swiglu(module, hidden):
    """hidden (..., hidden size) -> the same shape: Llama's MLP."""
    if not _takes(hidden):
        return type(module).forward(module, hidden)
    return module.down_proj(_silu_and_multiply(module.gate_proj(hidden), module.up_proj(hidden)))


def packed_swiglu(module, hidden):
    """hidden (..., hidden size) -> the same shape: Phi-3's MLP, whose gate and up projection are one."""
    if not _takes(hidden):
        return type(module).forward(module, hidden)
    gate, up = module.gate_up_proj(hidden).chunk(2, dim=-1)
    return module.down_proj(_silu_and_multiply(gate, up))


def _silu_and_multiply(gate, up):
    """silu(gate) * up, whose backward pass overwrites both: a second one would be wrong, and raises RuntimeError."""
    out, passes = liger().liger_swiglu(gate, up), []

    def count(_):
        if passes:
            raise RuntimeError("Liger-Kernel's SwiGLU has one backward for each forward: patch with fused_layers=False")
        passes.append(1)

    if out.grad_fn is not None:
        out.grad_fn.register_prehook(count)
    return out


def rotary(module, *args, **kwargs):
    """Forward of an attention module like Llama's, whose queries and keys Liger-Kernel turns."""
    forward = type(module).forward
    if not torch.compiler.is_compiling():
        forward = _with_liger_rope(forward)
    return forward(module, *args, **kwargs)


@functools.cache
def _with_liger_rope(forward):
    """The same function beside its original: they differ in what the global apply_rotary_pos_emb means."""
    function = inspect.unwrap(forward)
    stock = function.__globals__["apply_rotary_pos_emb"]

    def apply_rotary_pos_emb(q, k, cos, sin, *args, **kwargs):
        partial = cos.shape[-1] != q.shape[-1]
        if args or kwargs or partial or not _takes(q):
            return stock(q, k, cos, sin, *args, **kwargs)
        return liger().liger_rope(q, k, cos, sin)

    names = {**function.__globals__, "apply_rotary_pos_emb": apply_rotary_pos_emb}
    copy = types.FunctionType(function.__code__, names, None, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def tanh_gelu(module, hidden):
    """transformers' gelu_new, in one kernel instead of eight."""
    return F.gelu(hidden, approximate="tanh")


# ---- installing them -------------------------------------------------------------------------------------------------


def check(adapter):
    """Raises ImportError, naming the remedy, where the layers of these models need Liger-Kernel and it is missing."""
    if not set(adapter.fused.values()) - {tanh_gelu}:
        return
    try:
        liger()
    except ImportError as error:
        raise ImportError(
            f"fused_layers=True takes the norms, rotary embeddings and MLPs of {adapter.model_types[0]} models from "
            f"Liger-Kernel, which cannot be imported here ({error}): pip install liger-kernel"
        ) from error


def turn(patch, top, wanted):
    """Give a patched model its fused layers, or take them back."""
    if wanted and patch.layers is None:
        patch.layers = type(patch)(patch.adapter, patch.strict)
        _install(patch.layers, top)
    elif patch.layers is not None and not wanted:
        patch.layers.revert()
        patch.layers = None


def _install(patch, top):
    for module in top.modules():
        function = patch.adapter.fused.get(kind_of(module))
        if function is None or not _fits(module, function):
            continue
        if STATE in module.__dict__:  # hf_flash's own forward, which goes on to this one
            patch.set(module, STATE, (module.__dict__[STATE][0], BoundForward(function, module)))
        else:
            patch.set_forward(module, BoundForward(function, module))
        patch.fused["rotary embedding" if function is rotary else kind_of(module)] += 1


def _fits(module, function):
    """Whether the module computes what the function does: no forward of another library, and the activation is SiLU."""
    previous = module.__dict__[STATE][1] if STATE in module.__dict__ else module.__dict__.get(forward_name(module))
    if previous is not None and getattr(previous, "__func__", None) is not type(module).forward:
        return False
    return function not in (swiglu, packed_swiglu) or module.config.hidden_act in ("silu", "swish")


def notes(patch):
    """The line of the report that tells what is fused besides attention and the loss."""
    if patch.layers is None:
        return []
    found = ", ".join(f"{count} {kind}" for kind, count in patch.layers.fused.items())
    return [f"layers fused: {found}" if found else "layers fused: none that are not already"]
