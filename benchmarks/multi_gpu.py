"""Fine-tuning over several GPUs of one host: tokens/s, memory and losses beside one GPU's, and the longest context.

    python benchmarks/multi_gpu.py                        # two GPUs; ends with a table
    python benchmarks/multi_gpu.py --cells sequences --seconds 60
    python benchmarks/multi_gpu.py --device cpu           # two CPU processes and tiny models: shows that it runs

Each way of sharing is a launch of its own, under `accelerate launch` with the examples' configurations: "one" is one
GPU alone, "ddp" copies the model, "fsdp2" shards it, "sequences" copies it and splits every sequence. All of them train
from the same weights on the same batches, so that their losses are to agree. A cell that fails or hangs costs itself
alone: it is noted, its processes are ended, and the rest goes on in new ones.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import record as records
import torch
import transformers
from tqdm import tqdm
from workloads import ROOT, Row, build, common, optimiser, shrunk, training_batch

import hf_flash

LAUNCHES = {"one": None, "ddp": "ddp", "fsdp2": "fsdp2", "sequences": "ddp"}
PADDED = Row("llama-1b", "train", 8, 4096, 0.6)
LONG = Row("llama-1b", "train", 1, 32768, 1)
SHORT = Row("llama-1b", "train", 1, 8192, 1)
CONTEXT = Row("llama-1b", "longest context", 1, 0, 1)


@dataclass(frozen=True)
class Cell:
    sharing: str
    what: str  # "train", "gradients" or "longest"
    row: Row
    mode: str = "hf_flash"

    @property
    def name(self):
        return f"{self.sharing}/{self.what}/{self.row.batch}x{self.row.seq}/{self.mode}"


# In the order of what they are worth, as far as launches allow.
CELLS = (
    Cell("sequences", "gradients", SHORT),
    Cell("sequences", "train", LONG),
    Cell("sequences", "longest", CONTEXT),
    Cell("one", "train", LONG),
    Cell("one", "train", LONG, "sdpa"),
    Cell("one", "train", PADDED),
    Cell("one", "train", PADDED, "sdpa"),
    Cell("one", "longest", CONTEXT),
    Cell("ddp", "train", PADDED),
    Cell("ddp", "train", PADDED, "sdpa"),
    Cell("fsdp2", "train", PADDED),
    Cell("fsdp2", "train", PADDED, "sdpa"),
)


# ---- in each process -------------------------------------------------------------------------------------------------


class Worker:
    """One process of a launch."""

    def __init__(self, sharing, options):
        from accelerate import Accelerator, PartialState
        from accelerate.utils import DistributedType

        cpu = options.device == "cpu"
        if cpu and sharing == "fsdp2":  # accelerate shards over accelerators only, so it is told that these are some
            PartialState(cpu=True)
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        self.accelerator = Accelerator(cpu=cpu, mixed_precision="no")  # the weights are bf16
        self.device, self.sharing, self.options = self.accelerator.device, sharing, options
        if self.accelerator.num_processes != (1 if sharing == "one" else options.gpus):
            raise RuntimeError(f"{sharing}: {self.accelerator.num_processes} processes take part, not {options.gpus}")
        self.text = common.standard_library()

    def prepared(self, cell):
        model = build(cell.row, cell.mode, self.device, self.options.tiny).train()
        if self.sharing == "sequences":
            hf_flash.split_sequences(model)
        return self.accelerator.prepare(model, optimiser(model, self.device))

    def share(self, batch):
        """This process's rows, and what its loss counts in the mean over the processes."""
        parts = 1 if self.sharing == "sequences" else self.accelerator.num_processes
        part = self.accelerator.process_index % parts
        mine = {name: value[part::parts] for name, value in batch.items()}
        counts = [(labels[:, 1:] != -100).sum() for labels in (mine["labels"], batch["labels"])]
        return mine, counts[0] * parts / counts[1]

    def wait(self):
        self.accelerator.wait_for_everyone()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def train(self, cell):
        """tokens/s of all processes, the most memory of any, and the losses of every step."""
        model, optimizer = self.prepared(cell)
        losses, tokens, seconds = [], 0, 0.0
        for step in range(self.options.steps + 2):
            batch, lengths = training_batch(cell.row, self.text, step, self.device)
            batch, weight = self.share(batch)
            self.wait()
            before = time.perf_counter()
            loss = model(**batch).loss * weight
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            self.wait()
            if step >= 2:  # two steps warm up
                tokens, seconds = tokens + sum(lengths), seconds + time.perf_counter() - before
            losses.append(round(self.accelerator.reduce(loss.detach().float(), "mean").item(), 4))
        measured = {"tokens_per_s": float(f"{tokens / seconds:.5g}"), "losses": losses}
        if self.device.type == "cuda":
            peak = torch.tensor([torch.cuda.max_memory_allocated(self.device) / 2**30], device=self.device)
            measured["peak_gib"] = round(self.accelerator.gather(peak).max().item(), 2)
        return {name: {cell.mode: value} for name, value in measured.items()}

    def gradients(self, cell):
        """How far gradients lie from those of one process, in norms: shared ones, and stock sdpa's, which is noise."""
        batch, _ = training_batch(cell.row, self.text, 0, self.device)
        found = {}
        for name, mode in (("whole", cell.mode), ("sdpa", "sdpa"), ("shared", cell.mode)):
            model = build(cell.row, mode, self.device, self.options.tiny).train()
            if name == "shared":
                hf_flash.split_sequences(model)
            model(**batch).loss.backward()
            grads = [p.grad.float() for p in model.parameters() if p.grad is not None]
            if name == "shared":  # what DDP does
                grads = [self.accelerator.reduce(grad, "mean") for grad in grads]
            found[name] = grads
        scale = sum(grad.square().sum() for grad in found["whole"])
        apart = {
            name: (sum((a - b).square().sum() for a, b in zip(found[name], found["whole"])) / scale).sqrt().item()
            for name in ("shared", "sdpa")
        }
        return {"gradients": {name: float(f"{value:.3g}") for name, value in apart.items()}}

    def longest(self, cell):
        import lora_long_context  # an example, which workloads made importable

        arguments = ["--kinds", "patched", "--plot", "", *self.options.longest.split()]
        if self.options.tiny:
            arguments += ["--start", "64", "--limit", "128", "--steps", "1", "--refine", "0"]
        if self.sharing == "sequences":
            arguments.append("--split-sequences")
        attempt, best = lora_long_context.try_context, 0

        def kept(model, optimizer, accelerator, ids, context, options):
            nonlocal best
            point = attempt(model, optimizer, accelerator, ids, context, options)
            if point[0] and context > best:  # at once: a later attempt may hang where one process alone has no room
                best = context
                self.add(cell, {"longest": {cell.mode: best}, "peak_gib": {cell.mode: round(point[1], 2)}})
            return point

        lora_long_context.try_context = kept
        points = lora_long_context.main(arguments)["patched"]
        return {"longest": {cell.mode: lora_long_context.longest(points)}}

    def add(self, cell, measured):
        if self.accelerator.is_main_process:
            add(cell, self.options, measured)

    def run(self, cells, journal):
        """Measures the cells in turn. The journal tells the parent which one has begun, and what became of it."""
        main = self.accelerator.is_main_process
        for cell in cells:
            if main:
                write_line(journal, begun=cell.name)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(self.device)
            try:
                measured = getattr(self, cell.what)(cell)
            except Exception as error:
                reason = "out of memory" if isinstance(error, torch.OutOfMemoryError) else str(error).splitlines()[0]
                write_line(journal, failed=cell.name, reason=reason[:200])
                raise  # other processes may wait for this one: the parent goes on with new ones
            self.add(cell, measured)
            if main:
                write_line(journal, done=cell.name)
            self.accelerator.free_memory()


