"""The benchmarks: FLOPs, contenders that are right before they are timed, turns, and processes that crash."""

import contextlib
import json
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import attention as attention_benchmark  # noqa: E402
import contenders  # noqa: E402
import record  # noqa: E402

import hf_flash  # noqa: E402
from hf_flash import bench, timing  # noqa: E402


def test_flops_are_counted_as_the_papers_do():
    case = bench.Case(64, 1024, 2, 4)
    assert case.flops("forward") == 4 * 2 * 4 * 1024**2 * 64
    assert bench.Case(64, 1024, 2, 4, causal=True).flops("backward") == 2.5 * case.flops("forward") / 2
    assert bench.Case(64, 3, 1, 1, lengths=(1, 2, 3)).flops("forward") == 4 * 14 * 64


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("lengths, kv_heads", [((), 2), ((), 1), ((9, 1, 20), 2)])
def test_every_contender_is_checked_and_timed(which, lengths, kv_heads):
    case = bench.Case(16, 30, 2, 2, kv_heads, causal=True, dtype=torch.float32, lengths=lengths)
    seconds, errors = bench.measure(case, which, torch.device("cpu"), rounds=2)
    assert "hf_flash" in seconds and all(time > 0 for time in seconds.values())
    assert all(error < 1e-4 for error in errors.values())


class Clocks:
    """A host and a device that only count seconds: launches cost the host time, and wait for it and for each other."""

    def __init__(self, launch, capturable=True):
        self.launch, self.capturable, self.host, self.device, self.recorded = launch, capturable, 0.0, 0.0, None

    def call(self, seconds):
        if self.recorded is not None:
            self.recorded.append(seconds)
        else:
            self.host += self.launch
            self.run(seconds)

    def run(self, seconds):
        self.device = max(self.device, self.host) + seconds

    @contextlib.contextmanager
    def graph(self, graph, **options):
        if not self.capturable:
            raise RuntimeError("operation not permitted when stream is capturing")
        graph.nodes = self.recorded = []
        yield
        self.recorded = None

    def install(self, monkeypatch):
        clocks = self

        class Event:
            def __init__(self, enable_timing):
                self.at = None

            def record(self):
                self.at = max(clocks.device, clocks.host)

            def synchronize(self):
                clocks.host = max(clocks.host, self.at)

            def elapsed_time(self, end):
                return (end.at - self.at) * 1e3

        class CUDAGraph:
            def replay(self):
                clocks.host += 1e-5
                clocks.run(sum(self.nodes))

        names = {"Event": Event, "CUDAGraph": CUDAGraph, "graph": self.graph, "current_stream": lambda: None}
        names |= {"synchronize": lambda: None, "_sleep": lambda cycles: self.run(cycles / 2e9)}
        for name, stand_in in names.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)


@pytest.mark.parametrize("capturable", [True, False])
@pytest.mark.parametrize("seconds, calls", [(2e-6, 20), (2e-4, 5), (6e-4, 2), (1.5e-3, 1), (2.5e-3, 1), (2e-2, 1)])
def test_no_time_of_the_host_s_counts(seconds, calls, capturable, monkeypatch):
    """Launching takes 1.5 ms: as long as the pause allows, and longer than most of these calls."""
    clocks = Clocks(1.5e-3, capturable)
    clocks.install(monkeypatch)
    timer = timing.Timer(lambda: clocks.call(seconds), torch.device("cuda"))
    assert timer.calls == (calls if capturable else 1)
    assert timer.start()() == pytest.approx(seconds)


@pytest.mark.parametrize("seconds", [1e-5, 4e-4, 2e-3, 2.9e-3, 4e-3])
def test_a_call_of_a_few_milliseconds_is_captured_and_no_longer_one(seconds, monkeypatch):
    """How long a launch takes does not matter to a captured call, be it longer than the pause."""
    clocks = Clocks(1e-3)
    clocks.install(monkeypatch)
    timer = timing.Timer(lambda: clocks.call(seconds), torch.device("cuda"))
    clocks.launch = 5e-3
    assert (timer.start()() == pytest.approx(seconds)) == (seconds < 3e-3)


