"""What attention is measured against: PyTorch's FlashAttention-2 and cuDNN, and the FlashAttention-3 and -4 packages.

A contender is a name. `Contender` runs it in this process; `Isolated` runs it in a process of its own, which may crash
without taking the others' figures along: turns are still taken one at a time, in the order that the caller draws.
"""

import contextlib
import multiprocessing
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_flash import bench, flash_attn_with_kvcache

NAMES = ("hf_flash", "hf_flash_portable", "hf_flash_deterministic", "fa2", "cudnn", "fa3", "fa4")
PACKAGES = {"fa3": ("flash_attn_interface", "fa3_fwd_interface"), "fa4": ("flash_attn.cute",)}
PATIENCE = 150  # seconds that a process of its own may take for one answer: FlashAttention-4 compiles on first use


@dataclass(frozen=True)
class Cache:
    """One query per sequence against `cached` keys."""

    batch: int
    cached: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16

    def inputs(self, device):
        shapes = ((1, self.heads), (self.cached, self.kv_heads), (self.cached, self.kv_heads))
        return [torch.randn(self.batch, *s, self.head_dim, dtype=self.dtype, device=device) for s in shapes]

    def bytes(self):
        return 2 * self.batch * self.cached * self.kv_heads * self.head_dim * self.dtype.itemsize

    def label(self):
        return f"{self.batch}x{self.cached} heads {self.heads}/{self.kv_heads} head dim {self.head_dim}"


def load(name):
    """The package that a contender needs, None for those of PyTorch and ours; raises ImportError."""
    reasons = []
    for module in PACKAGES.get(name, ()):
        try:
            return __import__(module, fromlist=["flash_attn_func"])
        except Exception as reason:  # a broken package raises anything
            reasons.append(f"{module}: {(str(reason).splitlines() or [type(reason).__name__])[0]}")
    if reasons:
        raise ImportError("; ".join(reasons))


def first(result):
    return result[0] if isinstance(result, (tuple, list)) else result


def attention(name, case, which, device, module):
    """q, k, v -> out of one contender; raises NotImplementedError where it has none for the case."""
    if name == "hf_flash_deterministic" and which == "backward":
        return bench.ours(case, deterministic=True)
    if name == "hf_flash_portable":
        return bench.ours(case, "portable")
    if module is not None:
        if which == "backward" and "fwd" in module.__name__:
            raise NotImplementedError("this package has no backward pass")
        return package_attention(case, device, module)
    if case.lengths and name == "fa2" and device.type == "cuda":
        return fa2_varlen(case, device)
    found = bench.contenders(case, device)
    if name not in found:
        raise NotImplementedError("not offered for this case")
    return found[name]


def offsets(case, device):
    return torch.tensor((0, *case.lengths)).cumsum(0).to(device, torch.int32), max(case.lengths)


def fa2_varlen(case, device):
    from torch.nn.attention.varlen import varlen_attn

    (cu, longest), options = offsets(case, device), {"window_size": (-1, 0)} if case.causal else {}
    return lambda q, k, v: varlen_attn(q, k, v, cu, cu, longest, longest, **options)


def package_attention(case, device, module):
    """FlashAttention-3 or -4's functions, whose names and shapes are the same."""
    if not case.lengths:
        return lambda q, k, v: first(module.flash_attn_func(q, k, v, causal=case.causal))
    cu, longest = offsets(case, device)
    options = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest, causal=case.causal)
    return lambda q, k, v: first(module.flash_attn_varlen_func(q, k, v, **options))


def decoding(name, q, k, v, module):
    """A call without arguments: one contender's attention of q (batch, 1, heads, head_dim) to caches k and v."""
    used = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32, device=k.device)
    if name == "hf_flash":
        return lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True)
    if name == "fa3":
        return lambda: first(module.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True))
    if name == "fa4":
        return lambda: first(module.flash_attn_func(q, k, v, causal=True))
    backends = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    if name not in backends or (name == "cudnn" and not q.is_cuda):
        raise NotImplementedError("not offered for decoding")

    def call():
        views = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backends[name]) if q.is_cuda else contextlib.nullcontext():
            return F.scaled_dot_product_attention(*views, enable_gqa=q.shape[2] != k.shape[2]).transpose(1, 2)

    return call


