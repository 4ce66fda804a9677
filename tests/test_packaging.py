"""Installations: what a wheel and a source distribution hold, and what works where something is missing."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "libhf_flash.so"


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of what a build reads, without what was built here."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("hf_flash", "patches", "csrc"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def run(code, cwd, python_options=(), **environ):
    command = [sys.executable, *python_options, "-c", code]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**os.environ, **environ})


NO_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"no module named {name}")
sys.meta_path.insert(0, Refuse())
from setuptools import build_meta
"""


def test_metadata_is_made_without_torch(tree, tmp_path):
    """Row 93."""
    code = NO_TORCH + f"print(build_meta.prepare_metadata_for_build_wheel({str(tmp_path)!r}))"
    done = run(code, tree)
    assert done.returncode == 0, done.stderr
    metadata = next(tmp_path.glob("*.dist-info/METADATA")).read_text()
    assert "Requires-Dist: torch>=2.6\n" in metadata
    assert "Requires-Python: >=3.10" in metadata
    assert re.search(r'Requires-Dist: transformers>=4.57; extra == "hf"', metadata)


@pytest.fixture(scope="module")
def bare_wheel(tree, tmp_path_factory):
    """A wheel built where there is neither nvcc nor torch: (path, what the build said)."""
    folder = tmp_path_factory.mktemp("wheel")
    code = (
        NO_TORCH
        + f"""
import shutil
which = shutil.which
shutil.which = lambda name, *a, **k: None if name == "nvcc" else which(name, *a, **k)
import pathlib
run = __import__("subprocess").run
def no_nvcc(command, *a, **k):
    if str(command[0]).endswith("nvcc"):
        raise FileNotFoundError(command[0])
    return run(command, *a, **k)
__import__("subprocess").run = no_nvcc
print(build_meta.build_wheel({str(folder)!r}))
"""
    )
    done = run(code, tree, CUDA_HOME="", CUDA_PATH="")
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl")), done.stderr


def test_without_nvcc_the_package_is_built_without_kernels_in_one_line(bare_wheel):
    """Row 98."""
    wheel, said = bare_wheel
    lines = [line for line in said.splitlines() if line.startswith("hf_flash:")]
    assert len(lines) == 1 and "no nvcc" in lines[0]
    inside = zipfile.ZipFile(wheel).namelist()
    assert "hf_flash/attention.py" in inside and "hf_flash/patches/llama.py" in inside
    assert not [name for name in inside if name.endswith(".so")]


def test_one_wheel_serves_every_python(bare_wheel):
    assert re.fullmatch(r"hf_flash-[\d.]+-py3-none-linux_\w+\.whl", bare_wheel[0].name)


def test_the_installed_wheel_works_without_kernels_and_transformers(bare_wheel, tmp_path):
    zipfile.ZipFile(bare_wheel[0]).extractall(tmp_path)
    code = (
        "import torch, hf_flash, hf_flash.patches; from hf_flash import library\n"
        "q = torch.randn(1, 5, 2, 8)\n"
        "print(hf_flash.__file__, tuple(hf_flash.flash_attn_func(q, q, q).shape), library.status().remedy)"
    )
    # -S -E keeps an editable installation's finder out; the environment's packages are put back by hand.
    packages = [path for path in sys.path if path.endswith("site-packages")]
    header = f"import sys; sys.path += {json.dumps(packages)}; sys.modules['transformers'] = None\n"
    done = run(header + code, tmp_path, ("-S",))
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout and "(1, 5, 2, 8)" in done.stdout and "nvcc" in done.stdout


def test_a_kept_library_is_packed_and_no_build_runs(tree, tmp_path):
    source = tmp_path / "tree"
    shutil.copytree(tree, source)
    (source / "hf_flash" / LIBRARY).write_bytes(b"kept")
    code = NO_TORCH + f"build_meta.build_wheel({str(tmp_path)!r})"
    done = run(code, source, HF_FLASH_BUILD="0")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        assert wheel.read(f"hf_flash/{LIBRARY}") == b"kept"
    assert "hf_flash: compiling" not in done.stderr


def test_a_source_distribution_has_everything_that_a_build_reads(tree, tmp_path):
    source = tmp_path / "tree"
    shutil.copytree(tree, source)
    (source / "hf_flash" / LIBRARY).write_bytes(b"built here")
    done = run(NO_TORCH + f"build_meta.build_sdist({str(tmp_path)!r})", source)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    read = {
        p.relative_to(tree).as_posix() for p in tree.rglob("*") if p.suffix in (".cu", ".cuh", ".h", ".py", ".toml")
    }
    built = {name for name in read if name.startswith("build/")}  # by other tests, in the same tree
    assert read - built - inside == set()
    assert not [name for name in inside if name.endswith(".so")]


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_other_systems_are_told_in_one_line_before_anything_runs(platform, tree):
    """Row 100."""
    code = (
        "import setuptools.command.build_ext, sys, runpy\n"
        f"sys.platform, sys.argv = {platform!r}, ['setup.py', 'build_ext']\n"
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    done = run(code, tree)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == f"hf_flash: Linux only; {platform} is not supported"
    assert "Traceback" not in done.stderr


def test_the_library_includes_nothing_of_torch_so_that_none_of_its_versions_can_break_it():
    """Row 96: what crosses the boundary is C, and the build gets no path to torch."""
    included = {
        name
        for source in (ROOT / "csrc").rglob("*.*")
        if source.suffix in (".cu", ".cuh", ".h")
        for name in re.findall(r'#include [<"]([^>"]+)[>"]', source.read_text())
    }
    assert "hf_flash.h" in {Path(name).name for name in included}
    assert not [name for name in included if name.split("/")[0].lower() in ("torch", "aten", "c10", "pybind11")]