@pytest.mark.parametrize("capturable", [True, False])
def test_what_a_call_reads_lives_as_long_as_its_timer(capturable, monkeypatch):
    """A graph holds addresses: a replay after the inputs were freed would read what others put there, or nothing."""
    clocks = Clocks(1e-3, capturable)
    clocks.install(monkeypatch)
    inputs = torch.zeros(1)
    alive = weakref.ref(inputs)
    timer = timing.Timer(lambda x=inputs: clocks.call(1e-4 + x.item()), torch.device("cuda"))
    del inputs
    assert alive() is not None and timer.start()() == pytest.approx(1e-4)
    del timer
    assert alive() is None


@pytest.mark.parametrize("head_dims, columns", [((64,), 2), ((64, 80, 128, 256), 4), ((64, 80, 96, 128, 256), 5)])
def test_a_plot_has_five_panels_in_a_row_at_most_and_names_every_contender(head_dims, columns, tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    rows = [
        bench.row_of(bench.Case(head_dim, seq, causal=causal), which, {"hf_flash": 1.0, which: 2.0})
        for which in ("forward", "backward")
        for head_dim in head_dims
        for causal in (False, True)
        for seq in (512, 1024)
        if (which, head_dim, causal) != ("backward", 64, True)
    ]
    bench.draw(rows, tmp_path / "plot.png", "title")
    monkeypatch.undo()
    (figure,) = drawn
    panels = [axis for axis in figure.axes if axis.get_visible()]
    titles = [axis.get_title() for axis in panels]
    assert len(titles) == len(set(titles)) == 4 * len(head_dims) - 1
    assert figure.axes[0].get_gridspec().ncols == columns
    for row in {axis.get_subplotspec().rowspan.start for axis in panels}:
        assert len({a.get_title().split(",")[0] for a in panels if a.get_subplotspec().rowspan.start == row}) == 1
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"hf_flash", "forward", "backward"}
    pyplot.close(figure)


@pytest.mark.gpu
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_on_a_gpu_every_contender_is_replayed_from_a_graph(which):
    device = torch.device("cuda")
    case = bench.Case(64, 512, 2, 4, causal=True)
    with timing.side_stream(device):
        *inputs, grad_out = case.inputs(device)
        call, _ = bench.prepare(bench.ours(case), which, *inputs, grad_out)
        timer = timing.Timer(call, device, target=1.0)  # long enough for several calls, however busy the GPU
        assert timer.calls > 1 and 1e-7 < timer.start()() < 1e-2
    seconds, errors = bench.measure(case, which, device, rounds=3)
    assert {"hf_flash", "fa2"} <= set(seconds) and errors["hf_flash"] <= bench.TOLERANCE
    assert timing.ceilings(device, 3)["matmul_tflops"] > 10


@pytest.mark.gpu
def test_on_a_gpu_a_slow_launch_is_not_in_the_time():
    """A call that the host takes a millisecond and a half to launch, and the device a few microseconds to run."""
    device, x = torch.device("cuda"), torch.zeros(1024, device="cuda")

    def call():
        time.sleep(1.5e-3)
        x.add_(1)

    with timing.side_stream(device):
        timer = timing.Timer(call, device)
        assert timer.calls > 1 and timer.start()() < 1e-3
        assert timing.Timer(lambda: x.sum().item(), device).calls == 1  # waits for the device: not capturable


def test_a_wrong_or_failing_contender_is_not_timed():
    case = bench.Case(16, 30, 2, 2, dtype=torch.float32)

    def broken(q, k, v):
        raise RuntimeError("no kernel\nfor this")

    found = {"wrong": lambda q, k, v: q + 1, "nan": lambda q, k, v: q * float("nan"), "broken": broken}
    seconds, errors = bench.measure(case, "forward", torch.device("cpu"), found, rounds=1)
    assert not seconds and errors["broken"] == "no kernel" and errors["wrong"] > bench.TOLERANCE
    bad, _ = attention_benchmark.complaints(errors)
    assert set(bad) == set(found)


def test_contenders_take_turns_in_random_order():
    order = []

    class Fake:
        def __init__(self, name):
            self.name = name

        def start(self):
            order.append(self.name)
            return lambda: 1.0

    seconds = timing.take_turns({name: Fake(name) for name in "abcd"}, rounds=8)
    assert {len(times) for times in seconds.values()} == {8}
    rounds = ["".join(order[i : i + 4]) for i in range(0, len(order), 4)]
    assert all(sorted(r) == list("abcd") for r in rounds) and len(set(rounds)) > 3


