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

import ctypes
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
LIBRARY = "libhf_flash.so"

# Family -> its head-dim tiles and sources. Every pair is one object; api.cu lists the same tiles.
PORTABLE_TILES = (32, 64, 80, 96, 128, 160, 192, 256)
HOPPER_TILES = (64, 80, 96, 128, 192, 256)
KERNELS = {
    "portable": (PORTABLE_TILES, ("forward", "backward", "decode")),
    "hopper": (HOPPER_TILES, ("forward", "backward")),
}

# (object, part of the kernel's name) -> bytes of spill stores accepted. Empty: every kernel is a hot one.
ALLOWED_SPILLS: dict[tuple[str, str], int] = {}

DEFAULT_ARCHITECTURES = "8.0;9.0a+PTX"
ARCHITECTURE_NAMES = {"Ampere": "8.0;8.6", "Ada": "8.9", "Hopper": "9.0", "Blackwell": "10.0;12.0"}  # of torch's list
FLAGS = (
    "-std=c++17 -O3 --expt-relaxed-constexpr --expt-extended-lambda -Xfatbin=-compress-all -Xptxas -v -cudart static "
    "-Xcompiler -fPIC"
).split()
MEMORY_PER_JOB = 2 << 30
OLDEST_CUDA = (12, 5)  # the first whose runtime finds driver functions by version


class BuildError(SystemExit):
    """Ends the build with one message and no traceback."""


def say(message):
    print(f"hf_flash: {message}", file=sys.stderr, flush=True)


# ---- toolkit ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Toolkit:
    nvcc: str
    version: tuple[int, int]
    capabilities: frozenset[int]  # 80, 90, 120, ...: what this nvcc compiles for


def nvcc_candidates(environ):
    """Paths of nvcc in order of preference, with a word for where each was found."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if environ.get(variable):
            yield variable, Path(environ[variable], "bin", "nvcc")
    found = shutil.which("nvcc", path=environ.get("PATH", os.defpath))
    if found:
        yield "PATH", Path(found)
    yield "/usr/local/cuda", Path("/usr/local/cuda/bin/nvcc")


def ask_nvcc(nvcc, option):
    try:
        return subprocess.run([str(nvcc), option], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def find_toolkit(environ=os.environ):
    """The first nvcc that runs, or None. Says which one was used where there is a choice, or CUDA_HOME is wrong."""
    chosen, others = None, []
    for place, nvcc in nvcc_candidates(environ):
        match = re.search(r"release (\d+)\.(\d+)", ask_nvcc(nvcc, "--version"))
        if not match:
            if place.startswith("CUDA_"):
                say(f"{place}={environ[place]} has no bin/nvcc that runs; looking further")
            continue
        version = int(match[1]), int(match[2])
        if version < OLDEST_CUDA:
            say(f"{nvcc} is CUDA {match[1]}.{match[2]}; the kernels need {OLDEST_CUDA[0]}.{OLDEST_CUDA[1]} or later")
        elif chosen is None:
            listed = re.findall(r"compute_(\d+)", ask_nvcc(nvcc, "--list-gpu-arch"))
            chosen = Toolkit(str(nvcc), version, frozenset(map(int, listed)))
        elif version != chosen.version:
            others.append(f"{version[0]}.{version[1]} ({nvcc})")
    if others:
        used = f"CUDA {chosen.version[0]}.{chosen.version[1]} ({chosen.nvcc})"
        say(f"several toolkits: using {used}, not {', '.join(others)}; set CUDA_HOME to choose")
    return chosen


# ---- architectures ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Architecture:
    capability: int  # 10 * major + minor
    suffix: str = ""  # "a": the instructions of this GPU alone
    ptx: bool = False  # also carry PTX, which the driver compiles for later GPUs

    def __str__(self):
        return f"{self.capability}{self.suffix}{'+PTX' if self.ptx else ''}"


def parse_architectures(text):
    """ "8.0;9.0a+PTX", "80 90a" or torch's names ("Ampere Hopper") -> sorted Architectures, without repeats."""
    for name, capabilities in ARCHITECTURE_NAMES.items():
        text = re.sub(rf"\b{name}\b", capabilities, text, flags=re.IGNORECASE)
    found = {}
    for word in filter(None, re.split(r"[;,\s]+", text)):
        match = re.fullmatch(r"(?:sm_|compute_)?(\d+?)\.?(\d)([af]?)(\+PTX)?", word, flags=re.IGNORECASE)
        if not match:
            raise BuildError(f'hf_flash: "{word}" is no architecture; HF_FLASH_ARCHS is like "8.0;9.0a;12.0+PTX"')
        capability, suffix, ptx = int(match[1] + match[2]), match[3].lower(), bool(match[4])
        earlier = found.get(capability, Architecture(capability))
        found[capability] = Architecture(capability, suffix or earlier.suffix, ptx or earlier.ptx)
    return sorted(found.values())


