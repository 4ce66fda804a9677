"""The record of what was tested and measured on a GPU: benchmarks/results/<gpu>.json.

    python benchmarks/record.py --check            does the record belong to this tree?
    python benchmarks/record.py suite              run the GPU suite and keep its counts
    python benchmarks/record.py merge FILE...      add the rows of other records of the same sources

benchmarks/readme.py writes README's tables and plots from it.
A record holds the hash of csrc/ and hf_flash/; rows measured on other sources are never mixed with it.
"""

import argparse
import datetime
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SOURCES = {"csrc": (".cu", ".cuh", ".h", ".inc"), "hf_flash": (".py",)}
COUNTS = ("passed", "failed", "skipped", "unfinished")
SECTIONS = ("attention", "decode", "models")
MEASURED = {"tflops", "us", "tb_s", "errors", "tokens_per_s", "peak_gib", "prefill_ms", "step_ms", "losses", "run"}
MEASURED |= {"model_tflops", "longest", "contexts", "gradients", "of_matmul"}


def source_hash(root=ROOT):
    """SHA-256 over the names and contents of csrc/ and hf_flash/."""
    digest = hashlib.sha256()
    for folder, suffixes in SOURCES.items():
        for path in sorted(p for p in (root / folder).rglob("*") if p.suffix in suffixes):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def record_name(gpu):
    """File name of a GPU's record: "NVIDIA H200" -> "h200.json"."""
    words = re.sub(r"\b(nvidia|geforce|tesla)\b", "", gpu.lower())
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-") + ".json"


def load(path):
    return json.loads(Path(path).read_text())


def save(record, path):
    """Writes a whole file or none: a run may be cut off at any moment."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(path)


def environment(device="cuda"):
    """The facts that a record starts with."""
    import torch

    try:
        import transformers

        version = transformers.__version__
    except ImportError:
        version = None
    cuda = device == "cuda" and torch.cuda.is_available()
    return {
        "source": source_hash(),
        "gpu": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "transformers": version,
        "date": datetime.date.today().isoformat(),
    }


def key(row):
    """What a row measures, apart from the results."""
    return json.dumps({name: value for name, value in row.items() if name not in MEASURED}, sort_keys=True)


def combine(old, new):
    """Rows of both. A case measured twice has the newer figures, and in the same run the older ones beside them."""
    rows = {key(row): row for row in old}
    for row in new:
        before = rows.get(key(row), {})
        # Contenders are comparable inside one run only: those of different runs are not put side by side.
        if before.get("run") == row.get("run"):
            row = {
                n: {**before.get(n, {}), **v} if n in MEASURED and isinstance(v, dict) else v for n, v in row.items()
            }
        else:
            before = {name: value for name, value in before.items() if name != "errors"}
        rows[key(row)] = {**before, **row}
    return list(rows.values())


class Recorder:
    """Collects the rows of one run and saves the record after each, so that nothing is lost when time runs out.

    output: a folder, or a .json file. limits: the ceilings measured in this run.
    """

    def __init__(self, output, device="cuda", limits=None):
        fresh = environment(device)
        output = Path(output)
        self.path = output if output.suffix == ".json" else output / record_name(fresh["gpu"])
        kept = load(self.path) if self.path.exists() else {}
        if kept.get("source") != fresh["source"]:
            if kept:
                print(f"{self.path}: rows of other sources are dropped", file=sys.stderr)
            kept = {}
        self.record = {**kept, **fresh}
        self.run = datetime.datetime.now().isoformat(timespec="seconds")
        if limits:
            self.record.setdefault("runs", {})[self.run] = limits

    def add(self, section, row):
        self.record[section] = combine(self.record.get(section, []), [{**row, "run": self.run}])
        save(self.record, self.path)

    def set(self, **values):
        self.record.update(values)
        save(self.record, self.path)


def merge(records):
    """One record of several of the same sources; raises ValueError where their sources differ."""
    sources = {record["source"] for record in records}
    if len(sources) != 1:
        raise ValueError(f"records of {len(sources)} different sources cannot be merged")
    merged = {}
    for record in records:
        rows = {s: combine(merged.get(s, []), record.get(s, [])) for s in SECTIONS if s in record or s in merged}
        runs = {**merged.get("runs", {}), **record.get("runs", {})}
        merged = {**merged, **record, **rows, **({"runs": runs} if runs else {})}
    return merged


def find_record(folder=RESULTS):
    """The record of this project's GPU, h200.json, else the newest GPU record, else None."""
    found = sorted((p for p in Path(folder).glob("*.json") if p.name != "cpu.json"), key=os.path.getmtime)
    preferred = Path(folder) / "h200.json"
    return preferred if preferred.exists() else found[-1] if found else None


