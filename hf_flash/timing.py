"""How long a call takes on this device, beside others: CUDA graphs, turns in random order, medians.

Calls of a few milliseconds at most are recorded into a CUDA graph, short ones several in a row; what is longer or
cannot be captured is launched. Both wait behind a pause that keeps the device busy, so that no time of the host's
counts. In every round each contender runs once, in a new random order, between two events; the median over the rounds
counts.
"""

import contextlib
import random
import statistics
import time

import torch

_HEAD_START = 4_000_000  # cycles, about two milliseconds: the host launches a call meanwhile
_LONG = 3e-3  # seconds from which a call is launched, not captured


class Timer:
    """Times one contender. Must be built, and its call prepared, on the stream it is recorded on."""

    def __init__(self, call, device, target=1e-3):
        """target: seconds that the calls of a graph take together, where one is shorter."""
        self.device, self.calls, self.call = device, 1, call
        self.kept = call  # a graph reads the tensors that the call holds, and holds none of them itself
        if device.type == "cpu":
            return
        for _ in range(2):
            call()
        seconds = min(self.start()() for _ in range(3))
        if seconds >= _LONG:
            return
        calls = max(1, min(20, round(target / max(seconds, 1e-6))))
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                for _ in range(calls):
                    call()
            graph.replay()
            self.call, self.calls = graph.replay, calls
        except RuntimeError:  # not capturable: launched, one by one
            torch.cuda.synchronize()

    def start(self):
        """Runs once; returns a function that waits and gives the seconds per call."""
        if self.device.type == "cpu":
            before = time.perf_counter()
            self.call()
            seconds = time.perf_counter() - before
            return lambda: seconds
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_HEAD_START)
        start.record()
        self.call()
        end.record()

        def seconds():
            end.synchronize()
            return start.elapsed_time(end) / 1e3 / self.calls

        return seconds


def take_turns(timers, rounds, seed=0):
    """Name -> its seconds per call, one per round; in each round every timer runs once, in random order."""
    shuffle = random.Random(seed).sample
    seconds = {name: [] for name in timers}
    for turn in range(rounds + 1):
        pending = [(name, timers[name].start()) for name in shuffle(list(timers), len(timers))]
        for name, wait in pending:
            elapsed = wait()
            if turn:  # the first round warms up
                seconds[name].append(elapsed)
    return seconds


def side_stream(device):
    """A stream other than the default, on which graphs may be recorded; nothing on the CPU."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


def ceilings(device, rounds=15):
    """What this device reaches here and now: {"matmul_tflops": a bf16 8192^3 product, "copy_tb_s": a kernel's copy}."""
    size, copied = (8192, 1 << 30) if device.type == "cuda" else (512, 1 << 24)
    with side_stream(device):
        a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
        source = torch.randn(copied // 4, device=device)
        target = torch.empty_like(source)
        # Negated, as a kernel does it: a plain copy is a copy node of the graph, which is slower than a kernel.
        timers = {"matmul": Timer(lambda: a @ b, device), "copy": Timer(lambda: torch.neg(source, out=target), device)}
        medians = {name: statistics.median(times) for name, times in take_turns(timers, rounds).items()}
    return {
        "matmul_tflops": float(f"{2 * size**3 / medians['matmul'] / 1e12:.4g}"),
        "copy_tb_s": float(f"{2 * copied / medians['copy'] / 1e12:.4g}"),
    }