def write_line(journal, **entry):
    with open(journal, "a") as file:
        file.write(json.dumps(entry) + "\n")


def add(cell, options, measured):
    """Puts what was measured into the record; rows of all launches count as one run's."""
    recorder = records.Recorder(options.output, options.device)
    recorder.run = options.run
    gpus = 1 if cell.sharing == "one" else options.gpus
    recorder.add("models", {**asdict(cell.row), "gpus": gpus, "sharing": cell.sharing, **measured})


# ---- the parent ------------------------------------------------------------------------------------------------------


def launch(sharing, cells, options, journal):
    """Starts the processes of a launch, in a process group of their own."""
    command = [sys.executable]
    if LAUNCHES[sharing]:
        config = ROOT / "examples" / "accelerate" / f"{LAUNCHES[sharing]}.yaml"
        command += ["-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", "0"]
        command += ["--num_processes", options.gpus, "--mixed_precision", "no"]
    command += [Path(__file__), "--worker", journal, "--cells", ",".join(cell.name for cell in cells)]
    for name in ("gpus", "steps", "output", "device", "longest", "run"):
        command += [f"--{name}={getattr(options, name)}"]
    command += ["--tiny"] if options.tiny else []
    environ = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return subprocess.Popen([str(word) for word in command], env=environ, start_new_session=True)


def end(process):
    """The launcher ends its own processes, given time."""
    for number, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=patience)