def check(path):
    """One line on whether a record belongs to the tree, and the exit status that goes with it."""
    if path is None or not Path(path).exists():
        return "no record: run `make gpu` on a machine with a GPU", 2
    record = load(path)
    name = Path(path).name
    tests = record.get("tests") or {}
    counts = ", ".join(f"{tests[word]} {word}" for word in COUNTS if word in tests)
    about = f"{name}: {record.get('gpu')}, {record.get('date')}, tests: {counts or 'not run'}"
    if record.get("source") != source_hash():
        return f"stale: {about}; csrc/ or hf_flash/ changed since", 1
    return f"current: {about}", 0


# ---- the GPU suite ---------------------------------------------------------------------------------------------------


def count_tests(junit, interrupted=False):
    """Counts of a junit file: ({"passed", "failed", "skipped"}, the same for each tool of the sanitizer tests).

    interrupted: the last test listed had not ended, and does not count.
    """
    total, tools = {"passed": 0, "failed": 0, "skipped": 0}, {}
    cases = list(xml.etree.ElementTree.parse(junit).iter("testcase"))
    for case in cases[:-1] if interrupted else cases:
        children = {child.tag for child in case}
        outcome = "failed" if children & {"failure", "error"} else "skipped" if "skipped" in children else "passed"
        total[outcome] += 1
        tool = re.search(r"memcheck|racecheck|initcheck|synccheck", case.get("name", ""))
        if tool:
            counts = tools.setdefault(tool[0], {"passed": 0, "failed": 0, "skipped": 0})
            counts[outcome] += 1
    return total, tools


def add_counts(a, b):
    """Counts of two parts of the suite together."""
    return {n: add_counts(a.get(n, {}), b.get(n, {})) if isinstance({**a, **b}[n], dict) else a.get(n, 0) + b.get(n, 0)
            for n in {**a, **b}}  # fmt: skip


def run_suite(recorder, arguments, minutes, add):
    """Runs `pytest -m gpu` and keeps its counts, also where time ran out (then as "unfinished"); returns its status."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", f"--junitxml={junit}", *arguments]
        suite = subprocess.Popen(command, cwd=ROOT)
        try:
            status = suite.wait(minutes * 60)
        except subprocess.TimeoutExpired:
            print(f"the suite did not finish within {minutes} minutes", file=sys.stderr)
            suite.send_signal(signal.SIGINT)  # pytest then writes down what it has
            try:
                suite.wait(30)
            except subprocess.TimeoutExpired:
                suite.kill()
            status = 124
        if junit.exists():
            tests, sanitizer = count_tests(junit, interrupted=status == 124)
            if status == 124:
                tests["unfinished"] = 1
            if add:
                tests = add_counts(recorder.record.get("tests", {}), tests)
                sanitizer = add_counts(recorder.record.get("sanitizer", {}), sanitizer)
            recorder.set(tests=tests, sanitizer=sanitizer)
        return status


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", nargs="?", default="check", choices=("check", "suite", "merge"))
    parser.add_argument("files", nargs="*", type=Path, help="merge: records to add")
    parser.add_argument("--check", action="store_true", help="the same as the command check")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the record, or the .json file itself")
    parser.add_argument("--minutes", type=float, default=60, help="suite: time limit")
    parser.add_argument("--pytest", default="", help="suite: more arguments for pytest, such as files")
    parser.add_argument("--add", action="store_true", help="suite: add to the counts of another part of the suite")
    options = parser.parse_args(arguments)
    path = options.output if options.output.suffix == ".json" else find_record(options.output)
    if options.check or options.command == "check":
        line, status = check(path)
        print(line)
        return status
    if options.command == "suite":
        return run_suite(Recorder(options.output), shlex.split(options.pytest), options.minutes, options.add)
    new = [load(file) for file in options.files]
    if path is None:
        path = options.output / record_name(new[0]["gpu"])
    old = [load(path)] if path.exists() else []
    if old and old[0]["source"] != new[0]["source"]:
        print(f"{path}: rows of other sources are dropped", file=sys.stderr)
        old = []
    save(merge(old + new), path)
    print(check(path)[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
