"""The emulator itself: its tensor cores, copies and barriers give what the hardware's documentation says."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from emulator import build

from hf_flash import library

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or not (build.cuda_include() / "cuda_bf16.h").exists(),
    reason="needs g++ and CUDA headers",
)


def build_checks(folder):
    """Compiles checks.cu with the emulator into a library of its own; returns its path."""
    objects = []
    for source in [build.HERE / "checks.cu", *(build.HERE / f"{name}.cpp" for name in build.RUNTIME)]:
        target = Path(folder) / f"{source.stem}.o"
        message = build.compile_object(source, target)
        assert message is None, message
        objects.append(str(target))
    library = Path(folder) / "libchecks.so"
    subprocess.run(["g++", "-shared", "-o", str(library), *objects], check=True)
    return library


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    return ctypes.CDLL(str(build_checks(tmp_path_factory.mktemp("checks"))))


def pointer(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [0, 1])
def test_ldmatrix_and_mma_multiply(checks, dtype, transposed):
    a, b = torch.randn(32, 64).to(dtype), torch.randn(64, 16).to(dtype)
    out = torch.empty(32, 16)
    stored = b if transposed else b.T.contiguous()
    assert checks.run_matmul(pointer(out), pointer(a), pointer(stored), int(dtype == torch.float16), transposed, 1) == 0
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-4)


def test_a_missing_wait_for_a_copy_gives_nan(checks):
    a, b, out = torch.randn(32, 64).bfloat16(), torch.randn(16, 64).bfloat16(), torch.empty(32, 16)
    assert checks.run_matmul(pointer(out), pointer(a), pointer(b), 0, 0, 0) == 0
    assert out.isnan().all()


@pytest.mark.parametrize("panel_width, columns", [(64, 128), (32, 96), (16, 80)])
@pytest.mark.parametrize("form", ["ss", "ss, b transposed", "sst", "rs"])
def test_tma_and_wgmma_multiply(checks, panel_width, columns, form):
    index = ["ss", "ss, b transposed", "sst", "rs"].index(form)
    a, b = torch.randn(64, 64).bfloat16(), torch.randn(64, columns).bfloat16()
    out = torch.empty(64, columns, dtype=torch.bfloat16)
    stored_a = a.T.contiguous() if form == "sst" else a
    stored_b = b if form in ("sst", "ss, b transposed") else b.T.contiguous()
    assert checks.run_tensor_core(pointer(out), pointer(stored_a), pointer(stored_b), index, panel_width, 1) == 0
    torch.testing.assert_close(out.float(), a.float() @ b.float(), rtol=1e-2, atol=1e-2)


def test_a_missing_wait_for_wgmma_gives_nan(checks):
    a, b, out = torch.randn(64, 64).bfloat16(), torch.randn(128, 64).bfloat16(), torch.empty(64, 128).bfloat16()
    assert checks.run_tensor_core(pointer(out), pointer(a), pointer(b), 0, 64, 0) == 0
    assert out.isnan().all()


def test_shuffles_votes_and_named_barriers(checks):
    out = torch.empty(64, dtype=torch.int32)
    assert checks.run_warp(pointer(out)) == 0
    lane = torch.arange(32)
    expected = 528 + 5 + (lane - 1).clamp(min=0) + (lane + 1).clamp(max=31) + 10 * (lane % 2) + 1
    assert out.tolist() == expected.tolist() * 2


@pytest.mark.parametrize(
    "fault, message",
    [(0, "deadlock"), (1, "past the end of shared memory"), (2, "ldmatrix"), (3, "deadlock")],
    ids=["missing arrival", "write past the end", "read past the end", "missing lanes"],
)
def test_a_faulty_kernel_aborts_with_a_message(checks, fault, message):
    program = f"import ctypes; ctypes.CDLL({checks._name!r}).run_faulty({fault})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode != 0 and message in result.stderr


def test_libraries_of_one_process_keep_their_devices_apart(tmp_path, monkeypatch):
    """What a library has learnt of the emulated GPU at its first call stays its own."""
    params = library.HfFlashParams(heads=2, kv_heads=2, head_dim=64)
    for capability, family in ((80, b"portable/64"), (90, b"hopper/64")):
        monkeypatch.setenv("HF_FLASH_EMULATED_CAPABILITY", str(capability))
        loaded = ctypes.CDLL(str(build.build(tmp_path / f"lib{capability}.so", (), ())))
        loaded.hf_flash_kernel_name.restype = ctypes.c_char_p
        assert loaded.hf_flash_kernel_name(library.FORWARD, ctypes.byref(params)) == family
