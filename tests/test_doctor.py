"""python -m hf_flash doctor: what it finds, and the one thing it tells to do about what is missing."""

import subprocess
import sys

import pytest
import torch

from hf_flash import __main__, bench, doctor, library

STATUS = library.Status(True, "/somewhere/libhf_flash.so", "80;90a+PTX")


@pytest.mark.parametrize(
    "architectures, capability, expected",
    [
        ("80;90a", 80, True),
        ("80;90a", 86, True),
        ("80;90a", 90, True),
        ("80;90a", 100, False),
        ("80;90a+PTX", 120, True),
        ("86", 80, False),
        ("90a", 80, False),
        ("100", 120, False),
        ("", 80, False),
    ],
)
def test_which_gpus_a_library_serves(architectures, capability, expected):
    assert doctor.serves(architectures, capability) is expected


def pretend_gpu(monkeypatch, major, minor, architectures):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, minor))
    monkeypatch.setattr(library, "status", lambda: STATUS._replace(architectures=architectures))
    return doctor.kernels()


@pytest.mark.parametrize(
    "gpu, architectures, remedy",
    [
        ((9, 0), "80;90a", ""),
        ((8, 9), "80;90a", ""),
        ((9, 0), "80;90", "HF_FLASH_ARCHS=9.0a"),
        ((12, 0), "80;90a", "HF_FLASH_ARCHS=12.0"),
        ((12, 0), "80;90a+PTX", ""),
    ],
)
def test_a_library_for_other_gpus_has_a_remedy(monkeypatch, gpu, architectures, remedy):
    found = pretend_gpu(monkeypatch, *gpu, architectures).remedy
    assert remedy in found and bool(remedy) == bool(found)


def test_a_missing_library_has_one_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_FLASH_LIBRARY", str(tmp_path / "none.so"))
    library.reload()
    try:
        finding = doctor.kernels()
    finally:
        monkeypatch.undo()
        library.reload()
    assert "none.so" in finding.text and finding.remedy


def test_without_transformers_the_remedy_is_the_extra(monkeypatch):
    present = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: None if name == "transformers" else present(name))
    assert "hf_flash[hf]" in doctor.versions().remedy
    assert "none" in doctor.families().text


def test_the_self_test_notices_a_wrong_result(monkeypatch):
    right = doctor.flash_attn_func
    monkeypatch.setattr(doctor, "flash_attn_func", lambda *a, **k: right(*a, **k) * 1.001)
    assert doctor.self_test().text.startswith("WRONG")

    def broken(*_, **__):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(doctor, "flash_attn_func", broken)
    assert "no kernel" in doctor.self_test().text


def test_the_self_test_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    doctor.self_test()
    assert torch.equal(before, torch.get_rng_state())


def test_doctor_says_everything_in_a_few_lines_and_passes():
    done = subprocess.run([sys.executable, "-m", "hf_flash", "doctor"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    topics = [line.split()[0] for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert topics == ["versions", "GPU", "kernels", "models", "self-test"]
    assert "passed" in done.stdout and len(done.stdout.splitlines()) <= 10


def test_bench_prints_a_table_and_draws_a_plot(tmp_path, capsys):
    plot = tmp_path / "plot.png"
    arguments = ["--head-dims", "16", "--seqs", "32,64", "--rounds", "2", "--device", "cpu", "--plot", str(plot)]
    assert __main__.main(["bench", *arguments]) == 0
    said = capsys.readouterr().out
    assert "hf_flash" in said and "sdpa" in said and "backward" in said
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_table_marks_the_fastest():
    row = bench.row_of(bench.Case(64, 128), "forward", {"hf_flash": 1e-3, "fa2": 2e-3})
    line = bench.table([row]).splitlines()[1].split()
    assert [cell.endswith("*") for cell in line[-2:]] == [True, False]


def test_an_unknown_command_shows_the_usage(capsys):
    assert __main__.main(["frobnicate"]) == 2
    assert "usage" in capsys.readouterr().err
    assert __main__.main(["--help"]) == 0
