"""Decoding steps as CUDA graphs: `patch_model(model, cuda_graphs=True)`.

A step of a small batch is some hundred launches, whose time on the host is several times that on the GPU. Here the
whole step of a model with its head is captured once and replayed for every token. Its keys and values lie in buffers
as long as `generate` says the text can get, and how much of them is in use is read on the device, so one graph serves
every length. Each batch size has a graph; a few are kept, with their buffers, for later calls of `generate`. What
cannot be replayed runs as without graphs, and the report says why.
"""

import functools
import warnings
import weakref
from collections import Counter

import torch

from . import steps
from .steps import Step

KEPT = 4
ROUNDED = 256  # rows: a text that is a little longer than the one before finds its graph
LEASE = "_hf_flash_lease"
REPLAYED = "replayed"
# What a captured step knows, and what it may be told beside it.
INPUTS = ("input_ids", "position_ids", "attention_mask", "cache_position", *steps.CACHE_NAMES)
HARMLESS = {
    "use_cache": (True,),
    "return_dict": (True,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
}


class CudaCapture:
    """Captures a function without arguments -> (replay, what it returned, whose tensors a replay writes again)."""

    device_type = "cuda"

    def __init__(self):
        self.pools = weakref.WeakKeyDictionary()

    def __call__(self, function, device, owner):
        with torch.cuda.device(device):
            if owner not in self.pools:
                self.pools[owner] = torch.cuda.graph_pool_handle()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                function()  # libraries allocate what they need before the capture
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pools[owner], stream=stream):
                returned = function()
        return graph.replay, returned


CAPTURE = CudaCapture()


class Graph:
    """A captured step and what it reads and writes: the buffers of a cache, and inputs of a fixed place.

    buffers   (layer, "keys" or "values") -> (batch, kv_heads, capacity, head_dim)
    replay    None before the capture; failed: why there will be none
    made_for  the fingerprint of the model when it was captured
    user      the cache whose rows lie in the buffers, while it lives
    """

    def __init__(self, batch, capacity, device):
        self.batch, self.capacity, self.device, self.buffers = batch, capacity, device, {}
        with torch.inference_mode(False):
            self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
            self.positions = torch.zeros_like(self.ids)
            self.cache_position = torch.zeros(1, dtype=torch.int64, device=device)
            self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
            self.left_pad = torch.zeros_like(self.lengths)
        self.replay = self.failed = self.returned = self.made_for = self.user = self.padded_by = None

    def fits(self, batch, rows, device):
        """Whether the buffers are long enough, without being so long that every step pays for it, and nobody's."""
        free = self.user is None or self.user() is None
        return free and (self.batch, self.device) == (batch, device) and rows <= self.capacity <= 2 * rows + 256

    def buffer(self, key, shape, dtype, device):
        found = self.buffers.get(key)
        wanted = (*shape[:2], self.capacity, shape[3])
        if found is None or found.shape != wanted or (found.dtype, found.device) != (dtype, device):
            self.replay = None
            with torch.inference_mode(False):
                found = self.buffers[key] = torch.zeros(wanted, dtype=dtype, device=device)
        return found

    def fill(self, given, past, left_pad):
        """Bring the inputs of one step to their places."""
        self.ids.copy_(given["input_ids"])
        positions = given.get("position_ids")
        self.positions.fill_(past) if positions is None else self.positions.copy_(positions.expand_as(self.ids))
        if given.get("cache_position") is not None:
            self.cache_position.fill_(past)
        self.lengths.fill_(past)
        if self.padded_by is not left_pad or self.replay is None:
            self.left_pad.zero_() if left_pad is None else self.left_pad.copy_(left_pad)
            self.padded_by = left_pad

    def capture(self, top, state, given, cache, owner):
        """Capture a step of the model. Raises what stands in the way."""
        options = {name: value for name, value in given.items() if name not in INPUTS}
        options.update({name: cache for name in steps.CACHE_NAMES if given.get(name) is not None})
        if given.get("cache_position") is not None:
            options["cache_position"] = self.cache_position

        before = cache.get_seq_length()

        def once():
            step = Step(cache, self.batch, 1, cache.get_seq_length() + 1, None, self.left_pad, self.lengths)
            try:
                return state.call(
                    top, {**options, "input_ids": self.ids, "position_ids": self.positions, "attention_mask": step}
                )
            finally:
                step.end()
                for layer in cache.layers:
                    layer.advance(before - layer.get_seq_length())

        self.replay, returned = CAPTURE(once, self.device, owner)
        # Without the cache, which would live as long as the graph.
        tensors = {name: value if isinstance(value, torch.Tensor) else None for name, value in returned.items()}
        self.returned = type(returned), tensors

    def run(self, cache):
        self.replay()
        for layer in cache.layers:
            layer.advance(1)
        kind, tensors = self.returned
        return kind(**{name: cache if value is None else value.clone() for name, value in tensors.items()})


class Lease:
    """The buffers of one cache, taken from a graph. `length`: rows that it will need at most."""

    def __init__(self, graphs, cache, length):
        self.graphs, self.cache, self.length, self.graph = graphs, weakref.ref(cache), length, None
        self.obstacle = self.checked = None

    def place(self, layer, name, shape, dtype, device):
        rows = max(shape[2], self.length or 0)
        if self.graph is None or self.graph.capacity < rows or self.graph.batch != shape[0]:
            self.graph = self.graphs.take(shape[0], rows, device)
            self.graph.user, self.checked = self.cache, None
        return self.graph.buffer((layer, name), shape, dtype, device)

    def holds(self, cache):
        """Whether the cache's rows still lie in the graph's buffers, from the first on, with room for one more."""
        buffer_of, capacity = self.graph.buffers.get, self.graph.capacity
        for index, layer in enumerate(cache.layers):
            keys, values = layer.spans
            if keys.buffer is not buffer_of((index, "keys")) or values.buffer is not buffer_of((index, "values")):
                return False
            if keys.start or values.start or keys.end >= capacity or values.end >= capacity:
                return False
        return True