class Contender:
    """One name, in this process; its methods run on the stream that is current."""

    def __init__(self, name, device):
        self.name, self.device, self.module, self.timer = name, device, load(name), None

    def enter(self, which, case):
        """Prepares one pass of a case, "forward", "backward" or "decode": the error, in words why it failed, or None.

        None: this contender has nothing for such a case.
        """
        torch.manual_seed(0)
        try:
            run = self._decoding if which == "decode" else self._attention
            worst, self.timer = run(which, case)
        except NotImplementedError:
            return None
        except torch.OutOfMemoryError as reason:
            return str(reason).splitlines()[0]
        return worst

    def _attention(self, which, case):
        attend = attention(self.name, case, which, self.device, self.module)
        with torch.no_grad():
            tensors = case.inputs(self.device)
            expected = bench.reference(case, *tensors)
        return bench.entry(attend, which, case, tensors, expected, self.device)

    def _decoding(self, which, case):
        with torch.no_grad():
            q, k, v = case.inputs(self.device)
            call, group = decoding(self.name, q, k, v, self.module), case.heads // case.kv_heads
            scores = q[0, 0, :group].float() @ k[0, :, 0].float().T * case.head_dim**-0.5
            expected = scores.softmax(-1) @ v[0, :, 0].float()

            def judge(out):
                return ((out[0, 0, :group].float() - expected).abs().max() / expected.abs().max()).item()

            return bench.enter(lambda: (call, call()), judge, self.device)

    def start(self):
        return self.timer.start()

    def leave(self):
        self.timer = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self):
        pass


def serve(pipe, name, device):
    """What a process of its own does: answers method calls until the pipe ends. It ends where CUDA is out of order."""
    try:
        contender = Contender(name, device)
    except ImportError as reason:
        return pipe.send(reason)
    pipe.send(None)
    with bench.side_stream(device):
        while request := pipe.recv():
            method, *arguments = request
            answer = getattr(contender, method)(*arguments)
            if method == "start":
                answer = answer()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            pipe.send(answer)


class Isolated:
    """One name, in a process of its own, which is started again after a crash; three crashes are enough."""

    method = "spawn"  # CUDA does not live through a fork

    def __init__(self, name, device):
        self.name, self.device, self.crashes, self.process = name, device, 0, None
        self._begin()

    def _begin(self):
        context = multiprocessing.get_context(self.method)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, self.name, self.device), daemon=True)
        self.process.start()
        theirs.close()
        answer = self._answer()
        if isinstance(answer, ImportError):
            raise answer

    def _answer(self):
        if self.pipe.poll(PATIENCE):
            return self.pipe.recv()  # EOFError: the process has ended
        raise EOFError

    def _ask(self, *request):
        if self.process is None:
            raise RuntimeError("its process has crashed")
        try:
            self.pipe.send(request)
            return self._answer()
        except (EOFError, OSError):
            self.close()
            self.crashes += 1
            raise RuntimeError(f"its process crashed or hung in {request[0]}") from None

    def enter(self, which, case):
        if self.crashes == 3:
            return "left out after three crashes"
        try:
            if self.process is None:
                self._begin()
            return self._ask("enter", which, case)
        except RuntimeError as reason:
            return str(reason)

    def start(self):
        """Runs to its end, so that nobody else's turn overlaps with it; NaN where it crashes."""
        try:
            seconds = self._ask("start")
        except RuntimeError:
            seconds = float("nan")
        return lambda: seconds

    def leave(self):
        with contextlib.suppress(RuntimeError):  # what has crashed is started again for the next case
            self._ask("leave")

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None
