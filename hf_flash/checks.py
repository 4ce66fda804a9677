"""Argument checks of the public functions: before any launch, naming the argument, its shape and the remedy.

Checks of values that lie on a GPU would make the host wait, so offsets are checked there by an asynchronous assertion,
once for each tensor of offsets.
"""

import operator

import torch
from torch.autograd import forward_ad

_CUDA_DTYPES = (torch.bfloat16, torch.float16)
_CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MAX_HEAD_DIM = 256
_NO_LIMIT = 1 << 30  # a window of as many keys hides none, and fits the kernels' int with room to add


def autocast(*tensors):
    """Under torch.autocast, attention runs in autocast's dtype, as PyTorch's own does; otherwise nothing changes."""
    kind = getattr(getattr(tensors[0], "device", None), "type", "meta")  # what is no tensor is named by _tensors
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == dtype or x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _shape(x):
    return tuple(x.shape)


def _tensors(q, k, v):
    """Whether these are tensors that derivatives and batching rules of PyTorch's leave alone."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is {type(x).__name__}: it must be a torch.Tensor")
    if torch.compiler.is_compiling():
        return
    # Both would be lost without a word: kernels see memory, not what PyTorch has attached to it.
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "hf_flash attention does not run under torch.func (vmap, grad, jvp, jacrev): use torch.autograd.grad and "
            "the batch axis, or torch.nn.functional.scaled_dot_product_attention"
        )
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in (q, k, v)):
        raise NotImplementedError(
            "hf_flash attention has no forward-mode derivative (dual numbers, jvp): use torch.autograd.grad, or "
            "torch.nn.functional.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)"
        )


def _common(q, k, v):
    """Whether dtype, device, heads and head_dim fit together."""
    dtype, device, q_shape, k_shape = q.dtype, q.device, q.shape, k.shape
    return (
        k.dtype == dtype
        and v.dtype == dtype
        and (dtype in _CUDA_DTYPES or (dtype in _CPU_DTYPES and not q.is_cuda))
        and k.device == device
        and v.device == device
        and k_shape == v.shape
        and k_shape[-1] == q_shape[-1]
        and 0 < q_shape[-1] <= MAX_HEAD_DIM
        and k_shape[-2] > 0
        and q_shape[-2] % k_shape[-2] == 0
    )


def _explain(q, k, v):
    """Raises the error of inputs that `_common` refused."""
    if not (q.device == k.device == v.device):
        raise ValueError(
            f"q is on {q.device}, k on {k.device}, v on {v.device}: move them to one device with .to(q.device)"
        )
    if not (q.dtype == k.dtype == v.dtype):
        raise TypeError(
            f"q is {q.dtype}, k {k.dtype}, v {v.dtype}: cast them to one dtype, for example k.to(q.dtype), "
            "or run under torch.autocast"
        )
    if q.dtype not in _CPU_DTYPES:
        raise TypeError(f"q, k and v are {q.dtype}: attention takes bfloat16 and float16 (on the CPU also float32)")
    if q.is_cuda and q.dtype not in _CUDA_DTYPES:
        raise TypeError(
            f"q, k and v are {q.dtype}: the CUDA kernels take bfloat16 and float16; cast them with .to(torch.bfloat16) "
            "or run under torch.autocast('cuda', torch.bfloat16)"
        )
    head_dim = q.shape[-1]
    if k.shape[-1] != head_dim or v.shape[-1] != head_dim:
        raise ValueError(
            f"head_dim differs: q {_shape(q)}, k {_shape(k)}, v {_shape(v)}; pad the narrower ones with zeros to one "
            "head_dim and give softmax_scale"
        )
    if k.shape != v.shape:
        raise ValueError(f"k {_shape(k)} and v {_shape(v)} must have one shape")
    if head_dim > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"q {_shape(q)}: head_dim {head_dim} is larger than {MAX_HEAD_DIM}; use "
            "torch.nn.functional.scaled_dot_product_attention"
        )
    if head_dim == 0 or k.shape[-2] == 0:
        raise ValueError(f"q {_shape(q)}, k {_shape(k)}: heads and head_dim must not be 0")
    raise ValueError(
        f"q {_shape(q)} has {q.shape[-2]} heads, k {_shape(k)} has {k.shape[-2]}: heads must be a multiple of "
        "kv_heads. The axes are (batch, seq, heads, head_dim): transpose(1, 2) what is (batch, heads, seq, head_dim)"
    )


def dense(q, k, v):
    """q (batch, seq_q, heads, head_dim), k and v (batch, seq_k, kv_heads, head_dim)."""
    _tensors(q, k, v)
    if not (q.dim() == 4 and k.dim() == 4 and v.dim() == 4):
        raise ValueError(
            f"q {_shape(q)}, k {_shape(k)}, v {_shape(v)} must be (batch, seq, heads, head_dim); for packed sequences "
            "(total, heads, head_dim) call flash_attn_varlen_func"
        )
    if not _common(q, k, v):
        _explain(q, k, v)
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"batch differs: q {_shape(q)}, k {_shape(k)}; expand or repeat the smaller one")


def varlen(q, k, v):
    """q (total_q, heads, head_dim), k and v (total_k, kv_heads, head_dim)."""
    _tensors(q, k, v)
    if not (q.dim() == 3 and k.dim() == 3 and v.dim() == 3):
        raise ValueError(
            f"q {_shape(q)}, k {_shape(k)}, v {_shape(v)} must be (total, heads, head_dim), all tokens in a row; "
            "unpad_input makes that of a padded batch"
        )
    if not _common(q, k, v):
        _explain(q, k, v)


def packed(x, name, parts, dims):
    """x (..., parts, heads, head_dim) with dims axes."""
    if x.dim() != dims or x.shape[-3] != parts:
        lead = "batch, seq" if dims == 5 else "total"
        raise ValueError(f"{name} {_shape(x)} must be ({lead}, {parts}, heads, head_dim)")


def paged(q, k, v, block_table):
    """q (total_q, heads, head_dim) or (batch, seq, heads, head_dim); k and v (pages, page_size, kv_heads, head_dim)."""
    _tensors(q, k, v)
    if k.dim() != 4 or v.dim() != 4:
        raise ValueError(
            f"with block_table k {_shape(k)} and v {_shape(v)} must be (num_pages, page_size, kv_heads, head_dim)"
        )
    if not _common(q, k, v):
        _explain(q, k, v)
    if block_table.dim() != 2:
        raise ValueError(f"block_table {_shape(block_table)} must be (batch, pages per sequence)")
    return indices(block_table, "block_table", q.device)


def window(window_size, causal):
    """(left, right) with -1 for no limit; causal sets right to 0."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size is {window_size!r}: it must be (left, right), with -1 for no limit")
    left, right = (integer(x, "window_size", "(left, right) in tokens, -1 for no limit", -1) for x in window_size)
    left, right = (x if x < _NO_LIMIT else -1 for x in (left, right))
    return left, 0 if causal else right


