"""The build: architectures, jobs, what ptxas says, build.ninja, and installations that lack something."""

import importlib.util
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
GIB = 1 << 30


def load_setup():
    spec = importlib.util.spec_from_file_location("hf_flash_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


build = load_setup()
Architecture, Toolkit = build.Architecture, build.Toolkit
NEW = Toolkit("nvcc", (13, 0), frozenset({75, 80, 86, 89, 90, 100, 120}))
OLD = Toolkit("nvcc", (12, 0), frozenset({75, 80, 86, 89, 90}))


def names(architectures):
    return ";".join(map(str, architectures))


# ---- architectures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, expected",
    [
        ("8.0;9.0a;10.0;12.0+PTX", "80;90a;100;120+PTX"),
        ("80 90a", "80;90a"),
        ("sm_90a, compute_80", "80;90a"),
        ("9.0;9.0a;8.0+PTX;8.0", "80+PTX;90a"),
        ("Ampere;Hopper", "80;86;90"),
        ("", ""),
    ],
)
def test_architectures_are_read_in_every_usual_spelling(text, expected):
    assert names(build.parse_architectures(text)) == expected


def test_an_architecture_that_is_none_is_named():
    with pytest.raises(SystemExit, match="nine"):
        build.parse_architectures("8.0;nine")


def test_torch_and_visible_gpus_mean_the_hopper_kernels_by_9_0():
    assert names(build.choose_architectures(NEW, {"TORCH_CUDA_ARCH_LIST": "8.0;9.0"}, set)) == "80;90a"
    assert names(build.choose_architectures(NEW, {}, lambda: {90})) == "90a"
    assert names(build.choose_architectures(NEW, {"HF_FLASH_ARCHS": "8.0;9.0"}, lambda: {120})) == "80;90"


def test_without_a_gpu_the_default_runs_on_later_gpus_too():
    chosen = build.choose_architectures(NEW, {}, set)
    assert names(chosen) == "80;90a+PTX"
    assert "-gencode=arch=compute_90,code=[sm_90,compute_90]" in build.gencode(chosen)


def test_what_this_nvcc_does_not_know_is_left_out_aloud(capsys):
    assert names(build.choose_architectures(OLD, {"HF_FLASH_ARCHS": "8.0;12.0"}, set)) == "80+PTX"
    assert "120" in capsys.readouterr().err
    # A GPU newer than nvcc runs the PTX of the default.
    assert names(build.choose_architectures(OLD, {}, lambda: {120})) == "80;90a+PTX"


def test_a_gpu_too_old_for_the_kernels_does_not_stop_the_build(capsys):
    assert names(build.choose_architectures(NEW, {"TORCH_CUDA_ARCH_LIST": "7.5"}, set)) == "80;90a+PTX"
    assert "8.0 or later" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="HF_FLASH_ARCHS"):
        build.choose_architectures(NEW, {"HF_FLASH_ARCHS": "7.5"}, set)


# ---- jobs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cores, memory, max_jobs, expected",
    [(64, 16 * GIB, None, 8), (2, 24 * GIB, None, 2), (64, 512 * GIB, "4", 4), (8, GIB, None, 1), (1, 1, "0", 1)],
)
def test_jobs_are_bounded_by_cores_memory_and_max_jobs(cores, memory, max_jobs, expected):
    assert build.choose_jobs(cores, memory, max_jobs) == expected


def test_the_container_s_limits_count(tmp_path):
    (tmp_path / "unlimited").write_text("max\n")
    (tmp_path / "limit").write_text("17179869184\n")
    assert build.read_number(tmp_path / "missing", tmp_path / "unlimited") is None
    assert build.read_number(tmp_path / "missing", tmp_path / "limit") == 16 * GIB
    assert 0 < build.available_memory() <= 1 << 50
    assert 1 <= build.available_cores() <= os.cpu_count()


# ---- objects and build.ninja -----------------------------------------------------------------------------------------


