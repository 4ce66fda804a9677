"""Compiles csrc/ with nvcc into one plain shared library, hf_flash/libhf_flash.so. Needs neither torch nor a GPU.

Environment:
    HF_FLASH_ARCHS    compute capabilities, e.g. "8.0;9.0a;12.0+PTX"; "9.0a" adds the Hopper kernels, "9.0" does not.
                      Unset: TORCH_CUDA_ARCH_LIST, else the visible GPUs, else 8.0 and 9.0a with PTX for later GPUs.
    HF_FLASH_TILES    head-dim tiles to compile, e.g. "64;128"; the others answer "not served". For quick turn-around.
    HF_FLASH_BUILD=0  compile nothing and keep a library that is already there.
    HF_FLASH_CHECK=0  accept register spills and serialised wgmma instead of failing.
    MAX_JOBS          upper bound of parallel compilations.
    CUDA_HOME         the toolkit; else nvcc on PATH, else /usr/local/cuda.
"""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc"))  # build front ends run this file from anywhere
from toolchain import (  # noqa: E402
    BuildError,
    available_cores,
    available_memory,
    choose_architectures,
    choose_jobs,
    find_toolkit,
    gencode,
    say,
)

LIBRARY = "libhf_flash.so"

# Family -> its head-dim tiles and sources. Every pair is one object; api.cu lists the same tiles.
PORTABLE_TILES = (32, 64, 80, 96, 128, 160, 192, 256)
HOPPER_TILES = (64, 80, 96, 128, 192, 256)
KERNELS = {
    "portable": (PORTABLE_TILES, ("forward", "backward", "decode")),
    "hopper": (HOPPER_TILES, ("forward", "backward")),
}

# Target -> bytes of spills accepted; elsewhere none. Here ptxas parks a value or two across a kernel's main loop, with
# one store before it and one load after it.
ALLOWED_SPILLS = {"sm_100": 8, "sm_120": 8}

FLAGS = (
    "-std=c++17 -O3 --expt-relaxed-constexpr --expt-extended-lambda -Xfatbin=-compress-all -Xptxas -v -cudart static "
    "-Xcompiler -fPIC"
).split()


# ---- objects and ninja -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Object:
    name: str  # "portable/forward_64"
    source: Path
    options: tuple[str, ...]

    @property
    def description(self):
        return re.sub(r"/(\w+)_(\d+)", r" \1, head dim \2", self.name)


def plan_objects(architectures, tiles=None):
    """Every object of the library, those that take longest first; tiles: the head dims to compile, or None for all."""
    hopper = any(str(a).startswith("90a") for a in architectures)
    options = gencode(architectures)
    objects, left_out = [], []
    for family, (family_tiles, sources) in KERNELS.items():
        if family == "hopper" and not hopper:
            continue
        target = ["-gencode=arch=compute_90a,code=sm_90a"] if family == "hopper" else options
        for tile in family_tiles:
            for stage in sources:
                source = ROOT / "csrc" / family / f"{stage}.cu"
                unit = Object(f"{family}/{stage}_{tile}", source, (*target, f"-DHF_FLASH_HEAD_DIM={tile}"))
                left_out.append(unit) if (tiles and tile not in tiles) or not source.exists() else objects.append(unit)
    objects.sort(key=lambda unit: ("backward" not in unit.name, -int(unit.name.rpartition("_")[2]), unit.name))
    names = ";".join(map(str, architectures))
    api = [*options, f'-DHF_FLASH_ARCHITECTURES="{names}"'] + ([] if hopper else ["-DHF_FLASH_NO_HOPPER"])
    objects.append(Object("api", ROOT / "csrc" / "api.cu", tuple(api)))
    return objects, left_out


STUBS = {
    "forward": {"int {}_forward<{}>(const Params&, cudaStream_t)": "HF_FLASH_UNSUPPORTED"},
    "backward": {
        "int {}_backward<{}>(const Params&, cudaStream_t)": "HF_FLASH_UNSUPPORTED",
        "int64_t {}_backward_workspace<{}>(const Params&)": "0",
    },
    "decode": {
        "int {}_decode<{}>(const Params&, cudaStream_t)": "HF_FLASH_UNSUPPORTED",
        "int64_t {}_decode_workspace<{}>(const Params&)": "0",
    },
}


