"""The build: architectures, jobs, what ptxas says, build.ninja."""

import importlib.util
import os
import re
import subprocess
import sys
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
import toolchain  # noqa: E402, which setup.py has put on the path
from toolchain import Toolkit, parse_architectures  # noqa: E402

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
    assert names(parse_architectures(text)) == expected


def test_an_architecture_that_is_none_is_named():
    with pytest.raises(SystemExit, match="nine"):
        parse_architectures("8.0;nine")


def test_torch_and_visible_gpus_mean_the_hopper_kernels_by_9_0():
    """Row 98."""
    assert names(toolchain.choose_architectures(NEW, {"TORCH_CUDA_ARCH_LIST": "8.0;9.0"}, set)) == "80;90a"
    assert names(toolchain.choose_architectures(NEW, {}, lambda: {90})) == "90a"
    assert names(toolchain.choose_architectures(NEW, {"HF_FLASH_ARCHS": "8.0;9.0"}, lambda: {120})) == "80;90"


def test_without_a_gpu_the_default_runs_on_later_gpus_too():
    """Row 98."""
    chosen = toolchain.choose_architectures(NEW, {}, set)
    assert names(chosen) == "80;90a+PTX"
    assert "-gencode=arch=compute_90,code=[sm_90,compute_90]" in toolchain.gencode(chosen)


def test_what_this_nvcc_does_not_know_is_left_out_aloud(capsys):
    """Row 98."""
    assert names(toolchain.choose_architectures(OLD, {"HF_FLASH_ARCHS": "8.0;12.0"}, set)) == "80+PTX"
    assert "120" in capsys.readouterr().err
    # A GPU newer than nvcc runs the PTX of the default.
    assert names(toolchain.choose_architectures(OLD, {}, lambda: {120})) == "80;90a+PTX"


def test_a_gpu_too_old_for_the_kernels_does_not_stop_the_build(capsys):
    assert names(toolchain.choose_architectures(NEW, {"TORCH_CUDA_ARCH_LIST": "7.5"}, set)) == "80;90a+PTX"
    assert "8.0 or later" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="HF_FLASH_ARCHS"):
        toolchain.choose_architectures(NEW, {"HF_FLASH_ARCHS": "7.5"}, set)


# ---- jobs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cores, memory, max_jobs, expected",
    [(64, 16 * GIB, None, 8), (2, 24 * GIB, None, 2), (64, 512 * GIB, "4", 4), (8, GIB, None, 1), (1, 1, "0", 1)],
)
def test_jobs_are_bounded_by_cores_memory_and_max_jobs(cores, memory, max_jobs, expected):
    """Row 95."""
    assert toolchain.choose_jobs(cores, memory, max_jobs) == expected


def test_the_container_s_limits_count(tmp_path):
    """Row 95."""
    (tmp_path / "unlimited").write_text("max\n")
    (tmp_path / "limit").write_text("17179869184\n")
    assert toolchain.read_number(tmp_path / "missing", tmp_path / "unlimited") is None
    assert toolchain.read_number(tmp_path / "missing", tmp_path / "limit") == 16 * GIB
    assert 0 < toolchain.available_memory() <= 1 << 50
    assert 1 <= toolchain.available_cores() <= os.cpu_count()


# ---- objects and build.ninja -----------------------------------------------------------------------------------------


def test_every_family_is_compiled_once_per_tile_and_hopper_for_9_0a_alone():
    objects, left_out = build.plan_objects(parse_architectures("8.0;9.0a"))
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
    objects, _ = build.plan_objects(parse_architectures("8.0;9.0"))
    assert not [unit.name for unit in objects if unit.name.startswith("hopper")]
    assert "-DHF_FLASH_NO_HOPPER" in objects[-1].options


def test_the_tiles_are_those_that_the_api_chooses_from():
    api = (ROOT / "csrc" / "api.cu").read_text()
    for family, tiles in (("PORTABLE", build.PORTABLE_TILES), ("HOPPER", build.HOPPER_TILES)):
        listed = re.search(rf"HF_FLASH_{family}_TILES\(X\)((?: X\(\d+\))+)", api)[1]
        assert tuple(map(int, re.findall(r"\d+", listed))) == tiles


