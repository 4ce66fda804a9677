"""The record of what was tested and measured on a GPU: benchmarks/results/<gpu>.json, and README's tables from it.

    python benchmarks/record.py --check            does the record belong to this tree?
    python benchmarks/record.py suite              run the GPU suite and keep its counts
    python benchmarks/record.py merge FILE...      add the rows of other records of the same sources
    python benchmarks/record.py readme             write README's tables and plots

A record holds the hash of csrc/ and hf_flash/; rows measured on other sources are never mixed with it.
"""

import argparse
import datetime
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SOURCES = {"csrc": (".cu", ".cuh", ".h", ".inc"), "hf_flash": (".py",)}
SECTIONS = ("attention", "decode", "models")
MEASURED = {"tflops", "us", "tb_s", "errors", "tokens_per_s", "peak_gib", "prefill_ms", "step_ms", "losses", "run"}
MEASURED |= {"model_tflops", "longest"}


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
    counts = ", ".join(f"{tests[word]} {word}" for word in ("passed", "failed", "skipped") if word in tests)
    about = f"{name}: {record.get('gpu')}, {record.get('date')}, tests: {counts or 'not run'}"
    if record.get("source") != source_hash():
        return f"stale: {about}; csrc/ or hf_flash/ changed since", 1
    return f"current: {about}", 0


# ---- the GPU suite ---------------------------------------------------------------------------------------------------


def count_tests(junit):
    """Counts of a junit file: ({"passed", "failed", "skipped"}, the same for each tool of the sanitizer tests)."""
    total, tools = {"passed": 0, "failed": 0, "skipped": 0}, {}
    for case in xml.etree.ElementTree.parse(junit).iter("testcase"):
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
    """Runs `pytest -m gpu`; returns its exit status. What it had counted when time ran out is lost, and said so."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", f"--junitxml={junit}", *arguments]
        try:
            status = subprocess.run(command, cwd=ROOT, timeout=minutes * 60).returncode
        except subprocess.TimeoutExpired:
            print(f"the suite did not finish within {minutes} minutes", file=sys.stderr)
            return 124
        if junit.exists():
            tests, sanitizer = count_tests(junit)
            if add:
                tests = add_counts(recorder.record.get("tests", {}), tests)
                sanitizer = add_counts(recorder.record.get("sanitizer", {}), sanitizer)
            recorder.set(tests=tests, sanitizer=sanitizer)
        return status


# ---- README ----------------------------------------------------------------------------------------------------------


def fill(text, name, content):
    """README with the part between <!-- name --> and <!-- /name --> replaced."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", flags=re.S)
    if not pattern.search(text):
        raise ValueError(f"README.md has no part marked {name}")
    return pattern.sub(lambda m: f"{m[1]}{content.rstrip()}\n{m[2]}", text)


