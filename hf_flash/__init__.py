"""Exact, fused, memory-linear attention for Hugging Face models that are already loaded."""

import importlib

from .attention import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .kvcache import flash_attn_with_kvcache
from .padding import index_first_axis, pad_input, unpad_input

__version__ = "0.1.0"
# These need transformers, so they are imported when asked for.
_PATCHING = dict.fromkeys(("patch_model", "unpatch_model", "report", "supported_models"), ".patching")
_PATCHING["split_sequences"] = ".sequence_parallel"

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "index_first_axis",
    "pad_input",
    "unpad_input",
    *_PATCHING,
]


def __getattr__(name):
    if name in _PATCHING:
        return getattr(importlib.import_module(_PATCHING[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _register_backend():
    # from_pretrained(..., attn_implementation="hf_fused") works from the import on, where there is transformers
    try:
        importlib.import_module(".interface", __name__).register()
    except (ImportError, RuntimeError):
        pass


_register_backend()
