"""compute-sanitizer finds nothing in small shapes of every kernel (row 50)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.sanitizer]
TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")

# racecheck follows barriers of whole blocks alone: where one warpgroup hands P to another it reports races.
OPTIONS = {"racecheck": ["--kernel-regex-exclude", "kns=backward_dkv_kernel"]}


@pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_compute_sanitizer_is_clean(tool):
    command = [TOOL, "--tool", tool, *OPTIONS.get(tool, []), "--error-exitcode", "9", sys.executable]
    head_dims = os.environ.get("HF_FLASH_SANITIZE", "64,128,256")
    command += [Path(__file__).with_name("sanitize.py"), "--head-dims", head_dims]
    command += ["--cleared"] * (tool == "initcheck")
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