def test_a_contender_whose_process_crashes_loses_its_own_figures_alone(monkeypatch):
    """For the next case it is started again."""
    monkeypatch.setattr(contenders.Isolated, "method", "fork")  # quicker, and here is no CUDA
    device, case = torch.device("cpu"), bench.Case(16, 30, 2, 2, dtype=torch.float32)
    entrants = {"hf_flash": contenders.Contender("hf_flash", device), "sdpa": contenders.Isolated("sdpa", device)}
    peer, start, turns = entrants["sdpa"], entrants["sdpa"].start, []

    def crash_in_the_second_turn():
        turns.append(1)
        if len(turns) == 2:
            peer.process.kill()
        return start()

    try:
        peer.start = crash_in_the_second_turn
        seconds, errors = attention_benchmark.measure(entrants, "forward", case, rounds=3)
        assert set(seconds) == {"hf_flash"} and "crashed" in errors["sdpa"]
        peer.start = start
        seconds, errors = attention_benchmark.measure(entrants, "forward", case, rounds=2)
        assert set(seconds) == {"hf_flash", "sdpa"} and max(errors.values()) < 1e-4
    finally:
        peer.close()


def test_a_contender_without_its_package_is_named_and_left_out(capsys):
    assert not attention_benchmark.enlist(["fa4"], torch.device("cpu"), isolate=False)
    assert "fa4 is left out: flash_attn.cute: No module" in capsys.readouterr().err


def test_the_attention_benchmark_runs_small_on_the_cpu(tmp_path):
    arguments = "--grid all --head-dims 16 --seqs 32,64 --tokens 64 --rounds 1 --dtype float32 --device cpu --output"
    assert attention_benchmark.main([*arguments.split(), str(tmp_path)]) == 0
    kept = record.load(tmp_path / "cpu.json")
    assert len(kept["decode"]) == len(
        {(r["batch"], r["cached"], *map(r.get, ("heads", "kv_heads", "head_dim"))) for r in kept["decode"]}
    )
    assert {row["pass"] for row in kept["attention"]} == {"forward", "backward"}
    assert any(row.get("varlen") for row in kept["attention"]) and not any("errors" in row for row in kept["attention"])
    assert json.loads(json.dumps(kept)) == kept


def test_the_models_benchmark_runs_small_on_the_cpu(tmp_path):
    import losses
    import models

    arguments = "--rows bert,llama-1b/packed,llama-1b/generate --turns 1 --steps 1 --new-tokens 2 --device cpu"
    assert models.main([*arguments.split(), "--modes", "hf_flash,sdpa", "--output", str(tmp_path)]) == 0
    kept = record.load(tmp_path / "cpu.json")["models"]
    assert all(set(row["tokens_per_s"]) == {"hf_flash", "sdpa"} for row in kept)
    assert any("step_ms" in row for row in kept)
    assert models.main(["--longest", "--modes", "hf_flash,eager", "--device", "cpu", "--output", str(tmp_path)]) == 0
    assert record.load(tmp_path / "cpu.json")["models"][-1]["longest"] == {"hf_flash": 128, "eager": 128}
    arguments = "--rows codegen --steps 2 --kinds hf_flash,sdpa --device cpu --output"
    losses.main([*arguments.split(), str(tmp_path)])
    found = record.load(tmp_path / "cpu.json")["models"][-1]["losses"]
    assert found["hf_flash"] == pytest.approx(found["sdpa"], abs=0.02)


