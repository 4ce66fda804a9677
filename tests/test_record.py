"""The record: whose rows it holds, how runs are merged, and what README makes of it."""

import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import readme as readme_tables  # noqa: E402
import record  # noqa: E402


def attention_row(seq=1024, which="forward", **tflops):
    return {"pass": which, "dtype": "bfloat16", "head_dim": 64, "causal": True, "batch": 16, "seq": seq, "heads": 32,
            "kv_heads": 32, "tflops": tflops}  # fmt: skip


@pytest.fixture
def full():
    return {
        "source": record.source_hash(),
        "gpu": "NVIDIA H200",
        "torch": "2.11",
        "transformers": "5.24.0",
        "date": "2026-01-01",
        "runs": {"a": {"matmul_tflops": 777.0, "copy_tb_s": 4.23}},
        "tests": {"passed": 10, "failed": 0, "skipped": 1},
        "attention": [
            attention_row(1024, hf_flash=300.0, fa2=150.0, cudnn=200.0),
            attention_row(2048, hf_flash=400.0, cudnn=400.0),
            attention_row(4096, "backward", hf_flash=500.0, hf_flash_portable=300.0, cudnn=250.0),
        ],
        "decode": [
            {"batch": 1, "cached": 32768, "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16",
             "us": {"hf_flash": 50.0, "cudnn": 75.0}, "tb_s": {"hf_flash": 2.7, "cudnn": 1.8}}
        ],
        "models": [
            {"model": "llama-1b", "task": "train", "batch": 4, "seq": 4096, "fill": 0.6,
             "errors": {"eager": "out of memory"}, "tokens_per_s": {"hf_flash": 60000.0, "sdpa": 30000.0},
             "peak_gib": {"hf_flash": 20.0, "sdpa": 36.0}},
            {"model": "llama-1b", "task": "generate", "batch": 8, "seq": 8192, "fill": 0.75,
             "prefill_ms": {"hf_flash": 200.0, "sdpa": 510.0}, "step_ms": {"hf_flash": 8.0, "sdpa": 20.0},
             "tokens_per_s": {"hf_flash": 1000.0, "sdpa": 400.0}},
        ],
    }  # fmt: skip


