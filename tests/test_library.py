"""Loading libhf_flash.so: what is missing or broken is explained, and never breaks the import."""

import ctypes
import subprocess
import sys

import pytest
import torch

from hf_flash import library


@pytest.fixture
def load(monkeypatch):
    """load(path) -> the Status of the library at path; the one before comes back after the test."""

    def load(path):
        monkeypatch.setenv("HF_FLASH_LIBRARY", str(path))
        return library.reload()

    yield load
    monkeypatch.undo()
    library.reload()


def run_python(code, **environment):
    import os

    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


def test_a_missing_library_is_explained(load, tmp_path):
    status = load(tmp_path / "nothing.so")
    assert not status.available and not library.available()
    assert "there is no kernel library at" in status.reason and "nvcc" in status.remedy


def test_a_corrupt_library_is_explained(load, tmp_path):
    """Row 97."""
    file = tmp_path / "libhf_flash.so"
    file.write_bytes(b"\x7fELF but not really")
    status = load(file)
    assert not status.available and "cannot be loaded" in status.reason and "rebuild" in status.remedy
    with pytest.raises(RuntimeError, match="hf_flash has no CUDA kernels: .* cannot be loaded.* Remedy: rebuild"):
        library.run(library.FORWARD, library.HfFlashParams(), torch.device("cpu"))


def test_import_and_the_cpu_backend_work_beside_a_corrupt_library(tmp_path):
    """Row 97."""
    file = tmp_path / "libhf_flash.so"
    file.write_bytes(b"garbage")
    code = (
        "import sys; sys.modules['transformers'] = None; "  # which takes seconds
        "import torch, hf_flash; q = torch.ones(1, 2, 1, 8, dtype=torch.bfloat16); "
        "print(hf_flash.flash_attn_func(q, q, q).sum())"
    )
    result = run_python(code, HF_FLASH_LIBRARY=str(file))
    assert result.returncode == 0 and "tensor(16." in result.stdout, result.stderr


def test_importing_hf_flash_does_not_load_the_library():
    """And it works where transformers cannot be imported."""
    code = (
        "import sys; sys.modules['transformers'] = None; import hf_flash; from hf_flash import library; "
        "assert library._status is None; hf_flash.flash_attn_func; print('fine')"
    )
    result = run_python(code)
    assert "fine" in result.stdout, result.stderr


@pytest.fixture
def compiled(tmp_path):
    """compiled(source) -> a C library with csrc/hf_flash.h."""
    import shutil
    from pathlib import Path

    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    csrc = Path(__file__).parent.parent / "csrc"
    functions = """
        #include "hf_flash.h"
        int64_t hf_flash_workspace_bytes(int pass, const HfFlashParams *p) { return 100; }
        int hf_flash_backward(const HfFlashParams *p, void *s) { return p->workspace_bytes == 100 ? 0 : 7; }
        int hf_flash_decode(const HfFlashParams *p, void *s) { return 1000 + p->num_splits; }
        const char *hf_flash_kernel_name(int pass, const HfFlashParams *p) { return "none"; }
        const char *hf_flash_error(int code) { return "the text"; }
        const char *hf_flash_architectures(void) { return "80;90a"; }
        int64_t hf_flash_params_size(void) { return SIZE; }
        int hf_flash_forward(const HfFlashParams *p, void *s) { FORWARD }
    """

    def compiled(forward="return 0;", size="sizeof(HfFlashParams)"):
        source, target = tmp_path / "stub.c", tmp_path / "libstub.so"
        source.write_text(functions.replace("SIZE", size).replace("FORWARD", forward))
        subprocess.run(["gcc", "-shared", "-fPIC", f"-I{csrc}", "-o", target, source], check=True)
        return target

    return compiled


def test_the_parameters_mirror_the_header(load, compiled):
    """Every field arrives where C reads it: the header's own layout is the judge."""
    checks = " ".join(
        f"if (p->{name}{'.data' if kind is library.HfFlashTensor else ''} != ({cast}){i + 1}) return 1000 + {i + 1};"
        for i, (name, kind) in enumerate(library.HfFlashParams._fields_)
        for cast in ["void *" if kind in (library.HfFlashTensor, ctypes.c_void_p) else "int"]
        if name != "kernel"
    )
    assert load(compiled(checks + " return 0;")) == library.Status(True, library.path(), "80;90a")
    params = library.HfFlashParams()
    for i, (name, kind) in enumerate(library.HfFlashParams._fields_):
        setattr(params, name, (i + 1, 0, 0, 0) if kind is library.HfFlashTensor else i + 1)
    library.run(library.FORWARD, params, torch.device("cpu"))


def test_a_library_of_other_sources_is_refused_by_its_size(load, compiled):
    status = load(compiled(size="sizeof(HfFlashParams) + 8"))
    assert not status.available
    size = ctypes.sizeof(library.HfFlashParams)
    assert f"its parameters take {size + 8} bytes, this package's {size}" in status.reason


def test_backward_and_decode_get_their_scratch_memory(load, compiled):
    load(compiled())
    library.run(library.BACKWARD, library.HfFlashParams(), torch.device("cpu"))


@pytest.mark.parametrize("code, error, text", [
    (library.UNSUPPORTED, NotImplementedError, "the text.*head_dim=64.*HF_FLASH_KERNEL"),
    (library.NO_KERNEL_IMAGE, RuntimeError, "the library holds kernels for 80;90a.*HF_FLASH_ARCHS"),
    (209, RuntimeError, "HF_FLASH_ARCHS"),
    (2, torch.OutOfMemoryError, "hf_flash_decode: the text"),
    (700, RuntimeError, r"the text \(code 700\)"),
])  # fmt: skip
def test_error_codes_become_exceptions(load, compiled, code, error, text):
    """Row 46: what a GPU cannot do has a name and a remedy."""
    load(compiled())
    params = library.HfFlashParams(num_splits=code - 1000, head_dim=64)
    with pytest.raises(error, match=text):
        library.run(library.DECODE, params, torch.device("cpu"))


def test_a_kernel_can_be_forced_and_the_choice_is_undone(load, compiled, monkeypatch):
    load(compiled("return p->kernel ? 2000 + p->kernel : 0;"))
    device = torch.device("cpu")
    library.run(library.FORWARD, library.HfFlashParams(), device)
    with library.force_kernel("hopper"), pytest.raises(RuntimeError, match="code 2002"):
        library.run(library.FORWARD, library.HfFlashParams(), device)
    monkeypatch.setenv("HF_FLASH_KERNEL", "portable")
    with pytest.raises(RuntimeError, match="code 2001"):
        library.run(library.FORWARD, library.HfFlashParams(), device)
    with library.force_kernel("auto"):
        library.run(library.FORWARD, library.HfFlashParams(), device)
    monkeypatch.setenv("HF_FLASH_KERNEL", "fast")
    with pytest.raises(ValueError, match="must be one of auto, portable, hopper"):
        library.run(library.FORWARD, library.HfFlashParams(), device)
    with pytest.raises(ValueError, match="fast"), library.force_kernel("fast"):
        pass


def test_what_the_copy_engine_cannot_describe_goes_to_the_portable_kernel(load, compiled):
    load(compiled("return p->kernel == 1 ? 0 : 1003;"))
    library.run(library.FORWARD, library.HfFlashParams(), torch.device("cpu"))
    with library.force_kernel("hopper"), pytest.raises(RuntimeError, match="the text"):
        library.run(library.FORWARD, library.HfFlashParams(), torch.device("cpu"))