def test_liger_serves_the_mode_that_names_it_and_no_later_one(monkeypatch):
    import workloads
    from transformers.models.llama import modeling_llama

    def apply(model):
        modeling_llama.LlamaRMSNorm = modeling_llama.apply_rotary_pos_emb = None

    stand_in = ModuleType("liger_kernel.transformers")
    stand_in._apply_liger_kernel_to_instance = apply
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", stand_in)
    row = workloads.shrunk(workloads.Row("llama-1b", "train", 1, 4096, 1))
    names = "LlamaRMSNorm", "apply_rotary_pos_emb"
    before = [getattr(modeling_llama, name) for name in names]
    workloads.build(row, "sdpa+liger", torch.device("cpu"), True)
    assert [getattr(modeling_llama, name) for name in names] == [None, None]
    workloads.build(row, "sdpa", torch.device("cpu"), True)
    assert [getattr(modeling_llama, name) for name in names] == before
    row = workloads.shrunk(workloads.Row("gpt2-355m", "train", 1, 4096, 1))
    report = hf_flash.report(workloads.build(row, "hf_flash+liger", torch.device("cpu"), True))
    assert "layers fused: 2 NewGELUActivation" in str(report)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes would share one GPU")
def test_the_multi_gpu_benchmark_runs_small_in_two_cpu_processes(tmp_path, capfd):
    import multi_gpu

    arguments = "--device cpu --steps 1 --cells sequences/gradients,sequences/train --output"
    assert multi_gpu.main([*arguments.split(), str(tmp_path)]) == 0
    (row,) = record.load(tmp_path / "cpu.json")["models"]
    assert (row["gpus"], row["sharing"]) == (2, "sequences") and row["tokens_per_s"]["hf_flash"] > 0
    assert row["gradients"]["shared"] < 3 * row["gradients"]["sdpa"]
    assert "2 sequences" in capfd.readouterr().out


def test_a_cell_that_fails_or_hangs_costs_itself_alone(tmp_path, monkeypatch, capsys):
    """Processes that only pretend: the first cell ends well, the second fails, the third hangs, the fourth is done."""
    import multi_gpu

    script = tmp_path / "worker.py"
    script.write_text(
        "import json, sys, time\njournal = open(sys.argv[1], 'a')\n"
        "def say(**entry): print(json.dumps(entry), file=journal, flush=True)\n"
        "for name, fate in (word.split('=') for word in sys.argv[2:]):\n"
        "    say(begun=name)\n"
        "    if fate == 'fails':\n        say(failed=name, reason='out of memory')\n        sys.exit(1)\n"
        "    if fate == 'hangs':\n        time.sleep(60)\n"
        "    say(done=name)\n"
    )
    cells = [cell for cell in multi_gpu.CELLS if cell.sharing == "one"][:4]
    fates = dict(zip((cell.name for cell in cells), ("ends", "fails", "hangs", "ends")))

    def launch(sharing, left, options, journal):
        words = [f"{cell.name}={fates[cell.name]}" for cell in left]
        return subprocess.Popen([sys.executable, script, journal, *words], start_new_session=True)

    monkeypatch.setattr(multi_gpu, "launch", launch)
    monkeypatch.setattr(multi_gpu, "CELLS", cells)
    arguments = ["--device", "cpu", "--seconds", "1.5", "--output", str(tmp_path)]
    monkeypatch.setattr(multi_gpu, "shrunk", lambda row: row)
    assert multi_gpu.main(arguments) == 1
    errors = [row["errors"] for row in record.load(tmp_path / "cpu.json")["models"]]
    assert errors == [{"sdpa": "out of memory"}, {"hf_flash": "not done within 1.5 s"}]
    assert f"not measured: {cells[1].name}, {cells[2].name}" in capsys.readouterr().out


def test_modes_are_put_beside_their_like():
    import models

    results = {mode: [{"tokens_per_s": 1.0}] for mode in ("hf_flash", "sdpa", "hf_flash+compile", "hf_flash+graphs")}
    results["sdpa+static"] = [{"tokens_per_s": 2.0}, {"tokens_per_s": 4.0}]
    plain, compiled, captured = models.record_rows(models.ROWS[0], results, {"eager": "out of memory"})
    assert "with" not in plain and set(plain["tokens_per_s"]) == {"hf_flash", "sdpa"} and "eager" in plain["errors"]
    assert compiled["with"] == "compile" and set(compiled["tokens_per_s"]) == {"hf_flash"}
    assert captured["with"] == "captured step" and captured["tokens_per_s"] == {"hf_flash": 1.0, "sdpa": 3.0}


def test_what_runs_out_of_time_is_noted_and_the_rest_goes_on():
    import models

    with pytest.raises(models.OutOfTime), models.time_limit(0.05):
        while True:
            pass
    with models.time_limit(5):
        pass
