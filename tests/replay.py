"""A stand-in for CUDA graphs on the CPU: it records the operations of a function, with the tensors that they had, and
replays them on the same memory. Like a graph it runs no Python: numbers that Python worked out stay what they were."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # A capture on a GPU fails where the host would wait for a value.
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        returned = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, returned))
        return returned


class Recorder:
    """In the place of graphs.CAPTURE. `recorded`: operations of each capture; `replays`: how often one was replayed."""

    device_type = "cpu"

    def __init__(self):
        self.recorded, self.replays = [], 0

    def __call__(self, function, device, owner):
        function()
        with _Recording() as recording:
            returned = function()
        self.recorded.append([call[0] for call in recording.calls])

        def replay():
            self.replays += 1
            with torch.inference_mode(False), torch.no_grad():
                for operation, args, kwargs, old in recording.calls:
                    new = operation(*args, **kwargs)
                    for was, now in zip(tree_leaves(old), tree_leaves(new)):
                        if isinstance(was, torch.Tensor) and was.data_ptr() != now.data_ptr():
                            was.copy_(now)

        return replay, returned
