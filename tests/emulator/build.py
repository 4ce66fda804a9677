"""Compiles csrc/ and the emulator with g++ into a libhf_flash.so whose kernels run on the CPU, in host memory.

    python tests/emulator/build.py [--head-dims 64,128] [--kernels portable/forward,portable/decode]
                                   [--output build/emulated/libhf_flash.so]

Prints the library's path. Compiles what changed, two files at a time; kernels that are not chosen, or not there, answer
HF_FLASH_UNSUPPORTED. The library needs no GPU and no CUDA driver, only CUDA's headers. It reads
HF_FLASH_EMULATED_CAPABILITY (90), HF_FLASH_EMULATED_SM_COUNT (4), HF_FLASH_EMULATED_ORDER and _BLOCKS (fibers.cpp).
"""

import argparse
import fcntl
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "csrc"
DEFAULT_OUTPUT = HERE.parent.parent / "build" / "emulated" / "libhf_flash.so"
RUNTIME = ("fibers", "tensor_core", "copies", "runtime")
KERNELS = ("portable/forward", "portable/backward", "portable/decode", "hopper/forward", "hopper/backward")
# Without all emulated libraries of one process would share what device_facts() keeps of the first.
FLAGS = "-std=c++17 -O2 -march=native -fPIC -fno-gnu-unique -w -DHF_FLASH_EMULATE".split()


def cuda_include():
    """The folder of cuda_bf16.h: CUDA_HOME's, or the usual place."""
    return Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"


def tiles(family):
    """The head-dim tiles that api.cu offers for a family."""
    listed = re.search(rf"HF_FLASH_{family.upper()}_TILES\(X\)(.*)", (CSRC / "api.cu").read_text())
    return [int(tile) for tile in re.findall(r"X\((\d+)\)", listed[1])]


def stub_source(kernel, tile):
    """C++ text that defines a kernel's launchers for one tile as unsupported."""
    family, name = kernel.split("/")
    lines = [f"template <> int {family}_{name}<{tile}>(const Params&, cudaStream_t) {{ return HF_FLASH_UNSUPPORTED; }}"]
    if name != "forward":
        lines.append(f"template <> int64_t {family}_{name}_workspace<{tile}>(const Params&) {{ return 0; }}")
    return "\n".join(lines)


def is_current(target, command):
    """Whether target was made by this command and is newer than all it was made from."""
    record, depends = target.with_suffix(".command"), target.with_suffix(".d")
    if not (target.exists() and record.exists() and depends.exists()) or record.read_text() != " ".join(command):
        return False
    sources = depends.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    return all(Path(s).exists() and Path(s).stat().st_mtime <= target.stat().st_mtime for s in sources)


def compile_object(source, target, defines=()):
    """Compiles one file unless it is current. Returns the compiler's messages, None when all went well."""
    prelude = ["-include", str(HERE / "emulator.h")] if source.suffix == ".cu" else []
    command = ["g++", *FLAGS, *defines, f"-I{HERE}", f"-I{CSRC}", "-isystem", str(cuda_include()), *prelude]
    command += ["-MMD", "-MF", str(target.with_suffix(".d")), "-x", "c++", "-c", str(source), "-o", str(target)]
    if is_current(target, command):
        return None
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        return f"{source} {' '.join(defines)}\n{result.stderr}"
    target.with_suffix(".command").write_text(" ".join(command))
    return None


def build(output=DEFAULT_OUTPUT, head_dims=None, kernels=KERNELS):
    """Builds the library and returns its path. head_dims: the tiles to compile, all when None. Processes take turns."""
    output = Path(output)
    objects = output.parent / (output.stem + "_objects")
    objects.mkdir(parents=True, exist_ok=True)
    with (objects / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build(output, objects, head_dims, kernels)


def _build(output, objects, head_dims, kernels):
    jobs = [(HERE / f"{name}.cpp", objects / f"{name}.o", ()) for name in RUNTIME]
    jobs.append((CSRC / "api.cu", objects / "api.o", ('-DHF_FLASH_ARCHITECTURES="emulated"',)))
    stubs = ['#include "launch.cuh"', "namespace hf_flash {"]
    for kernel in KERNELS:
        source = CSRC / f"{kernel}.cu"
        for tile in tiles(kernel.split("/")[0]):
            if source.exists() and kernel in kernels and (head_dims is None or tile in head_dims):
                target = objects / f"{kernel.replace('/', '_')}_{tile}.o"
                jobs.append((source, target, (f"-DHF_FLASH_HEAD_DIM={tile}",)))
            else:
                stubs.append(stub_source(kernel, tile))
    stub_file, text = objects / "stubs.cu", "\n".join([*stubs, "}", ""])
    if not stub_file.exists() or stub_file.read_text() != text:
        stub_file.write_text(text)
    jobs.append((stub_file, objects / "stubs.o", ()))
    with ThreadPoolExecutor(2) as pool:
        errors = [e for e in pool.map(lambda job: compile_object(*job), jobs) if e]
    if errors:
        raise RuntimeError("\n".join(errors))
    targets = [target for _, target, _ in jobs]
    newest = max(target.stat().st_mtime for target in targets)
    listing, record = "\n".join(map(str, targets)), output.with_suffix(".link")
    if not output.exists() or output.stat().st_mtime < newest or not record.exists() or record.read_text() != listing:
        fresh = output.with_suffix(".new")
        subprocess.run(["g++", "-shared", "-o", str(fresh), *map(str, targets)], check=True)
        fresh.rename(output)  # never writes into a library that a process has mapped
        record.write_text(listing)
    return output


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", default=DEFAULT_OUTPUT, type=Path)
    parser.add_argument("--head-dims", help="tiles, comma separated; default: all")
    parser.add_argument("--kernels", default=",".join(KERNELS), help="comma separated; the others become stubs")
    arguments = parser.parse_args()
    head_dims = [int(tile) for tile in arguments.head_dims.split(",")] if arguments.head_dims else None
    try:
        print(build(arguments.output.absolute(), head_dims, arguments.kernels.split(",")))
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
