"""The kernels themselves pass the tests of attention, compiled for the CPU by the emulator: portable and Hopper."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from emulator import build

FILES = ("test_attention", "test_varlen", "test_kvcache", "test_dropout", "test_bad_input")
HEAD_DIMS = (32, 64, 80)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("g++") is None or not (build.cuda_include() / "cuda_bf16.h").exists(),
        reason="needs g++ and CUDA headers",
    ),
]


@pytest.fixture(scope="module")
def emulator():
    return build.build(build.DEFAULT_OUTPUT.with_name("libhf_flash_attention.so"), HEAD_DIMS)


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_pass_the_tests_of_attention(emulator, capability):
    """Below capability 9.0 the portable kernels serve all, at 9.0 the Hopper kernels what they can."""
    environment = {
        **os.environ,
        "HF_FLASH_LIBRARY": str(emulator),
        "HF_FLASH_EMULATED_CAPABILITY": str(capability),
        "OMP_NUM_THREADS": "1",
    }
    files = [Path(__file__).with_name(f"{name}.py") for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *files]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert result.returncode == 0, result.stdout[-6000:]