def test_every_family_is_compiled_once_per_tile_and_hopper_for_9_0a_alone():
    objects, left_out = build.plan_objects(build.parse_architectures("8.0;9.0a"))
    assert not left_out, "a kernel's source is missing"
    by_name = {unit.name: " ".join(unit.options) for unit in objects}
    expected = {f"portable/{s}_{t}" for s in ("forward", "backward", "decode") for t in build.PORTABLE_TILES}
    expected |= {f"hopper/{s}_{t}" for s in ("forward", "backward") for t in build.HOPPER_TILES} | {"api"}
    assert set(by_name) == expected
    assert "compute_80,code=[sm_80]" in by_name["portable/forward_80"]
    assert "compute_90,code=[sm_90]" in by_name["portable/forward_80"]
    assert "-DHF_FLASH_HEAD_DIM=80" in by_name["portable/forward_80"]
    assert "arch=compute_90a,code=sm_90a" in by_name["hopper/backward_256"]
    assert "compute_80" not in by_name["hopper/backward_256"]
    assert '-DHF_FLASH_ARCHITECTURES="80;90a"' in by_name["api"]


def test_without_9_0a_there_are_no_hopper_objects_and_the_api_knows():
    objects, _ = build.plan_objects(build.parse_architectures("8.0;9.0"))
    assert not [unit.name for unit in objects if unit.name.startswith("hopper")]
    assert "-DHF_FLASH_NO_HOPPER" in objects[-1].options


def test_the_tiles_are_those_that_the_api_chooses_from():
    api = (ROOT / "csrc" / "api.cu").read_text()
    for family, tiles in (("PORTABLE", build.PORTABLE_TILES), ("HOPPER", build.HOPPER_TILES)):
        listed = re.search(rf"HF_FLASH_{family}_TILES\(X\)((?: X\(\d+\))+)", api)[1]
        assert tuple(map(int, re.findall(r"\d+", listed))) == tiles


def test_tiles_left_out_get_stubs(tmp_path):
    objects, left_out = build.plan_objects(build.parse_architectures("8.0;9.0a"), {64})
    assert {unit.name.rpartition("_")[2] for unit in objects if unit.name != "api"} == {"64"}
    text = build.write_stubs(left_out, tmp_path).source.read_text()
    assert "int portable_decode<256>(const Params&, cudaStream_t) { return HF_FLASH_UNSUPPORTED; }" in text
    assert "int64_t hopper_backward_workspace<96>(const Params&) { return 0; }" in text
    assert "<64>" not in text