def test_the_hash_changes_with_any_source_and_with_nothing_else(tmp_path):
    for folder, name in (("csrc", "a.cu"), ("hf_flash", "b.py")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("1")
    first = record.source_hash(tmp_path)
    (tmp_path / "hf_flash" / "libhf_flash.so").write_bytes(b"x")
    (tmp_path / "README.md").write_text("x")
    assert record.source_hash(tmp_path) == first
    (tmp_path / "csrc" / "a.cu").write_text("2")
    second = record.source_hash(tmp_path)
    (tmp_path / "csrc" / "a.cu").rename(tmp_path / "csrc" / "c.cu")
    assert len({first, second, record.source_hash(tmp_path)}) == 3


def test_check_tells_a_current_record_from_a_stale_one(tmp_path, full, capsys):
    assert record.main(["--check", "--output", str(tmp_path)]) == 2
    record.save(full, tmp_path / "h200.json")
    assert record.main(["--check", "--output", str(tmp_path)]) == 0
    assert "current: h200.json: NVIDIA H200" in capsys.readouterr().out
    record.save({**full, "source": "other"}, tmp_path / "h200.json")
    assert record.main(["--check", "--output", str(tmp_path)]) == 1
    assert "stale" in capsys.readouterr().out


@pytest.mark.parametrize(
    "gpu, name", [("NVIDIA H200", "h200.json"), ("NVIDIA GeForce RTX 4090", "rtx-4090.json"), ("CPU", "cpu.json")]
)
def test_a_gpu_s_record_is_named_after_it(gpu, name):
    assert record.record_name(gpu) == name


def test_a_newer_row_replaces_the_older_of_the_same_case():
    old = [{**attention_row(hf_flash=1.0, fa2=2.0), "run": "a"}, {**attention_row(2048, hf_flash=3.0), "run": "a"}]
    rows = record.combine(old, [{**attention_row(hf_flash=4.0), "run": "b"}])
    assert [row["tflops"] for row in rows] == [{"hf_flash": 4.0}, {"hf_flash": 3.0}]
    # What the newer run did not measure at all stays.
    rows = record.combine(
        [{**attention_row(hf_flash=1.0), "us": {"a": 1}, "run": "a"}], [{**attention_row(), "run": "b"}]
    )
    assert rows[0]["us"] == {"a": 1}
    # Contenders of one run stand side by side.
    rows = record.combine(old, [{**attention_row(hf_flash=4.0), "run": "a"}])
    assert rows[0]["tflops"] == {"hf_flash": 4.0, "fa2": 2.0}


def test_records_of_different_sources_are_not_merged(full):
    with pytest.raises(ValueError, match="different sources"):
        record.merge([full, {**full, "source": "other"}])


def test_merging_keeps_every_section(tmp_path, full):
    parts = [{k: v for k, v in full.items() if k not in ("models", "tests")}]
    parts += [{k: v for k, v in full.items() if k not in ("attention", "decode")}]
    for index, part in enumerate(parts):
        record.save(part, tmp_path / f"part{index}.json")
    files = [str(tmp_path / f"part{index}.json") for index in range(2)]
    assert record.main(["merge", *files, "--output", str(tmp_path / "h200.json")]) == 0
    assert record.load(tmp_path / "h200.json") == full


def test_rows_of_other_sources_are_dropped_when_a_run_begins(tmp_path, full, capsys):
    record.save({**full, "source": "other"}, tmp_path / "cpu.json")
    recorder = record.Recorder(tmp_path, "cpu", {"matmul_tflops": 1.0, "copy_tb_s": 0.1})
    recorder.add("attention", attention_row(hf_flash=1.0))
    kept = record.load(tmp_path / "cpu.json")
    assert len(kept["attention"]) == 1 and "models" not in kept and "dropped" in capsys.readouterr().err
    assert kept["runs"][kept["attention"][0]["run"]]["matmul_tflops"] == 1.0


def test_junit_counts_are_split_by_sanitizer(tmp_path):
    (tmp_path / "junit.xml").write_text(
        '<testsuites><testsuite><testcase name="test_a"/><testcase name="test_b"><failure/></testcase>'
        '<testcase name="test_c"><skipped/></testcase><testcase name="test_clean[memcheck-forward]"/>'
        '<testcase name="test_clean[racecheck-forward]"><error/></testcase></testsuite></testsuites>'
    )
    tests, sanitizer = record.count_tests(tmp_path / "junit.xml")
    assert tests == {"passed": 2, "failed": 2, "skipped": 1}
    assert sanitizer["memcheck"]["passed"] == 1 and sanitizer["racecheck"]["failed"] == 1


def test_a_suite_that_runs_out_of_time_keeps_what_it_counted(tmp_path, monkeypatch):
    suite, begun = tmp_path / "test_slow.py", tmp_path / "begun"
    suite.write_text(
        f"import pathlib, time\ndef test_quick(): pass\ndef test_slow():\n    pathlib.Path({str(begun)!r}).touch()\n"
        "    time.sleep(600)\n"
    )

    class Popen(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout == 6:  # the suite's limit: up when the second test has begun
                while not begun.exists() and self.poll() is None:
                    time.sleep(0.01)
                raise subprocess.TimeoutExpired(self.args, timeout)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    recorder = record.Recorder(tmp_path, "cpu")
    options = f"-m 'not gpu' -p no:cacheprovider --rootdir {tmp_path} {suite}"
    assert record.run_suite(recorder, shlex.split(options), 6 / 60, add=False) == 124
    kept = record.load(tmp_path / "cpu.json")["tests"]
    assert (kept["passed"], kept["failed"], kept["unfinished"]) == (1, 0, 1)


def test_parts_of_the_suite_add_up():
    a = {"passed": 1, "failed": 2}
    assert record.add_counts(a, {"passed": 3, "skipped": 1}) == {"passed": 4, "failed": 2, "skipped": 1}
    assert record.add_counts({}, {"memcheck": a}) == {"memcheck": a}
    assert record.add_counts({"memcheck": a}, {"memcheck": a})["memcheck"] == {"passed": 2, "failed": 4}


def test_the_tables_show_ratios_against_the_best_peer(full):
    table = readme_tables.attention_table(full["attention"], "forward")
    assert "| 64 | causal | 1024 (16) | 32/32 | **300** | – | 150 | 200 | – | – | 1.50 |" in table
    assert "Geometric mean of hf_flash over the best peer in each row: 1.22, least 1.00." in table
    assert "| 1 | 32,768 |" in readme_tables.decode_table(
        full["decode"]
    ) or "| 1 | 32768 |" in readme_tables.decode_table(full["decode"])
    assert readme_tables.decode_table(full["decode"]).rstrip().endswith("| 2.70 | 1.50 |")
    models = readme_tables.models_table(full["models"])
    assert "60.0 ktok/s, 20 GiB | 30.0 ktok/s, 36 GiB | out of memory | 2.00 |" in models
    assert "200 / 8.0 ms | 510 / 20.0 ms | – | 2.50 |" in models


def test_several_gpus_stand_beside_one_and_apart_from_the_other_models(full):
    case = {"model": "llama-1b", "task": "train", "batch": 8, "seq": 4096, "fill": 0.6}
    speed = {"tokens_per_s": {"hf_flash": 60000.0, "sdpa": 30000.0}, "peak_gib": {"hf_flash": 20.0, "sdpa": 36.0}}
    rows = [
        {**case, "gpus": 1, "sharing": "one", **speed, "losses": {"hf_flash": [5.0, 4.0]}},
        {**case, "gpus": 2, "sharing": "fsdp2", **speed, "losses": {"hf_flash": [5.001, 3.998]}},
        {**case, "gpus": 2, "sharing": "ddp", "errors": {"hf_flash": "not done within 60 s"}},
        {**case, "gpus": 2, "sharing": "sequences", "gradients": {"shared": 0.004, "sdpa": 0.005}},
        {**case, "task": "longest context", "gpus": 2, "sharing": "sequences", "longest": {"hf_flash": 98304}},
    ]
    table = readme_tables.gpus_table(rows + full["models"])
    assert (
        "| llama-1b | 2 GPUs, fsdp2 | 8 × 4096, fill 0.6 | 60.0 ktok/s, 20 GiB | 30.0 ktok/s, 36 GiB | 2.00 | 0.0020 |"
        in table
    )
    assert "| 2 GPUs, ddp | 8 × 4096, fill 0.6 | not done within 60 s | – | – | – |" in table
    assert "differ from one GPU's by 0.4% of their norm; stock sdpa's on one GPU by 0.5%." in table
    assert "(llama-1b, LoRA, 2 GPUs, sequences): 98,304 tokens." in table
    assert readme_tables.models_table(rows + full["models"]) == readme_tables.models_table(full["models"])


def test_the_sentences_below_a_table_say_what_it_has_no_column_for():
    tflops = {"hf_flash": 600.0, "hf_flash_portable": 270.0, "hf_flash_deterministic": 500.0, "fa2": 300.0}
    rows = [{**attention_row(16384, "backward", **tflops), "causal": causal, "of_matmul": 0.75} for causal in (0, 1)]
    said = readme_tables.attention_table(rows, "backward")
    assert "over the best peer in each row: 2.00" in said and "Portable kernels over fa2: 0.90, least 0.90." in said
    assert "Deterministic gradients take 1.20 times as long, at most 1.20." in said
    assert "Share of the bf16 product's rate at 16384 tokens, full, by head dim: 64: 75%." in said


def test_readme_is_written_from_the_record(tmp_path, full, monkeypatch):
    readme = tmp_path / "README.md"
    marks = (*readme_tables.PARTS, "adapters")
    readme.write_text("top\n" + "".join(f"<!-- {mark} -->\nold\n<!-- /{mark} -->\n" for mark in marks) + "end\n")
    monkeypatch.setattr(readme_tables, "draw_plots", lambda *_: {})
    readme_tables.write_readme(None, readme)
    assert readme.read_text().count("Not yet recorded.") == 5 and "old" not in readme.read_text()
    record.save(full, tmp_path / "h200.json")
    readme_tables.write_readme(tmp_path / "h200.json", readme)
    text = readme.read_text()
    assert "777 TFLOP/s" in text and "10 passed" in text and "llama" in text and "stale" not in text
    assert text.startswith("top\n") and text.endswith("end\n")
    record.save({**full, "source": "other"}, tmp_path / "h200.json")
    readme_tables.write_readme(tmp_path / "h200.json", readme)
    assert "stale" in readme.read_text()


def test_readme_shows_the_record_and_the_adapters_of_this_tree():
    text = (ROOT / "README.md").read_text()
    path = record.find_record()
    loaded = record.load(path) if path else None
    stale = bool(loaded) and loaded["source"] != record.source_hash()
    plots = {}
    for which in ("forward", "backward"):
        if loaded and (path.parent / f"{which}.png").exists():
            plots[which] = (path.parent / f"{which}.png").relative_to(ROOT).as_posix()
    expected = readme_tables.fill(text, "adapters", readme_tables.features_table(readme_tables.adapters()))
    for name, content in readme_tables.readme_parts(loaded, stale, plots).items():
        if not name.startswith("record:facts"):  # these say whether the record is stale, which any edit changes
            expected = readme_tables.fill(expected, name, content)
    assert expected == text, "run: python benchmarks/readme.py"
