"""benchmarks/losses.py trains a patched model beside stock on real data and says how far apart they are."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import losses  # noqa: E402
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
