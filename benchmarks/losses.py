"""Losses of a patched model beside stock on the same real data, and the noise that they are to be judged by.

    python benchmarks/losses.py --rows llama-1b/train/4x4096 --steps 50

Every kind starts from the same weights in bf16 and sees the same batches; "fp32" is stock sdpa from those weights in
fp32. Noise is how far stock is from itself: another choice of kernels (eager for sdpa), and bf16 from fp32. A patched
model is right where it is no farther from stock than that.
"""

import argparse
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

import record as records
import torch
import transformers
from tqdm import tqdm
from workloads import ROWS, build, clean, common, optimiser, shrunk, train_step, training_batch

from hf_flash import timing

KINDS = ("hf_flash", "sdpa", "eager", "fp32")


def train(row, kind, text, device, tiny, steps, bar):
    """The loss of every step of one kind, or the reason why there is none."""
    clean(device)
    try:
        model = build(row, "sdpa" if kind == "fp32" else kind, device, tiny)
        model = (model.float() if kind == "fp32" else model).train()
        optimizer, losses = optimiser(model, device), []
        for step in range(steps):
            losses.append(train_step(model, optimizer, training_batch(row, text, step, device)[0]).float())
            bar.update()
        return [round(loss.item(), 5) for loss in losses]
    except (torch.OutOfMemoryError, NotImplementedError) as error:
        return "out of memory" if isinstance(error, torch.OutOfMemoryError) else str(error)


def apart(losses, one, other):
    """Mean distance of two kinds over the steps, or None where either was not trained."""
    pair = [losses.get(kind) for kind in (one, other)]
    if not all(isinstance(values, list) for values in pair):
        return None
    # A batch without labels has no loss with either.
    return statistics.mean(abs(a - b) for a, b in zip(*pair, strict=True) if a == a or b == b)


def summary(losses):
    """Lines for the eye: the patched model's distance from stock beside stock's own noise."""
    lines = [[kind, *(["-", "-", values] if isinstance(values, str) else
                      [f"{values[0]:.4f}", f"{statistics.mean(values[-5:]):.4f}", ""])]
             for kind, values in losses.items()]  # fmt: skip
    stock = "eager" if apart(losses, "hf_flash", "sdpa") is None else "sdpa"
    distances = {"patched from stock": ("hf_flash", stock), "noise, another kernel": ("sdpa", "eager"),
                 "noise, bf16 from fp32": (stock, "fp32"), "patched from fp32": ("hf_flash", "fp32")}  # fmt: skip
    found = {words: apart(losses, *pair) for words, pair in distances.items()}
    return lines, {words: value for words, value in found.items() if value is not None}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="train", help="parts of the rows' names: " + ", ".join(r.name for r in ROWS))
    parser.add_argument(
        "--kinds", default=",".join(KINDS), help="also with additions, as in models.py: hf_flash+compile"
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--output", type=Path, default=records.RESULTS, help="folder of the record, or a .json file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    tiny = device.type == "cpu"
    wanted, kinds = options.rows.split(","), options.kinds.split(",")
    rows = [row for row in ROWS if row.task != "generate" and any(word in row.name for word in wanted)]
    rows = list(dict.fromkeys(map(shrunk, rows))) if tiny else rows
    transformers.logging.set_verbosity_error()
    text, found = common.standard_library(), {}
    recorder = records.Recorder(options.output, device.type, timing.ceilings(device, 5))
    with tqdm(total=len(rows) * len(kinds) * options.steps, unit="step") as bar:
        for row in rows:
            losses = {}
            for kind in kinds:
                bar.set_description(f"{row.name} {kind}")
                losses[kind] = train(row, kind, text, device, tiny, options.steps, bar)
            trained = {kind: values for kind, values in losses.items() if isinstance(values, list)}
            recorder.add("models", {**asdict(row), "losses": trained})
            found[row.name] = losses
    for name, losses in found.items():
        lines, distances = summary(losses)
        common.print_table(f"{name}, {options.steps} steps", ["", "first loss", "last five", ""], lines)
        for words, value in distances.items():
            print(f"  {words}: {value:.1e} a step on average")
    print(f"\n{recorder.path}")
    return found


if __name__ == "__main__":
    main()
    sys.exit(0)
