"""ctypes over libhf_flash.so: loading, the mirror of HfFlashParams, streams and scratch memory, errors.

Nothing here runs at import: the library is loaded by the first call that needs it, and one that is missing or broken
is a `Status` with a reason and a remedy, never a failed import. HF_FLASH_LIBRARY names another file to load.
HF_FLASH_KERNEL, or `force_kernel`, chooses "portable" or "hopper" kernels where the choice is free.
"""

import contextlib
import ctypes
import os
import typing

import torch

UNSUPPORTED, NO_KERNEL_IMAGE, NO_TENSOR_MAP, WORKSPACE_TOO_SMALL = 1001, 1002, 1003, 1004
_CUDA_OUT_OF_MEMORY, _CUDA_NO_KERNEL_IMAGE, _CUDA_UNSUPPORTED_PTX = 2, 209, 222
FORWARD, BACKWARD, DECODE = 0, 1, 2
_PASSES = ("hf_flash_forward", "hf_flash_backward", "hf_flash_decode")
AUTO = 0
_KERNELS = {"auto": AUTO, "portable": 1, "hopper": 2}
DTYPES = {torch.bfloat16: 0, torch.float16: 1}


class HfFlashTensor(ctypes.Structure):
    """A pointer and three strides in elements; assign a tuple (data, batch, row, head) to a field of this type."""

    _fields_ = [("data", ctypes.c_void_p)] + [
        (name, ctypes.c_int64) for name in ("batch_stride", "row_stride", "head_stride")
    ]


def _fields(ctype, names):
    return [(name, ctype) for name in names.split()]


class HfFlashParams(ctypes.Structure):
    """csrc/hf_flash.h's struct of that name, field by field."""

    _fields_ = (
        _fields(HfFlashTensor, "q k v out grad_out grad_q grad_k grad_v new_k new_v")
        + _fields(ctypes.c_void_p, "lse grad_lse")
        + _fields(ctypes.c_int64, "lse_batch_stride lse_head_stride")
        + _fields(ctypes.c_void_p, "cu_seqlens_q cu_seqlens_k used_k leftpad_k block_table cache_batch_idx")
        + _fields(ctypes.c_int64, "block_table_stride")
        + _fields(ctypes.c_void_p, "rotary_cos rotary_sin alibi_slopes")
        + _fields(ctypes.c_int64, "alibi_batch_stride")
        + _fields(ctypes.c_void_p, "rng_state workspace")
        + _fields(ctypes.c_int64, "workspace_bytes")
        + _fields(ctypes.c_int64, "total_q total_k")
        + _fields(ctypes.c_int32, "dtype kernel batch heads kv_heads head_dim seq_q seq_k seq_new page_size")
        + _fields(ctypes.c_int32, "window_left window_right rotary_dim rotary_interleaved num_splits deterministic")
        + _fields(ctypes.c_float, "scale softcap dropout_p")
        + _fields(ctypes.c_int32, "rotary_per_token")
    )


class Status(typing.NamedTuple):
    """What became of the library: `reason` and `remedy` are empty where it is available."""

    available: bool
    path: str
    architectures: str = ""
    reason: str = ""
    remedy: str = ""


_library = None
_status = None
_kernel = None


def path():
    """The file that is, or would be, loaded."""
    return os.environ.get("HF_FLASH_LIBRARY") or os.path.join(os.path.dirname(__file__), "libhf_flash.so")


def _open(file):
    if not os.path.exists(file):
        return None, Status(
            False,
            file,
            reason=f"there is no kernel library at {file}",
            remedy="install CUDA's nvcc and run `pip install .` in the source tree",
        )
    rebuild = "rebuild it: `pip install --force-reinstall --no-deps .` in the source tree"
    try:
        library = ctypes.CDLL(file)
        library.hf_flash_params_size.restype = ctypes.c_int64
        size = library.hf_flash_params_size()
        for name in _PASSES:
            function = getattr(library, name)
            function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int
        library.hf_flash_workspace_bytes.argtypes = (ctypes.c_int, ctypes.c_void_p)
        library.hf_flash_workspace_bytes.restype = ctypes.c_int64
        library.hf_flash_kernel_name.argtypes = (ctypes.c_int, ctypes.c_void_p)
        library.hf_flash_kernel_name.restype = ctypes.c_char_p
        library.hf_flash_error.argtypes, library.hf_flash_error.restype = (ctypes.c_int,), ctypes.c_char_p
        library.hf_flash_architectures.restype = ctypes.c_char_p
        architectures = library.hf_flash_architectures().decode()
    except (OSError, AttributeError) as error:
        return None, Status(False, file, reason=f"{file} cannot be loaded: {error}", remedy=rebuild)
    if size != ctypes.sizeof(HfFlashParams):
        mine = ctypes.sizeof(HfFlashParams)
        reason = f"{file} was built from other sources: its parameters take {size} bytes, this package's {mine}"
        return None, Status(False, file, reason=reason, remedy=rebuild)
    return library, Status(True, file, architectures)