def integer(value, name, meaning, least=0):
    """An int of at least `least` (-1 or 0); SymInt stays. A float or a bool in its place is a mistake."""
    if type(value) is not int and not isinstance(value, torch.SymInt):
        try:
            if isinstance(value, bool):
                raise TypeError
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"{name} is {value!r}, a {type(value).__name__}: give int, {meaning}") from None
    if value < least:
        raise ValueError(f"{name} is {value}: give {meaning}")
    return value


def _number(value, name):
    """A float, int or SymFloat as it is; what converts to one, such as a NumPy number, converted."""
    if type(value) in (float, int) or isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value
    try:
        if isinstance(value, (bool, str)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        raise TypeError(f"{name} is a {type(value).__name__}: it must be a number") from None


def scalars(dropout_p, softcap, scale, head_dim):
    """(dropout_p, softcap, scale) as numbers; scale None is 1 / sqrt(head_dim)."""
    dropout_p, softcap = _number(dropout_p, "dropout_p"), _number(softcap, "softcap")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p is {dropout_p}: it must be at least 0 and below 1")
    if not 0 <= softcap < float("inf"):
        raise ValueError(f"softcap is {softcap}: it must be positive, or 0 for none")
    if scale is None:
        return dropout_p, softcap, head_dim**-0.5
    scale = _number(scale, "softmax_scale")
    if not abs(scale) < float("inf"):
        raise ValueError(f"softmax_scale is {scale}: it must be finite, or None for 1 / sqrt(head_dim)")
    return dropout_p, softcap, scale


def length(value, name):
    if value is None:
        raise ValueError(f"{name} is None: give the longest length as an int, for example unpad_input's max_seqlen")
    return integer(value, name, "the longest length, for example unpad_input's max_seqlen")


def rows(x, name, batch):
    """A row for each sequence of q."""
    if x.shape[0] != batch:
        raise ValueError(f"{name} {_shape(x)} must have {batch} rows, one for each sequence of q")


def indices(x, name, device, shape=None, below=None):
    """An index tensor as the kernels want it: int32, on q's device, last axis contiguous.

    shape: what it must be. below: values must be at least 0 and below this; checked where the host has them.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is {type(x).__name__}: it must be an int32 tensor on {device}")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, q on {device}: move it once with .to(q.device)")
    if x.dtype != torch.int32:
        if x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool:
            raise TypeError(f"{name} is {x.dtype}: it must be int32")
        x = x.to(torch.int32)
    if shape is not None and x.shape != shape:
        raise ValueError(f"{name} {_shape(x)} must be {shape}: an entry for each sequence of q")
    if below is not None and x.is_cpu and type(x) is torch.Tensor and not torch.compiler.is_compiling():
        if any(not 0 <= i < below for i in x.tolist()):
            raise ValueError(f"{name} is {x.tolist()}: its entries must be at least 0 and below {below}")
    return x if x.stride(-1) == 1 else x.contiguous()


def alibi(slopes, heads, batch, device):
    """(heads,) or (batch, heads), fp32, contiguous."""
    if not isinstance(slopes, torch.Tensor):
        raise TypeError(f"alibi_slopes is {type(slopes).__name__}: it must be a float32 tensor on {device}")
    if slopes.device != device:
        raise ValueError(f"alibi_slopes is on {slopes.device}, q on {device}: move it once with .to(q.device)")
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(
            f"alibi_slopes {_shape(slopes)} must be ({heads},) or ({batch}, {heads}): heads, or batch and heads"
        )
    if not slopes.dtype.is_floating_point:
        raise TypeError(f"alibi_slopes is {slopes.dtype}: it must be float32")
    if slopes.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("alibi_slopes requires grad, and slopes get no gradient: give alibi_slopes.detach()")
    return slopes.to(torch.float32).contiguous()


def _offsets(x, name, q):
    if x is None:
        raise ValueError(f"{name} is None: give the (batch + 1) offsets, for example unpad_input's cu_seqlens")
    x = indices(x, name, q.device)
    if x.dim() != 1 or x.shape[0] < 1:
        raise ValueError(f"{name} {_shape(x)} must have one axis of batch + 1 offsets")
    return x


def _check_offsets(x, name, longest, total):
    """Checks the values of offsets once for each tensor; on a GPU asynchronously, as an assertion of the device."""
    stamp = (None if x.is_inference() else x._version, longest, total)
    if getattr(x, "_hf_flash_checked", None) == stamp:
        return
    if x.is_cuda:
        lengths = x[1:] - x[:-1]
        fine = (x[0] == 0) & (x[-1] <= total) & (lengths >= 0).all() & (lengths <= longest).all()
        torch._assert_async(fine, f"hf_flash: {name} must ascend from 0 to at most {total} in steps of max {longest}")
    elif x.is_cpu:
        at = x.tolist()
        if at[0] != 0 or at[-1] > total or any(b < a for a, b in zip(at, at[1:])):
            raise ValueError(f"{name} {at} must ascend from 0 to at most {total}, the number of rows")
        if any(b - a > longest for a, b in zip(at, at[1:])):
            raise ValueError(f"{name} {at} has a sequence longer than max_seqlen {longest}: give the longest length")
    x._hf_flash_checked = stamp


def offsets(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, total_k):
    """Both offset tensors, int32, checked. total_k: rows of k, None for pages."""
    same = cu_seqlens_q is cu_seqlens_k
    cu_seqlens_q = _offsets(cu_seqlens_q, "cu_seqlens_q", q)
    cu_seqlens_k = cu_seqlens_q if same else _offsets(cu_seqlens_k, "cu_seqlens_k", q)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q {_shape(cu_seqlens_q)} and cu_seqlens_k {_shape(cu_seqlens_k)} name different batch sizes"
        )
    if type(cu_seqlens_q) is type(cu_seqlens_k) is torch.Tensor and not torch.compiler.is_compiling():
        _check_offsets(cu_seqlens_q, "cu_seqlens_q", max_seqlen_q, q.shape[0])
        if not same or max_seqlen_k != max_seqlen_q or total_k != q.shape[0]:
            _check_offsets(cu_seqlens_k, "cu_seqlens_k", max_seqlen_k, 2**31 - 1 if total_k is None else total_k)
    return cu_seqlens_q, cu_seqlens_k


def returned(out, lse, return_attn_probs, return_lse):
    """What flash-attn returns, or (out, lse) for return_lse."""
    if return_attn_probs:
        return out, lse, None
    return (out, lse) if return_lse else out