def test_tiles_left_out_get_stubs(tmp_path):
    objects, left_out = build.plan_objects(parse_architectures("8.0;9.0a"), {64})
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
    objects, _ = build.plan_objects(parse_architectures("9.0a"), {64})
    folder = tmp_path / "out put"
    build.write_if_changed(folder / "build.ninja", build.ninja_text(str(nvcc), objects, folder))
    subprocess.run([ninja, "-f", folder / "build.ninja"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    for unit in objects:
        assert (folder / f"{unit.name}.o.log").read_text() == "ptxas said so\n"
    assert '-DHF_FLASH_ARCHITECTURES="90a"' in (folder / "api.o").read_text().splitlines()
    assert "--exclude-libs=ALL" in (folder / build.LIBRARY).read_text()


def test_without_ninja_the_build_says_so_and_goes_on(tmp_path, capsys):
    """Row 94."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text('#!/bin/sh\necho "1 bytes"\nfor last; do :; done\n: > "$last"\n')
    nvcc.chmod(0o755)
    objects, _ = build.plan_objects(parse_architectures("9.0a"), {64})
    build.run_serially(str(nvcc), objects, tmp_path / "out", 2)
    said = capsys.readouterr().err
    assert "ninja is not installed" in said and "2 at a time" in said and f"/{len(objects)}]" in said
    assert (tmp_path / "out" / build.LIBRARY).exists()


def test_a_source_that_does_not_compile_stops_the_build_with_its_output(tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'error: expected a semicolon'\nexit 1\n")
    nvcc.chmod(0o755)
    objects, _ = build.plan_objects(parse_architectures("9.0a"), {64})
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


def test_a_value_or_two_may_be_parked_on_targets_that_no_kernel_is_written_for():
    there = SPILLS.replace("sm_90a", "sm_120")
    assert (
        build.find_faults("portable/forward_64", there.replace("12 bytes", "8 bytes").replace("16 bytes", "8 bytes"))
        == []
    )
    assert build.find_faults("portable/forward_64", there)


def test_a_fault_fails_the_build_unless_it_is_accepted(tmp_path, capsys):
    unit = build.Object("hopper/forward_64", Path("forward.cu"), ())
    (tmp_path / "hopper").mkdir()
    (tmp_path / "hopper" / "forward_64.o.log").write_text(SERIAL)
    with pytest.raises(SystemExit, match="HF_FLASH_CHECK=0"):
        build.check_logs([unit], tmp_path, {})
    build.check_logs([unit], tmp_path, {"HF_FLASH_CHECK": "0"})
    assert "C7510" in capsys.readouterr().err


@pytest.mark.skipif(toolchain.find_toolkit({"PATH": os.environ["PATH"]}) is None, reason="no nvcc")
def test_the_parser_reads_what_this_ptxas_writes(tmp_path):
    """A kernel that cannot but spill, compiled by the real nvcc."""
    source = tmp_path / "spill.cu"
    source.write_text(
        "__global__ void __launch_bounds__(1024, 2) greedy_kernel(float* x) {\n  float y[200];\n"
        "#pragma unroll\n  for (int i = 0; i < 200; ++i) y[i] = x[i * 7];\n  __syncthreads();\n"
        "#pragma unroll\n  for (int i = 0; i < 200; ++i) x[i * 3] = y[i] * y[(i * 31) % 200];\n}\n"
    )
    nvcc = toolchain.find_toolkit().nvcc
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
    """Row 99."""
    first, second = fake_toolkit(tmp_path / "a", "12.6"), fake_toolkit(tmp_path / "b", "12.8")
    environ = {"CUDA_HOME": str(first), "PATH": f"{second / 'bin'}:/bin"}
    assert toolchain.find_toolkit(environ).version == (12, 6)
    said = capsys.readouterr().err
    assert "using CUDA 12.6" in said and "12.8" in said and "CUDA_HOME" in said


def test_a_toolkit_that_is_too_old_is_named_and_passed_over(tmp_path, capsys):
    old, good = fake_toolkit(tmp_path / "old", "11.8"), fake_toolkit(tmp_path / "good", "12.8")
    environ = {"CUDA_HOME": str(old), "PATH": f"{good / 'bin'}:/bin"}
    assert toolchain.find_toolkit(environ).version == (12, 8)
    assert "CUDA 11.8; the kernels need 12.5" in capsys.readouterr().err


def test_a_wrong_cuda_home_is_named_and_passed_over(tmp_path, capsys):
    """Row 99."""
    good = fake_toolkit(tmp_path / "good", "12.8")
    environ = {"CUDA_HOME": str(tmp_path / "nowhere"), "PATH": f"{good / 'bin'}:/bin"}
    assert toolchain.find_toolkit(environ).version == (12, 8)
    assert "nowhere" in capsys.readouterr().err


def test_the_build_gets_no_path_to_torch():
    """Row 96."""
    objects, _ = build.plan_objects(parse_architectures("8.0;9.0a"), {64})
    assert "torch" not in build.ninja_text("nvcc", objects, Path("out")).replace(str(ROOT), "")