def supervise(sharing, cells, options, bar, note):
    """Runs a launch's cells; calls note(cell, reason) for those that come to nothing, reason None if time ran out."""
    cells = list(cells)
    while cells:
        with tempfile.TemporaryDirectory() as folder:
            journal = Path(folder) / "journal"
            journal.touch()
            process = launch(sharing, cells, options, journal)
            since, seen, reason = time.monotonic(), 0, None
            while True:
                status = process.poll()
                entries = [json.loads(line) for line in journal.read_text().splitlines()]
                for entry in entries[seen:]:
                    since = time.monotonic()
                    if "begun" in entry:
                        bar.set_description(entry["begun"])
                    if "done" in entry:
                        cells.pop(0)
                        bar.update()
                    reason = reason or entry.get("reason")
                seen = len(entries)
                late = time.monotonic() - since > options.seconds + 60 * (seen == 0)  # a launch takes its time
                over = time.monotonic() > options.deadline
                if status is not None or late or over:
                    break
                time.sleep(0.2)
            end(process)
        if over:
            for cell in cells:
                note(cell, None)
            return
        if cells:
            note(cells.pop(0), reason or (f"not done within {options.seconds:g} s" if late else f"ended with {status}"))
            bar.update()


def table(rows):
    """The closing lines: like beside like, with the losses' distance from one GPU's."""
    lines = []
    for row in rows:
        one = next((r for r in rows if r["sharing"] == "one" and case(r) == case(row)), {})
        speed, peak = row.get("tokens_per_s", {}), row.get("peak_gib", {})
        words = [f"{row['gpus']} {row['sharing']}", f"{row['model']} {row['task']} {row['batch']} x {row['seq']}"]
        for mode in ("hf_flash", "sdpa"):
            words.append(f"{speed[mode]:,.0f}" if mode in speed else row.get("errors", {}).get(mode, "-")[:40])
            words.append(common.gib(peak.get(mode)))
        ours, theirs = (r.get("losses", {}).get("hf_flash") for r in (row, one))
        words.append(f"{max(abs(a - b) for a, b in zip(ours, theirs)):.4f}" if ours and theirs else "-")
        words += [f"{row['longest']['hf_flash']:,}" if "longest" in row else "-"]
        words += ["{shared:.2g} / {sdpa:.2g}".format(**row["gradients"]) if "gradients" in row else "-"]
        lines.append(words)
    header = ["GPUs", "", "tokens/s", "GiB", "sdpa", "GiB", "losses apart", "longest", "gradients apart / noise"]
    common.print_table("patched, and stock sdpa", header, lines)


def case(row):
    return row["model"], row["task"], row["batch"], row["seq"]


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--cells", default="", help="parts of the cells' names: " + ", ".join(c.name for c in CELLS))
    parser.add_argument("--steps", type=int, default=8, help="training steps to time")
    parser.add_argument("--longest", default="--no-checkpointing --steps 1 --start 32768 --limit 524288 --refine 2",
                        metavar="ARGUMENTS", help="for examples/lora_long_context.py")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=60, help="time limit of a cell")
    parser.add_argument("--minutes", type=float, default=30, help="time limit of all")
    parser.add_argument("--output", type=Path, default=records.RESULTS, help="folder of the record, or a .json file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="two narrow layers and short sequences (the CPU's default)")
    parser.add_argument("--worker", metavar="JOURNAL", help=argparse.SUPPRESS)
    parser.add_argument("--run", default=datetime.now().isoformat(timespec="seconds"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.tiny |= options.device == "cpu"
    return options


def main(argv=None):
    options = arguments(argv)
    wanted = [word for word in options.cells.split(",") if word]
    cells = [Cell(c.sharing, c.what, shrunk(c.row), c.mode) for c in CELLS] if options.tiny else CELLS
    cells = [cell for cell in cells if not wanted or any(word in cell.name for word in wanted)]
    transformers.logging.set_verbosity_error()
    if options.worker:
        return Worker(cells[0].sharing, options).run(cells, options.worker)
    if options.device == "cuda" and torch.cuda.device_count() < options.gpus:
        print(f"{torch.cuda.device_count()} GPUs are visible, not {options.gpus}", file=sys.stderr)
        return 2
    options.deadline = time.monotonic() + 60 * options.minutes
    missed = []

    def note(cell, reason):
        reason = reason or "no time left"
        tqdm.write(f"{cell.name}: {reason}")
        missed.append(cell.name)
        if reason != "no time left":
            add(cell, options, {"errors": {cell.mode: reason}})

    with tqdm(total=len(cells), unit="cell", disable=None) as bar:
        for sharing in dict.fromkeys(cell.sharing for cell in cells):
            supervise(sharing, [cell for cell in cells if cell.sharing == sharing], options, bar, note)
    path = records.Recorder(options.output, options.device).path
    rows = records.load(path).get("models", []) if path.exists() else []
    table([row for row in rows if row.get("run") == options.run])
    print(f"{path}" + (f"; not measured: {', '.join(missed)}" if missed else ""))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
