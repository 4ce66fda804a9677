"""The examples run at small sizes, learn, and agree with stock; the launch configurations start two processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))
import bert_classify  # noqa: E402
import common  # noqa: E402
import finetune  # noqa: E402
import generate  # noqa: E402
import launched  # noqa: E402
import lora_long_context  # noqa: E402


def test_byte_tokens_are_the_bytes_and_come_back():
    tokenizer = common.byte_tokenizer()
    text = 'def f(x):\n\treturn "é – 漢" + x  # \x00\x7f'
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text
    batch = tokenizer(["ab", "a"], padding=True, return_tensors="pt")
    assert batch["input_ids"].tolist() == [[97, 98], [common.PAD, 97]]
    assert batch["attention_mask"].tolist() == [[1, 1], [0, 1]]


def test_the_standard_library_is_text_enough():
    text = common.standard_library(1 << 20)
    assert len(text) == 1 << 20 and b"import" in bytes(text[:100000].tolist())


@pytest.mark.parametrize("fill", [0.3, 0.6, 1.0])
def test_ragged_lengths_have_the_fill_asked_for(fill):
    lengths = common.ragged_lengths(64, 1000, fill, torch.Generator().manual_seed(0))
    assert 2 <= lengths.min() and lengths.max() <= 1000
    assert lengths.float().mean().item() / 1000 == pytest.approx(fill, abs=0.05)


SMALL = ["--steps", "6", "--batch", "4", "--seq", "48"]


def test_finetuning_learns_and_agrees_with_stock(capsys, tmp_path):
    results = finetune.main([*SMALL, "--steps", "12", "--compare", "--generate", "--output", str(tmp_path / "saved")])
    patched, stock = results["patched"][0], results["stock"][0]
    assert patched[-1] < patched[0] - 0.5
    assert patched == pytest.approx(stock, abs=1e-4)
    said = capsys.readouterr().out
    assert "def main(" in said and "CodeGenAttention" in said and "times the tokens/s" in said
    # What was saved is a stock model that goes on from there.
    again = finetune.main([*SMALL, "--steps", "1", "--model", str(tmp_path / "saved")])
    assert again["patched"][0][0] < patched[0] - 0.5


def test_generation_agrees_with_stock_and_streams(capsys, tmp_path):
    finetune.main([*SMALL, "--output", str(tmp_path)])
    capsys.readouterr()
    arguments = ["--prompts", "3", "--prompt-tokens", "24", "--new-tokens", "6", "--repeats", "1"]
    generate.main([*arguments, "--model", str(tmp_path)])
    said = capsys.readouterr().out
    assert "100% of the greedy tokens are the same" in said and "GB/s read" in said


def test_classification_agrees_with_stock(capsys):
    results = bert_classify.main(["--steps", "3", "--batch", "4", "--seq", "48"])
    assert results["patched"][0] == pytest.approx(results["stock"][0], abs=1e-4)
    assert "accuracy" in capsys.readouterr().out


def test_prose_and_program_text_differ():
    text = bert_classify.prose()
    assert len(text) > 100_000 and "statement" in text


def test_the_longest_context_is_found_and_drawn(tmp_path, monkeypatch):
    """Memory is pretended: patched grows with the length, eager with its square."""
    real = lora_long_context.try_context

    def measured(model, optimizer, accelerator, ids, context, options):
        if context == 64:
            return real(model, optimizer, accelerator, ids, context, options)
        eager = model.config._attn_implementation == "eager"
        gib = context**2 / 1e6 if eager else context / 1e3
        return gib <= options.memory_gib, gib, 1.0, 1.0

    monkeypatch.setattr(lora_long_context, "try_context", measured)
    arguments = "--kinds patched,eager --start 64 --limit 1024 --steps 1 --refine 2 --memory-gib 0.5 --plot"
    results = lora_long_context.main([*arguments.split(), str(tmp_path / "plot.png")])
    assert results["patched"][64][3] == pytest.approx(results["eager"][64][3], abs=1e-4)
    assert lora_long_context.longest(results["patched"]) == 448
    assert lora_long_context.longest(results["eager"]) == 640
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_launch_configurations_are_read_by_accelerate(name):
    from accelerate.commands.config.config_args import load_config_from_file

    path = EXAMPLES / "accelerate" / f"{name}.yaml"
    config = load_config_from_file(str(path))
    assert config.num_processes == 2
    assert yaml.safe_load(path.read_text())["distributed_type"] == str(config.distributed_type.value)


@pytest.mark.gpu
def test_finetuning_and_generation_agree_with_stock_on_a_gpu(tmp_path, capsys):
    results = finetune.main([*SMALL, "--compare", "--output", str(tmp_path)])
    assert results["patched"][0] == pytest.approx(results["stock"][0], rel=0.02)
    generate.main("--prompts 3 --prompt-tokens 24 --new-tokens 4 --repeats 1 --model".split() + [str(tmp_path)])
    assert "times the tokens/s" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="one of the two sides would run on the GPU")
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_two_processes_have_the_losses_of_one(name, tmp_path):
    config = EXAMPLES / "accelerate" / f"{name}.yaml"
    command = ["-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", "0"]
    command += [Path(launched.__file__), tmp_path, *(["--shard"] if name == "fsdp2" else [])]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    two = json.loads((tmp_path / "results.json").read_text())
    for way in launched.WAYS:
        tolerance = 0.02 if way == "autocast" else 1e-4
        assert two[way] == pytest.approx(launched.losses_of(way), abs=tolerance), way
    assert two["contexts"] == pytest.approx(launched.losses_of_contexts(), abs=0.02)  # the configurations ask for bf16
