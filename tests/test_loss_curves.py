"""What the benchmarks say of fine-tuning: losses beside stock and its noise, and the plot of contexts."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import losses  # noqa: E402
import readme  # noqa: E402
import record  # noqa: E402


def test_a_patched_model_is_no_farther_from_stock_than_stock_from_itself(tmp_path, capsys):
    found = losses.main(["--rows", "llama-1b/train/4x4096", "--steps", "3", "--output", str(tmp_path)])
    (curves,) = found.values()
    _, distances = losses.summary(curves)
    noise = max(distances["noise, another kernel"], distances["noise, bf16 from fp32"])
    assert distances["patched from stock"] <= noise
    assert "patched from stock" in capsys.readouterr().out
    (row,) = record.load(tmp_path / "cpu.json")["models"]
    assert row["losses"] == curves and all(len(values) == 3 for values in curves.values())


def test_a_kind_that_cannot_run_is_left_out_of_the_comparison():
    curves = {"hf_flash": [1.0, float("nan")], "sdpa": "not offered", "eager": [1.5, float("nan")], "fp32": "memory"}
    lines, distances = losses.summary(curves)
    assert distances == {"patched from stock": pytest.approx(0.5)} and lines[1][-1] == "not offered"


def test_memory_and_speed_against_context_are_drawn_from_the_record(tmp_path):
    contexts = {"hf_flash": [[2048, 1.0, 900.0], [8192, 3.0, 800.0]], "eager": [[2048, 4.0, 300.0]]}
    row = {"model": "llama-1b", "task": "longest context", "longest": {"hf_flash": 8192}, "contexts": contexts}
    plots = readme.draw_plots({"gpu": "A GPU", "models": [row]}, tmp_path)
    assert (tmp_path / "contexts.png").read_bytes().startswith(b"\x89PNG")
    assert f"({plots['contexts']})" in readme.models_table([row], plots)
