"""What a build has to work with: the CUDA toolkit, the architectures to compile for, cores and memory. No torch."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

DEFAULT_ARCHITECTURES = "8.0;9.0a+PTX"
ARCHITECTURE_NAMES = {"Ampere": "8.0;8.6", "Ada": "8.9", "Hopper": "9.0", "Blackwell": "10.0;12.0"}  # of torch's list
OLDEST_CUDA = (12, 5)  # the first whose runtime finds driver functions by version
MEMORY_PER_JOB = 2 << 30


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


# ---- cores and memory ------------------------------------------------------------------------------------------------


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