def status():
    """Loads the library if that has not been tried yet; returns its `Status`."""
    global _library, _status
    if _status is None:
        _library, _status = _open(path())
    return _status


def reload():
    """Forgets what was loaded, so that HF_FLASH_LIBRARY is read again by the next call; returns the new `Status`."""
    global _status
    _status = None
    return status()


def available():
    """Whether the kernels can be called."""
    return status().available


def emulated():
    """Whether the library is the host emulator, which runs the kernels on CPU tensors (tests only)."""
    return "HF_FLASH_LIBRARY" in os.environ and "emulated" in status().architectures


def _loaded():
    if _status is None:
        status()
    if _library is None:
        raise RuntimeError(f"hf_flash has no CUDA kernels: {_status.reason}. Remedy: {_status.remedy}.")
    return _library


def kernel_choice():
    """The value of Params.kernel."""
    if _kernel is not None:
        return _kernel
    name = os.environ.get("HF_FLASH_KERNEL", "auto")
    if name not in _KERNELS:
        raise ValueError(f"HF_FLASH_KERNEL is {name!r}; it must be one of {', '.join(_KERNELS)}")
    return _KERNELS[name]


@contextlib.contextmanager
def force_kernel(name):
    """Within the block "portable" or "hopper" kernels run, or a call raises NotImplementedError; "auto" lifts it."""
    global _kernel
    if name not in _KERNELS:
        raise ValueError(f"kernel {name!r} must be one of {', '.join(_KERNELS)}")
    before, _kernel = _kernel, _KERNELS[name]
    try:
        yield
    finally:
        _kernel = before


def kernel_name(which, params):
    """What would run these parameters: "hopper/128", "portable/64"."""
    return _loaded().hf_flash_kernel_name(which, ctypes.byref(params)).decode()


def _check(library, code, params, which):
    name = _PASSES[which]
    text = library.hf_flash_error(code).decode()
    if code == UNSUPPORTED:
        kernel = {number: name for name, number in _KERNELS.items()}[params.kernel]
        raise NotImplementedError(
            f"{name}: {text} (kernel={kernel}, head_dim={params.head_dim}, heads={params.heads}, "
            f"kv_heads={params.kv_heads}); leave HF_FLASH_KERNEL unset to let the library choose"
        )
    if code == _CUDA_OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{name}: {text}")
    if code in (NO_KERNEL_IMAGE, _CUDA_NO_KERNEL_IMAGE, _CUDA_UNSUPPORTED_PTX):
        raise RuntimeError(
            f"{name}: {text}; the library holds kernels for {_status.architectures}. "
            "Remedy: rebuild with HF_FLASH_ARCHS set to this GPU's compute capability (8.0 or newer)."
        )
    raise RuntimeError(f"{name}: {text} (code {code})")


def run(which, params, device):
    """Runs FORWARD, BACKWARD or DECODE on the device's current stream, with scratch memory from torch's allocator."""
    library = _library or _loaded()
    params.kernel = kernel_choice()
    if device.type != "cuda":
        return _run(library, which, params, device, 0)
    index = device.index
    if torch._C._cuda_getDevice() == index:
        return _run(library, which, params, device, torch._C._cuda_getCurrentRawStream(index))
    with torch.cuda.device(index):
        return _run(library, which, params, device, torch._C._cuda_getCurrentRawStream(index))


def prepare(which, params, device):
    """For parameters that will run often: (the library's function, their address, scratch memory to be kept or None).

    The function takes the address and a stream, and returns 0, or a code where `run` must be called instead.
    """
    library, pointer = _loaded(), ctypes.addressof(params)
    params.kernel = kernel_choice()
    size, workspace = library.hf_flash_workspace_bytes(which, pointer), None
    if size > 0:
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        params.workspace, params.workspace_bytes = workspace.data_ptr(), size
    return getattr(library, _PASSES[which]), pointer, workspace


def _run(library, which, params, device, stream):
    pointer = ctypes.addressof(params)
    if which != FORWARD:
        size = library.hf_flash_workspace_bytes(which, pointer)
        if size > 0:
            workspace = torch.empty(size, dtype=torch.uint8, device=device)
            params.workspace, params.workspace_bytes = workspace.data_ptr(), size
    code = getattr(library, _PASSES[which])(pointer, stream)
    if code == NO_TENSOR_MAP and params.kernel == 0:  # strides that only the copy engine cannot follow
        params.kernel = _KERNELS["portable"]
        return _run(library, which, params, device, stream)
    if code:
        _check(library, code, params, which)
