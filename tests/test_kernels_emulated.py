"""The kernels themselves pass the tests of attention, compiled for the CPU by the emulator: portable and Hopper."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from emulator import build

FILES = ("test_attention", "test_varlen", "test_kvcache", "test_dropout", "test_bad_input", "test_generation_kernels")
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


def run_tests(emulator, capability, *options):
    environment = {
        **os.environ,
        "HF_FLASH_LIBRARY": str(emulator),
        "HF_FLASH_EMULATED_CAPABILITY": str(capability),
        "OMP_NUM_THREADS": "1",
    }
    files = [Path(__file__).with_name(f"{name}.py") for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *options, *files]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert result.returncode == 0, result.stdout[-6000:]


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_pass_the_tests_of_attention(emulator, capability):
    """Below capability 9.0 the portable kernels serve all, at 9.0 the Hopper kernels what they can."""
    run_tests(emulator, capability)


def test_kernels_fit_the_shared_memory_of_smaller_gpus(emulator):
    """Row 46: 99 KB for a block, as 8.6, 8.9 and 12.0 have; the sources assert it of every tile as they compile."""
    run_tests(emulator, 86, "-k", "strides_of_grad_out or slices_of or empty_sequences or true_head_dim")