def visible_capabilities():
    """Compute capabilities of the GPUs this process may use, asked from the driver, else from nvidia-smi; no torch."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        count, found = ctypes.c_int(), set()
        if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
            return set()
        for device in range(count.value):
            major, minor = ctypes.c_int(), ctypes.c_int()
            cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # COMPUTE_CAPABILITY_MAJOR
            cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)  # COMPUTE_CAPABILITY_MINOR
            found.add(10 * major.value + minor.value)
        return found
    except (OSError, AttributeError):
        pass
    try:
        command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        out = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return {10 * int(major) + int(minor) for major, minor in re.findall(r"^(\d+)\.(\d)\s*$", out, flags=re.M)}
    except (OSError, subprocess.SubprocessError):
        return set()


def choose_architectures(toolkit, environ=os.environ, visible=visible_capabilities):
    """What to compile for, limited to what the kernels (8.0 and later) and this nvcc support."""
    source = "HF_FLASH_ARCHS"
    wanted = parse_architectures(environ.get(source, ""))
    if not wanted:
        # Whoever writes 9.0 for torch, or has such a GPU, wants the kernels written for it.
        source = "TORCH_CUDA_ARCH_LIST"
        wanted = parse_architectures(environ.get(source, ""))
        if not wanted:
            source = "the visible GPUs"
            wanted = sorted(map(Architecture, visible()))
        wanted = [Architecture(90, "a", a.ptx) if a.capability == 90 else a for a in wanted]
    kept = [a for a in wanted if a.capability >= 80 and a.capability in toolkit.capabilities]
    for a in wanted:
        if a not in kept:
            reason = "the kernels need 8.0 or later" if a.capability < 80 else "this nvcc does not know it"
            say(f"leaving out architecture {a} of {source}: {reason}")
    if kept:
        # A GPU newer than nvcc runs the PTX of the newest architecture that nvcc knows.
        if any(a.capability > max(toolkit.capabilities) for a in wanted):
            kept[-1] = Architecture(kept[-1].capability, kept[-1].suffix, ptx=True)
        return kept
    if source == "HF_FLASH_ARCHS" and wanted:
        raise BuildError("hf_flash: no architecture of HF_FLASH_ARCHS can be compiled")
    kept = [a for a in parse_architectures(DEFAULT_ARCHITECTURES) if a.capability in toolkit.capabilities]
    if not kept:
        raise BuildError(f"hf_flash: {toolkit.nvcc} compiles for neither 8.0 nor 9.0")
    return kept


def gencode(architectures):
    """nvcc's options for code that runs on all of these. PTX of 9.0a would run on 9.0 alone, so 9.0's is kept."""
    options = []
    for a in architectures:
        codes = [f"sm_{a.capability}"] + ([f"compute_{a.capability}"] if a.ptx else [])
        options.append(f"-gencode=arch=compute_{a.capability},code=[{','.join(codes)}]")
    return options


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


def read_number(*paths):
    """The first of these cgroup files that holds a number, or None."""
    for path in paths:
        try:
            return int(Path(path).read_text().split()[0])
        except (OSError, ValueError, IndexError):
            continue
    return None


def available_memory():
    """Bytes this process may use: the machine's free memory or the container's limit, whichever is less."""
    limits = [read_number("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    try:
        match = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
        limits.append(int(match[1]) << 10)
    except (OSError, TypeError):
        pass
    return min((n for n in limits if n), default=MEMORY_PER_JOB)


def available_cores():
    """Cores this process may run on: its affinity, or the container's quota where that is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def choose_jobs(cores, memory, max_jobs=None):
    """Parallel compilations: one a core, one per 2 GB of memory, at most MAX_JOBS, at least one."""
    jobs = min(cores, memory // MEMORY_PER_JOB)
    if max_jobs:
        jobs = min(jobs, int(max_jobs))
    return max(1, int(jobs))


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


def find_faults(name, log, allowed=None):
    """Lines of one object's compiler output that mean a slow kernel: C75xx notes (wgmma serialised) and spills."""
    allowed = ALLOWED_SPILLS if allowed is None else allowed
    faults, function, target = [], "?", ""
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '([\w$.]+)' for '(\w+)'", line):
            target = entry[2]
        if entry := re.search(r"Function properties for ([\w$.]+)", line):
            function = entry[1]
        if re.search(r"\bC75\d\d\b", line):
            faults.append(f"{name}: {line.strip()}")
        spill = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if spill and (int(spill[1]) or int(spill[2])):
            limits = [size for (unit, part), size in allowed.items() if unit == name and part in function]
            if int(spill[1]) > max(limits, default=0):
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