def test_ninja_runs_the_file_and_keeps_each_log(tmp_path):
    """A stand-in for nvcc writes its arguments to the output and a line for the log."""
    ninja = build.find_ninja()
    if ninja is None:
        pytest.skip("ninja is not installed")
    nvcc = tmp_path / "nv cc"
    nvcc.write_text('#!/bin/sh\necho "ptxas said so"\nfor last; do :; done\nprintf "%s\\n" "$@" > "$last"\n')
    nvcc.chmod(0o755)
    objects, _ = build.plan_objects(build.parse_architectures("9.0a"), {64})
    folder = tmp_path / "out put"
    build.write_if_changed(folder / "build.ninja", build.ninja_text(str(nvcc), objects, folder))
    subprocess.run([ninja, "-f", folder / "build.ninja"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    for unit in objects:
        assert (folder / f"{unit.name}.o.log").read_text() == "ptxas said so\n"
    assert '-DHF_FLASH_ARCHITECTURES="90a"' in (folder / "api.o").read_text().splitlines()
    assert "--exclude-libs=ALL" in (folder / build.LIBRARY).read_text()


def test_without_ninja_the_build_says_so_and_goes_on(tmp_path, capsys):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text('#!/bin/sh\necho "1 bytes"\nfor last; do :; done\n: > "$last"\n')
    nvcc.chmod(0o755)
    objects, _ = build.plan_objects(build.parse_architectures("9.0a"), {64})
    build.run_serially(str(nvcc), objects, tmp_path / "out", 2)
    said = capsys.readouterr().err
    assert "ninja is not installed" in said and "2 at a time" in said and f"/{len(objects)}]" in said
    assert (tmp_path / "out" / build.LIBRARY).exists()


def test_a_source_that_does_not_compile_stops_the_build_with_its_output(tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'error: expected a semicolon'\nexit 1\n")
    nvcc.chmod(0o755)
    objects, _ = build.plan_objects(build.parse_architectures("9.0a"), {64})
    with pytest.raises(SystemExit, match="semicolon"):
        build.run_serially(str(nvcc), objects, tmp_path / "out", 2)


# ---- ptxas -----------------------------------------------------------------------------------------------------------

CLEAN = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z14forward_kernelv' for 'sm_90a'
ptxas info    : Function properties for _Z14forward_kernelv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 712 bytes cmem[0]
"""
SPILLS = CLEAN.replace("0 bytes spill stores, 0 bytes spill loads", "12 bytes spill stores, 16 bytes spill loads")
SERIAL = CLEAN + (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    "insufficient register resources for the wgmma pipeline in the function '_Z14forward_kernelv'\n"
)


def test_spills_and_serialised_wgmma_are_found():
    assert build.find_faults("hopper/forward_64", CLEAN) == []
    assert build.find_faults("hopper/forward_64", SPILLS) == [
        "hopper/forward_64: _Z14forward_kernelv spills 12 bytes on sm_90a"
    ]
    (fault,) = build.find_faults("hopper/forward_64", SERIAL)
    assert "C7510" in fault


def test_only_what_the_table_allows_may_spill():
    allowed = {("hopper/forward_64", "forward_kernel"): 12}
    assert build.find_faults("hopper/forward_64", SPILLS, allowed) == []
    assert build.find_faults("hopper/forward_80", SPILLS, allowed)
    assert build.find_faults("hopper/forward_64", SPILLS.replace("12 bytes", "20 bytes"), allowed)


def test_a_fault_fails_the_build_unless_it_is_accepted(tmp_path, capsys):
    unit = build.Object("hopper/forward_64", Path("forward.cu"), ())
    (tmp_path / "hopper").mkdir()
    (tmp_path / "hopper" / "forward_64.o.log").write_text(SERIAL)
    with pytest.raises(SystemExit, match="HF_FLASH_CHECK=0"):
        build.check_logs([unit], tmp_path, {})
    build.check_logs([unit], tmp_path, {"HF_FLASH_CHECK": "0"})
    assert "C7510" in capsys.readouterr().err


@pytest.mark.skipif(build.find_toolkit({"PATH": os.environ["PATH"]}) is None, reason="no nvcc")
def test_the_parser_reads_what_this_ptxas_writes(tmp_path):
    """A kernel that cannot but spill, compiled by the real nvcc."""
    source = tmp_path / "spill.cu"
    source.write_text(
        "__global__ void __launch_bounds__(1024, 2) greedy_kernel(float* x) {\n  float y[200];\n"
        "#pragma unroll\n  for (int i = 0; i < 200; ++i) y[i] = x[i * 7];\n  __syncthreads();\n"
        "#pragma unroll\n  for (int i = 0; i < 200; ++i) x[i * 3] = y[i] * y[(i * 31) % 200];\n}\n"
    )
    nvcc = build.find_toolkit().nvcc
    command = [nvcc, "-arch=sm_80", "-Xptxas", "-v", "-c", source, "-o", tmp_path / "spill.o"]
    log = subprocess.run(command, capture_output=True, text=True, check=True)
    (fault,) = build.find_faults("spill", log.stdout + log.stderr)
    assert re.search(r"greedy_kernel\w* spills \d+ bytes on sm_80", fault)


# ---- toolkits --------------------------------------------------------------------------------------------------------


def fake_toolkit(folder, release):
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "Cuda compilation tools, release {release}, V{release}.1"\n'
        '[ "$1" = --list-gpu-arch ] && echo compute_80\nexit 0\n'
    )
    nvcc.chmod(0o755)
    return folder


def test_of_two_toolkits_the_one_used_is_named(tmp_path, capsys):
    first, second = fake_toolkit(tmp_path / "a", "12.6"), fake_toolkit(tmp_path / "b", "12.8")
    environ = {"CUDA_HOME": str(first), "PATH": f"{second / 'bin'}:/bin"}
    assert build.find_toolkit(environ).version == (12, 6)
    said = capsys.readouterr().err
    assert "using CUDA 12.6" in said and "12.8" in said and "CUDA_HOME" in said


def test_a_toolkit_that_is_too_old_is_named_and_passed_over(tmp_path, capsys):
    old, good = fake_toolkit(tmp_path / "old", "11.8"), fake_toolkit(tmp_path / "good", "12.8")
    environ = {"CUDA_HOME": str(old), "PATH": f"{good / 'bin'}:/bin"}
    assert build.find_toolkit(environ).version == (12, 8)
    assert "CUDA 11.8; the kernels need 12.5" in capsys.readouterr().err


def test_a_wrong_cuda_home_is_named_and_passed_over(tmp_path, capsys):
    good = fake_toolkit(tmp_path / "good", "12.8")
    environ = {"CUDA_HOME": str(tmp_path / "nowhere"), "PATH": f"{good / 'bin'}:/bin"}
    assert build.find_toolkit(environ).version == (12, 8)
    assert "nowhere" in capsys.readouterr().err


# ---- installations ---------------------------------------------------------------------------------------------------


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
    wheel, said = bare_wheel
    lines = [line for line in said.splitlines() if line.startswith("hf_flash:")]
    assert len(lines) == 1 and "no nvcc" in lines[0]
    inside = zipfile.ZipFile(wheel).namelist()
    assert "hf_flash/attention.py" in inside and "hf_flash/patches/llama.py" in inside
    assert not [name for name in inside if name.endswith(".so")]


def test_one_wheel_serves_every_python(bare_wheel):
    assert re.fullmatch(r"hf_flash-[\d.]+-py3-none-linux_\w+\.whl", bare_wheel[0].name)


def test_the_installed_wheel_works_without_kernels(bare_wheel, tmp_path):
    zipfile.ZipFile(bare_wheel[0]).extractall(tmp_path)
    code = (
        "import torch, hf_flash, hf_flash.patches; from hf_flash import library\n"
        "q = torch.randn(1, 5, 2, 8)\n"
        "print(hf_flash.__file__, tuple(hf_flash.flash_attn_func(q, q, q).shape), library.status().remedy)"
    )
    # -S -E keeps an editable installation's finder out; the environment's packages are put back by hand.
    packages = [path for path in sys.path if path.endswith("site-packages")]
    header = f"import sys; sys.path += {json.dumps(packages)}\n"
    done = run(header + code, tmp_path, ("-S",))
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout and "(1, 5, 2, 8)" in done.stdout and "nvcc" in done.stdout


def test_a_kept_library_is_packed_and_no_build_runs(tree, tmp_path):
    source = tmp_path / "tree"
    shutil.copytree(tree, source)
    (source / "hf_flash" / build.LIBRARY).write_bytes(b"kept")
    code = NO_TORCH + f"build_meta.build_wheel({str(tmp_path)!r})"
    done = run(code, source, HF_FLASH_BUILD="0")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        assert wheel.read(f"hf_flash/{build.LIBRARY}") == b"kept"
    assert "hf_flash: compiling" not in done.stderr


def test_a_source_distribution_has_everything_that_a_build_reads(tree, tmp_path):
    source = tmp_path / "tree"
    shutil.copytree(tree, source)
    (source / "hf_flash" / build.LIBRARY).write_bytes(b"built here")
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
    objects, _ = build.plan_objects(build.parse_architectures("8.0;9.0a"), {64})
    assert "torch" not in build.ninja_text("nvcc", objects, Path("out")).replace(str(ROOT), "")


def test_a_corrupt_library_does_not_break_the_import(tmp_path):
    broken = tmp_path / "libhf_flash.so"
    broken.write_bytes(b"not a library")
    code = (
        "import torch, hf_flash; from hf_flash import library; s = library.status(); print(s.available, s.remedy)\n"
        "q = torch.randn(1, 3, 1, 8); print(hf_flash.flash_attn_func(q, q, q).isfinite().all().item())"
    )
    done = run(code, tmp_path, HF_FLASH_LIBRARY=str(broken))
    assert done.returncode == 0, done.stderr
    assert "False rebuild it" in done.stdout and done.stdout.endswith("True\n")