def write_stubs(left_out, build):
    """One object that stands in for those left out, so that the library loads and says "not served" for their tiles."""
    lines = ['#include "launch.cuh"', "namespace hf_flash {"]
    for unit in left_out:
        family, _, rest = unit.name.partition("/")
        stage, _, tile = rest.partition("_")
        for signature, answer in STUBS[stage].items():
            lines.append(f"template <> {signature.format(family, tile)} {{ return {answer}; }}")
    path = build / "left_out.cu"
    write_if_changed(path, "\n".join([*lines, "}  // namespace hf_flash", ""]))
    return Object("left_out", path, ())


def write_if_changed(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def compile_command(nvcc, unit, build):
    output = build / f"{unit.name}.o"
    files = ["-I", str(ROOT / "csrc"), "-MD", "-MF", f"{output}.d", "-c", str(unit.source), "-o", str(output)]
    return [nvcc, *FLAGS, *unit.options, *files]


def link_command(nvcc, objects, build):
    inputs = [str(build / f"{unit.name}.o") for unit in objects]
    # The CUDA runtime inside stays private: torch brings one of its own into the process.
    private = ["-Xlinker", "--exclude-libs=ALL", "-Xlinker", "-Bsymbolic"]
    return [nvcc, "-shared", "-cudart", "static", *private, *inputs, "-o", str(build / LIBRARY)]


def shell_quote(words):
    return " ".join(w if re.fullmatch(r"[\w@%+=:,./-]+", w) else "'" + w.replace("'", "'\\''") + "'" for w in words)


def ninja_text(nvcc, objects, build):
    """build.ninja: each object's compiler output is kept beside it as <object>.log, where check_logs reads it."""

    def path(p):
        return re.sub(r"([ :$])", r"$\1", str(p))

    lines = [
        "rule compile",
        "  command = $line > $out.log 2>&1 || { cat $out.log; rm -f $out; exit 1; }",
        "  description = $what",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        "  command = $line",
        "  description = link " + LIBRARY,
        "",
    ]
    for unit in objects:
        lines += [
            f"build {path(build / unit.name)}.o: compile {path(unit.source)}",
            f"  what = {unit.description}",
            "  line = " + shell_quote(compile_command(nvcc, unit, build)).replace("$", "$$"),
        ]
    inputs = " ".join(f"{path(build / unit.name)}.o" for unit in objects)
    lines += [f"build {path(build / LIBRARY)}: link {inputs}"]
    lines += ["  line = " + shell_quote(link_command(nvcc, objects, build)).replace("$", "$$"), ""]
    return "\n".join(lines)


def find_ninja():
    found = shutil.which("ninja")
    if found:
        return found
    try:
        import ninja
    except ImportError:
        return None
    return str(Path(ninja.BIN_DIR, "ninja"))


def run_serially(nvcc, objects, build, jobs):
    """What ninja would do, without knowing what is up to date."""
    say(f"ninja is not installed (pip install ninja): compiling everything afresh, {jobs} at a time")

    def compile_one(unit):
        output = build / f"{unit.name}.o"
        output.parent.mkdir(parents=True, exist_ok=True)
        command = compile_command(nvcc, unit, build)
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        Path(f"{output}.log").write_text(done.stdout)
        return unit, done

    with ThreadPoolExecutor(jobs) as pool:
        for number, (unit, done) in enumerate(pool.map(compile_one, objects), 1):
            say(f"[{number}/{len(objects)}] {unit.description}")
            if done.returncode:
                pool.shutdown(cancel_futures=True)
                raise BuildError(f"{done.stdout}\nhf_flash: {unit.description} does not compile")
    subprocess.run(link_command(nvcc, objects, build), check=True)


# ---- what ptxas says -------------------------------------------------------------------------------------------------


def find_faults(name, log):
    """Lines of one object's compiler output that mean a slow kernel: C75xx notes (wgmma serialised) and spills."""
    faults, function, target = [], "?", ""
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '([\w$.]+)' for '(\w+)'", line):
            target = entry[2]
        if entry := re.search(r"Function properties for ([\w$.]+)", line):
            function = entry[1]
        if re.search(r"\bC75\d\d\b", line):
            faults.append(f"{name}: {line.strip()}")
        spill = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if spill and max(int(spill[1]), int(spill[2])) > ALLOWED_SPILLS.get(target, 0):
            faults.append(f"{name}: {function} spills {spill[1]} bytes on {target}")
    return faults


def check_logs(objects, build, environ=os.environ):
    faults = [
        fault
        for unit in objects
        if (log := build / f"{unit.name}.o.log").exists()
        for fault in find_faults(unit.name, log.read_text())
    ]
    if not faults:
        return
    for fault in faults:
        say(fault)
    if environ.get("HF_FLASH_CHECK") == "0":
        return say(f"{len(faults)} notes of ptxas accepted, as HF_FLASH_CHECK=0 says")
    raise BuildError(
        f"hf_flash: ptxas wrote {len(faults)} kernels slower than they should be (above); HF_FLASH_CHECK=0 accepts them"
    )


def build_library(environ=os.environ):
    """Compiles and links build/kernels/libhf_flash.so and returns its path, or None where there is no nvcc."""
    toolkit = find_toolkit(environ)
    if toolkit is None:
        say("no nvcc found: installing without kernels, for the CPU; install CUDA's toolkit (12.5+) and reinstall")
        return None
    architectures = choose_architectures(toolkit, environ)
    tiles = set(map(int, re.findall(r"\d+", environ.get("HF_FLASH_TILES", ""))))
    build = ROOT / "build" / "kernels"
    objects, left_out = plan_objects(architectures, tiles)
    if left_out:
        missing = sorted({str(u.source.relative_to(ROOT)) for u in left_out if not u.source.exists()})
        say(f"leaving out {len(left_out)} objects" + (f"; not there: {', '.join(missing)}" if missing else ""))
        objects.append(write_stubs(left_out, build))
    jobs = choose_jobs(available_cores(), available_memory(), environ.get("MAX_JOBS"))
    release = ".".join(map(str, toolkit.version))
    names = ";".join(map(str, architectures))
    say(f"compiling {len(objects)} objects for {names} with CUDA {release} ({toolkit.nvcc}), {jobs} at a time")
    write_if_changed(build / "build.ninja", ninja_text(toolkit.nvcc, objects, build))
    ninja = find_ninja()
    if ninja:
        done = subprocess.run([ninja, "-f", str(build / "build.ninja"), "-j", str(jobs)], cwd=build)
        if done.returncode:
            raise BuildError("hf_flash: the kernels do not compile (see above)")
    else:
        run_serially(toolkit.nvcc, objects, build, jobs)
    check_logs(objects, build, environ)
    return build / LIBRARY


# ---- setuptools ------------------------------------------------------------------------------------------------------


class BuildKernels(build_ext):
    def get_ext_filename(self, name):
        return name.replace(".", "/") + ".so"  # a plain library: no Python tag

    def build_extension(self, extension):
        target = Path(self.get_ext_fullpath(extension.name))
        skip = os.environ.get("HF_FLASH_BUILD") == "0"
        library = ROOT / "hf_flash" / LIBRARY if skip else build_library()
        if library is None or not library.exists() or library == target.resolve():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        # A new file, not new contents: a process that has the old one mapped keeps it.
        shutil.copy2(library, f"{target}.new")
        os.replace(f"{target}.new", target)


class AnyPython(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]  # a C ABI: one wheel for every Python and every torch


if __name__ == "__main__":
    if sys.platform != "linux":
        raise BuildError(f"hf_flash: Linux only; {sys.platform} is not supported")
    setup(
        packages=["hf_flash", "hf_flash.patches"],
        package_dir={"hf_flash.patches": "patches"},
        package_data={"hf_flash": ["py.typed"]},
        # optional: an installation without nvcc has no library, and that is no error
        ext_modules=[Extension("hf_flash.libhf_flash", ["csrc/api.cu"], optional=True)],
        cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPython},
    )
