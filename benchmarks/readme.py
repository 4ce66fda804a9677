"""README's tables and plots from the record and the adapters: python benchmarks/readme.py [record.json]"""

import argparse
import math
import os
import re
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent / "examples")]
import common  # noqa: E402
from record import COUNTS, RESULTS, ROOT, find_record, load, source_hash  # noqa: E402

NOT_RECORDED = "Not yet recorded.\n"
PARTS = ("record:facts", "record:attention", "record:decode", "record:models", "record:gpus")
CASE = ("model", "task", "batch", "seq", "fill")


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
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


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
    return markdown([*header, "ratio"], lines) + "\n\n" + " ".join(attention_sentences(chosen, ratios)) + "\n"


def attention_sentences(rows, ratios):
    """What the rows of one pass come to: means, the worst, and what the table has no column for."""
    if ratios:
        mean = geometric_mean(ratios)
        yield f"Geometric mean of hf_flash over the best peer in each row: {mean:.2f}, least {min(ratios):.2f}."

    def over(name, other):
        return [r["tflops"][name] / r["tflops"][other] for r in rows if {name, other} <= set(r["tflops"])]

    if portable := over("hf_flash_portable", "fa2"):
        yield f"Portable kernels over fa2: {geometric_mean(portable):.2f}, least {min(portable):.2f}."
    if slower := over("hf_flash", "hf_flash_deterministic"):
        yield f"Deterministic gradients take {geometric_mean(slower):.2f} times as long, at most {max(slower):.2f}."
    longest = [row for row in rows if "of_matmul" in row and row["seq"] == 16384 and not row.get("varlen")]
    if shares := {row["head_dim"]: row["of_matmul"] for row in longest if not row["causal"]}:
        listed = ", ".join(f"{head_dim}: {share:.0%}" for head_dim, share in sorted(shares.items()))
        yield f"Share of the bf16 product's rate at 16384 tokens, full, by head dim: {listed}."


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


def model_cell(row, name):
    """Speed and peak memory of one contender."""
    value, memory = row.get("tokens_per_s", {}).get(name), row.get("peak_gib", {})
    if value is None:
        return row.get("errors", {}).get(name, "–")
    words = [f"{value / 1000:,.1f} ktok/s"]
    if row["task"] == "generate":
        words = [f"{row['prefill_ms'][name]:,.0f} / {row['step_ms'][name]:,.1f} ms"]
    return ", ".join(words + ([f"{memory[name]:.0f} GiB"] if name in memory else []))


def model_row(row, contenders):
    """Size, contenders and the ratio of ours to the best of the others."""
    speed = row.get("tokens_per_s", {})
    stock = [speed[name] for name in contenders[1:] if speed.get(name)]
    ratio = speed["hf_flash"] / max(stock) if stock and speed.get("hf_flash") else None
    size = f"{row['batch']} × {row['seq']}, " + ("full" if row["fill"] == 1 else f"fill {row['fill']}")
    return [size, *(model_cell(row, name) for name in contenders), figure(ratio, 2)]


def models_table(rows, plots=()):
    rows = [row for row in rows if "gpus" not in row]
    sentences = [context_line(row) for row in rows if "longest" in row]
    lines = []
    for row in (row for row in rows if "longest" not in row):
        addition = {"liger": "fused layers"}.get(row.get("with"), row.get("with"))
        name = row["model"] + (f" + {addition}" if addition else "")
        lines.append([name, row["task"], *model_row(row, ("hf_flash", "sdpa", "eager"))])
    table = markdown(["model", "task", "batch × tokens", "patched", "stock sdpa", "stock eager", "ratio"], lines)
    images = [f"![memory and speed against context]({plots['contexts']})"] if "contexts" in plots else []
    return "\n\n".join([table, *sentences, *images])


def gpus_table(rows):
    """Rows of benchmarks/multi_gpu.py: each way of sharing beside one GPU, memory for each GPU."""
    lines, sentences = [], []
    for row in (row for row in rows if "gpus" in row):
        how = "one GPU" if row["sharing"] == "one" else f"{row['gpus']} GPUs, {row['sharing']}"
        if row["task"] == "longest context":
            found = f"{row['longest']['hf_flash']:,} tokens" if "longest" in row else row["errors"]["hf_flash"]
            sentences.append(f"Longest context that trains ({row['model']}, LoRA, {how}): {found}.")
            continue
        if "gradients" in row:
            apart = row["gradients"]
            sentences.append(
                f"Gradients of {row['batch']} × {row['seq']} tokens, {how}, differ from one GPU's by "
                f"{apart['shared']:.1%} of their norm; stock sdpa's on one GPU by {apart['sdpa']:.1%}."
            )
        if "tokens_per_s" in row or "errors" in row:
            ones = (r for r in rows if r.get("sharing") == "one" and all(r[name] == row[name] for name in CASE))
            ours, theirs = (r.get("losses", {}).get("hf_flash", ()) for r in (row, next(ones, {})))
            apart = max((abs(a - b) for a, b in zip(ours, theirs)), default=None)
            lines.append([row["model"], how, *model_row(row, ("hf_flash", "sdpa")), figure(apart, 4)])
    header = ["model", "training on", "batch × tokens", "patched", "stock sdpa", "ratio", "losses apart from one GPU's"]
    return "\n\n".join([markdown(header, lines), *sentences])


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


def readme_parts(record, stale, plots):
    """Name of each marked part of README -> its text."""
    if record is None:
        return dict.fromkeys(PARTS, NOT_RECORDED)
    tests = record.get("tests") or {}
    facts = [f"{record['gpu']}, torch {record['torch']}, transformers {record['transformers']}, {record['date']}"]
    facts += (
        ["**stale: csrc/ or hf_flash/ changed since, so all figures here are an earlier version's**"] if stale else []
    )
    if tests:
        facts.append("GPU suite: " + ", ".join(f"{tests[word]} {word}" for word in COUNTS if word in tests))
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
    models = record.get("models", [])
    parts["record:models"] = models_table(models, plots) if any("gpus" not in row for row in models) else NOT_RECORDED
    parts["record:gpus"] = gpus_table(models) if any("gpus" in row for row in models) else NOT_RECORDED
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
    for row in (row for row in record.get("models", []) if row.get("contexts")):
        names = {kind: "patched" if kind == "hf_flash" else f"stock {kind}" for kind in row["contexts"]}
        lines = {names[kind]: line for kind, line in row["contexts"].items()}
        title = f"{row['model']}, LoRA, gradient checkpointing, {record['gpu']}"
        common.draw_contexts(lines, Path(folder) / "contexts.png", title)
        plots["contexts"] = os.path.relpath(Path(folder) / "contexts.png", ROOT)
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
    parser.add_argument("record", nargs="?", type=Path, default=RESULTS, help="a record, or the folder of records")
    path = parser.parse_args(arguments).record
    write_readme(path if path.suffix == ".json" else find_record(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
