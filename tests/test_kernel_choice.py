"""Which kernels serve a call on a Hopper GPU: what README's limits say of them, and nothing else, stays portable."""

import ctypes
import shutil

import pytest
import torch
from emulator import build

from hf_flash import library

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or not (build.cuda_include() / "cuda_bf16.h").exists(),
    reason="needs g++ and CUDA headers",
)
FORWARD, BACKWARD, DECODE = library.FORWARD, library.BACKWARD, library.DECODE
SOMEWHERE = ctypes.addressof(ctypes.c_int64())  # only looked at for being an address


@pytest.fixture
def on_hopper(monkeypatch):
    """The library's choice alone: no kernel is compiled."""
    path = build.build(build.DEFAULT_OUTPUT.with_name("libhf_flash_choice.so"), (), ())
    monkeypatch.setenv("HF_FLASH_LIBRARY", str(path))
    monkeypatch.setenv("HF_FLASH_EMULATED_CAPABILITY", "90")
    assert library.reload().available
    yield
    monkeypatch.undo()
    library.reload()


def name(which, **fields):
    fields = {"batch": 2, "heads": 8, "kv_heads": 8, "head_dim": 128, "seq_q": 512, "seq_k": 512, "scale": 0.1} | fields
    return library.kernel_name(which, library.HfFlashParams(**{"window_left": -1, "window_right": -1} | fields))


@pytest.mark.parametrize("which", [FORWARD, BACKWARD])
@pytest.mark.parametrize(
    "feature",
    [
        {},
        {"dtype": library.DTYPES[torch.float16]},
        {"window_right": 0},
        {"window_left": 64, "window_right": 0},
        {"softcap": 20.0},
        {"alibi_slopes": SOMEWHERE},
        {"dropout_p": 0.1, "rng_state": SOMEWHERE},
        {"kv_heads": 1},
        {"cu_seqlens_q": SOMEWHERE, "cu_seqlens_k": SOMEWHERE, "total_q": 900, "total_k": 900},
        {"seq_q": 1},
        {"deterministic": 1},
    ],
    ids=lambda feature: "-".join(feature) or "plain",
)
def test_training_and_prefill_run_on_the_hopper_kernels(on_hopper, which, feature):
    assert name(which, **feature) == "hopper/128"


def test_a_head_dim_runs_on_the_smallest_tile_that_holds_it(on_hopper):
    for family, tiles in (("portable", (32, 64, 80, 96, 128, 160, 192, 256)), ("hopper", (64, 80, 96, 128, 192, 256))):
        for head_dim in range(40 if family == "hopper" else 8, 257, 8):
            tile = min(tile for tile in tiles if tile >= head_dim)
            which = DECODE if family == "portable" else BACKWARD
            assert name(which, head_dim=head_dim) == f"{family}/{tile}"


@pytest.mark.parametrize(
    "which, fields",
    [
        (DECODE, {}),
        (FORWARD, {"head_dim": 32}),
        (BACKWARD, {"head_dim": 32}),
        (FORWARD, {"block_table": SOMEWHERE}),
        (FORWARD, {"leftpad_k": SOMEWHERE}),
        (FORWARD, {"cache_batch_idx": SOMEWHERE}),
        (BACKWARD, {"used_k": SOMEWHERE}),
    ],
)
def test_what_readme_lists_stays_on_the_portable_kernels(on_hopper, which, fields):
    assert name(which, **fields).startswith("portable/")
    assert which == DECODE or name(which).startswith("hopper/")