def markdown(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def figure(value, digits=0):
    return "–" if value is None else f"{value:,.{digits}f}"


def best_peer(values):
    """The largest of the figures that are not ours: (name, value), or (None, None)."""
    peers = {name: value for name, value in values.items() if not name.startswith("hf_flash") and value}
    return max(peers.items(), key=lambda item: item[1]) if peers else (None, None)


def geometric_mean(values):
    from math import exp, log

    values = list(values)
    return exp(sum(map(log, values)) / len(values)) if values else None


def attention_table(rows, which):
    chosen = [row for row in rows if row["pass"] == which and "hf_flash" in row["tflops"]]
    chosen.sort(key=lambda r: (r.get("varlen", False), r["head_dim"], -r["kv_heads"], r["causal"], r["seq"]))
    lines, ratios = [], []
    for row in chosen:
        tflops = row["tflops"]
        mask = "causal" if row["causal"] else "full"
        tokens = f"{row['tokens']} in {row['batch']} ragged" if row.get("varlen") else f"{row['seq']} ({row['batch']})"
        others = [figure(tflops.get(name)) for name in ("hf_flash_portable", "fa2", "cudnn", "fa3", "fa4")]
        value = best_peer(tflops)[1]
        ratios += [tflops["hf_flash"] / value] if value else []
        heads = f"{row['heads']}/{row['kv_heads']}"
        ours, ratio = f"**{figure(tflops['hf_flash'])}**", figure(ratios[-1], 2) if value else "–"
        lines.append([row["head_dim"], mask, tokens, heads, ours, *others, ratio])
    header = ["head dim", "mask", "tokens (batch)", "heads q/kv", "hf_flash", "portable", "fa2", "cudnn", "fa3", "fa4"]
    mean = f"Geometric mean of hf_flash over the best peer in each row: {geometric_mean(ratios):.2f}." if ratios else ""
    return markdown([*header, "ratio"], lines) + f"\n\n{mean}\n"


def decode_table(rows):
    lines = []
    for row in rows:
        us = row["us"]
        peers = {name: value for name, value in us.items() if name != "hf_flash" and value}
        best = min(peers.values()) / us["hf_flash"] if peers and us.get("hf_flash") else None
        lines.append([row["batch"], row["cached"], f"{row['heads']}/{row['kv_heads']}", row["head_dim"],
                      f"**{figure(us.get('hf_flash'))}**", *(figure(us.get(n)) for n in ("fa2", "cudnn", "fa3", "fa4")),
                      figure(row.get("tb_s", {}).get("hf_flash"), 2), figure(best, 2)])  # fmt: skip
    header = ["batch", "cached", "heads q/kv", "head dim", "hf_flash µs", "fa2", "cudnn", "fa3", "fa4", "TB/s", "ratio"]
    return markdown(header, lines)


def context_line(row):
    """One sentence on the longest contexts that train."""
    words = [f"{name} {count:,} tokens" for name, count in row["longest"].items()]
    return f"Longest context that trains ({row['model']}, LoRA, gradient checkpointing): {', '.join(words)}.\n"


def models_table(rows):
    lines = []
    sentences = [context_line(row) for row in rows if "longest" in row]
    for row in (row for row in rows if "longest" not in row):
        speed, memory = row.get("tokens_per_s", {}), row.get("peak_gib", {})

        def cell(name, speed=speed, memory=memory, row=row):
            value = speed.get(name)
            if value is None:
                return row.get("errors", {}).get(name, "–")
            words = [f"{value / 1000:,.1f} ktok/s"]
            if row["task"] == "generate":
                words = [f"{row['prefill_ms'][name]:,.0f} / {row['step_ms'][name]:,.1f} ms"]
            return ", ".join(words + ([f"{memory[name]:.0f} GiB"] if name in memory else []))

        stock = [speed[name] for name in ("sdpa", "eager") if speed.get(name)]
        ratio = speed["hf_flash"] / max(stock) if stock and speed.get("hf_flash") else None
        size = f"{row['batch']} × {row['seq']}, " + ("full" if row["fill"] == 1 else f"fill {row['fill']}")
        name = row["model"] + (f" + {row['with']}" if row.get("with") else "")
        lines.append([name, row["task"], size, *map(cell, ("hf_flash", "sdpa", "eager")), figure(ratio, 2)])
    table = markdown(["model", "task", "batch × tokens", "patched", "stock sdpa", "stock eager", "ratio"], lines)
    return "\n\n".join([table, *sentences])


def features_table(adapters):
    """Models x features from the adapters' own declarations."""
    features = list(dict.fromkeys(feature for adapter in adapters for feature in adapter.features))
    rows = [
        [", ".join(adapter.model_types), *("✓" if feature in adapter.features else "" for feature in features)]
        for adapter in adapters
    ]
    return markdown(["model_type", *features], rows)


def adapters():
    from hf_flash import patching

    patching.supported_models()  # loads them
    return list(dict.fromkeys(patching.ADAPTERS.values()))


NOT_RECORDED = "Not yet recorded.\n"


def readme_parts(record, stale, plots):
    """Name of each marked part of README -> its text."""
    if record is None:
        return dict.fromkeys(("record:facts", "record:attention", "record:decode", "record:models"), NOT_RECORDED)
    tests = record.get("tests") or {}
    facts = [f"{record['gpu']}, torch {record['torch']}, transformers {record['transformers']}, {record['date']}"]
    facts += ["**stale: the sources changed since**"] if stale else []
    if tests:
        facts.append(f"GPU suite: {tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped")
    runs = record.get("runs", {})
    if runs:
        limits = runs[max(runs)]
        facts.append(f"a bf16 8192³ product reached {limits['matmul_tflops']:.0f} TFLOP/s in the same run and a device "
                     f"copy {limits['copy_tb_s']:.2f} TB/s")  # fmt: skip
    parts = {"record:facts": "; ".join(facts) + ".\n"}
    attention = record.get("attention", [])
    sections = []
    for which in ("forward", "backward"):
        if any(row["pass"] == which for row in attention):
            image = f"![{which}]({plots[which]})\n\n" if which in plots else ""
            sections.append(f"{which.capitalize()}, TFLOP/s:\n\n{image}{attention_table(attention, which)}")
    parts["record:attention"] = "\n".join(sections) or NOT_RECORDED
    parts["record:decode"] = decode_table(record["decode"]) if record.get("decode") else NOT_RECORDED
    parts["record:models"] = models_table(record["models"]) if record.get("models") else NOT_RECORDED
    return parts


def draw_plots(record, folder):
    """Writes the plots of the dense half-precision cells; returns pass -> path from README."""
    from hf_flash import bench

    plots = {}
    for which in ("forward", "backward"):
        rows = [r for r in record.get("attention", []) if r["pass"] == which and not r.get("varlen")]
        rows = [r for r in rows if r["heads"] == r["kv_heads"] and r["dtype"] == "bfloat16"]
        lengths = {}
        for row in rows:
            lengths.setdefault((row["head_dim"], row["causal"]), set()).add(row["seq"])
        rows = [r for r in rows if len(lengths[r["head_dim"], r["causal"]]) > 2]
        if rows:
            path = Path(folder) / f"{which}.png"
            bench.draw(rows, path, f"{record['gpu']}, bf16, torch {record['torch']}")
            plots[which] = os.path.relpath(path, ROOT)
    return plots


def write_readme(path, readme=ROOT / "README.md"):
    record = load(path) if path else None
    stale = bool(record) and record["source"] != source_hash()
    plots = draw_plots(record, path.parent) if record else {}
    text = readme.read_text()
    for name, content in readme_parts(record, stale, plots).items():
        text = fill(text, name, content)
    text = fill(text, "adapters", features_table(adapters()))
    readme.write_text(text)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", nargs="?", default="check", choices=("check", "suite", "merge", "readme"))
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
        return run_suite(Recorder(options.output), options.pytest.split(), options.minutes, options.add)
    if options.command == "merge":
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
    write_readme(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
