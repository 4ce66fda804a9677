"""Which devices the tests of attention run on.

`backend` is "cpu" and, where there is one, "cuda" (marked gpu). With HF_FLASH_LIBRARY naming the host emulator
(tests/emulator) it is "emulated" alone: the kernels themselves, on CPU tensors, at sizes that a CPU can bear.
"""

import os
import random
from typing import NamedTuple

import pytest
import torch

from hf_flash import library

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

HALVES = (torch.bfloat16, torch.float16)


class Backend(NamedTuple):
    name: str
    device: torch.device
    dtypes: tuple

    @property
    def kernels(self):
        """Whether libhf_flash.so runs, not PyTorch."""
        return self.name != "cpu"


_BACKENDS = {
    "cpu": Backend("cpu", torch.device("cpu"), (torch.float32, *HALVES)),
    "cuda": Backend("cuda", torch.device("cuda", 0), HALVES),
    "emulated": Backend("emulated", torch.device("cpu"), HALVES),
}


def pytest_configure():
    if "HF_FLASH_LIBRARY" in os.environ and not library.available():  # else the CPU would pass in its place
        raise pytest.UsageError(f"HF_FLASH_LIBRARY: {library.status().reason}")


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        names = ["emulated"] if library.emulated() else ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
        metafunc.parametrize("backend", names, indirect=True)


def pytest_collection_modifyitems(items):
    reason = None
    if not torch.cuda.is_available():
        reason = "no GPU"
    elif torch.cuda.get_device_capability() < (8, 0):
        reason = "the GPU is older than compute capability 8.0"
    elif not library.available():
        reason = library.status().reason
    for item in items:
        if reason and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def backend(request):
    return _BACKENDS[request.param]


@pytest.fixture(autouse=True)
def _seed(request):
    seed = int(os.environ.get("HF_FLASH_TEST_SEED", "0")) + sum(map(ord, request.node.nodeid))
    random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture
def poisoned(monkeypatch):
    """Every torch.empty comes filled with NaN (scratch bytes with 0xff), as memory may be."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(x):
        return x.fill_(float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: fill(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: fill(empty_like(*a, **k)))