class Graphs:
    """The captured steps of one model, `kept` of them at most."""

    def __init__(self, kept=KEPT):
        self.limit, self.kept, self.counts = kept, [], Counter()

    def __getstate__(self):
        return {"limit": self.limit, "kept": [], "counts": self.counts}

    def lease(self, cache, length):
        """What `caches.grow` asks for buffers."""
        lease = Lease(self, cache, length)
        setattr(cache, LEASE, lease)
        return lease.place

    def take(self, batch, rows, device):
        graph = next((graph for graph in self.kept if graph.fits(batch, rows, device)), None)
        if graph is None:
            graph = Graph(batch, -(-rows // ROUNDED) * ROUNDED, device)
        else:
            self.kept.remove(graph)
        self.kept = [*self.kept, graph][-self.limit :]
        return graph

    def step(self, top, state, given):
        """What the model returns for a decoding step that could be replayed, else None."""
        cache = steps.cache_of(given)
        ids = given.get("input_ids")
        if cache is None or ids is None or torch.compiler.is_compiling() or not hasattr(cache, "get_seq_length"):
            return None
        lease = getattr(cache, LEASE, None)
        past = cache.get_seq_length() if lease is not None or not getattr(cache, "is_compileable", False) else 0
        if past == 0:  # a prompt, or a static cache, which is there to be compiled
            return None
        left_pad = None
        reason = "the cache is not one that generate made" if lease is None else _obstacle(top, given, lease, cache)
        if reason is None:
            fits, left_pad = steps.padding(cache, given.get("attention_mask"), past + 1, 1)
            reason = None if fits else "padding lies between tokens"
        if reason is None:
            graph = lease.graph
            graph.fill(given, past, left_pad)
            if graph.replay is None:
                try:
                    graph.capture(top, state, given, cache, self)
                except RuntimeError as error:
                    reason = lease.obstacle = f"the capture failed: {str(error).splitlines()[0]}"
                graph.made_for = lease.checked
        if reason is not None:
            if reason not in self.counts:
                warnings.warn(f"hf_flash: a decoding step is not replayed: {reason}", UserWarning, stacklevel=4)
            self.counts[reason] += 1
            return None
        self.counts[REPLAYED] += 1
        return graph.run(cache)

    def notes(self):
        """Lines for the report."""
        done = {REPLAYED: "replayed from CUDA graphs"}
        return [
            f"decoding steps {done.get(reason, f'not replayed: {reason}')} ({count}x)"
            for reason, count in self.counts.items()
        ]


def _obstacle(top, given, lease, cache):
    """Why this step cannot be replayed, or None."""
    if given["input_ids"].shape[1] != 1:
        return "several new tokens at once (assisted generation, a prompt over a cache)"
    for name, value in given.items():
        if name not in INPUTS and value is not None and value not in HARMLESS.get(name, ()):
            if not (name == "logits_to_keep" and isinstance(value, int)):
                return f"{name} was given"
    if torch.is_grad_enabled() or top.training:
        return "gradients are enabled" if torch.is_grad_enabled() else "the model is in training mode"
    if torch.is_autocast_enabled(given["input_ids"].device.type):
        return "autocast is on"
    if lease.graph is None or not lease.holds(cache):
        sliding = lease.graph is None or any(layer.place is None for layer in cache.layers)
        moved = "the cache lies elsewhere by now (beam search, selected rows, a longer text than announced)"
        return "a sliding window drops keys" if sliding else moved
    if lease.checked is None:
        lease.obstacle, lease.checked = _model_obstacle(top, lease.graph), fingerprint(top)
        if lease.graph.made_for != lease.checked:
            lease.graph.replay = None
    return lease.obstacle


def _model_obstacle(top, graph):
    """What about the model itself cannot be captured, or None. Asked once for each cache."""
    if graph.device.type != CAPTURE.device_type:
        return f"the model is on {graph.device.type}"
    if any(tensor.device != graph.device for tensor in (*top.parameters(), *top.buffers())):
        return "the model is spread over devices"
    for module in top.modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if hasattr(module, "_hf_hook") or not all(_is_transformers(hook) for hook in hooks):
            return "modules have forward hooks"
    rope = getattr(top.config, "rope_scaling", None) or getattr(top.config, "rope_parameters", None) or {}
    if rope.get("rope_type", rope.get("type")) in ("dynamic", "longrope"):
        return "rotary frequencies depend on the length"
    return None


def _is_transformers(hook):
    """transformers 5 leaves hooks of its own that do nothing unless hidden states are wanted."""
    function = hook.func if isinstance(hook, functools.partial) else hook
    return getattr(function, "__module__", "").startswith("transformers.")


def fingerprint(top):
    """What a captured step depends on beside its inputs: where the weights lie, and which adapters are on."""
    names = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
    adapters = [repr([getattr(m, name) for name in names]) for m in top.modules() if hasattr(m, "merged_adapters")]
    return tuple(tensor.data_ptr() for tensor in (*top.parameters(), *top.buffers())), tuple(adapters)
