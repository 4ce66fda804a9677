"""Training under torch.compile(fullgraph=True). One graph also means that nothing in it waits for the host: whatever
reads a value from the device breaks the graph."""

import pytest
import torch
import transformers
from families import assert_gradients_close, make, tokens

import hf_flash

transformers.logging.set_verbosity_error()


def batch(kind, length):
    lengths = [length // 3, length // 2, length - length // 3 - length // 2]
    if kind == "padded":
        mask = (torch.arange(length) < torch.tensor([[length], *([n] for n in lengths)])).long()
        ids = tokens(4, length)
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = tokens(1, length)
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("llama", "padded"), ("gpt2", "packed")])
def test_batches_of_changing_lengths_train_in_one_graph_without_compiling_again(name, kind):
    layers = {"num_hidden_layers": 1, "n_layer": 1}
    eager, model = (hf_flash.patch_model(make(name, **layers)).train() for _ in range(2))
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for step, length in enumerate((12, 31, 17, 40, 9)):
        given = {**batch(kind, length), "use_cache": False}
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            loss = compiled(**given).loss
        expected = eager(**given).loss
        torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
        for each, value in ((model, loss), (eager, expected)):
            each.zero_grad()
            value.backward()
        assert_gradients_close(model, eager)
    report = hf_flash.report(model)
    assert all(row.fused and row.reason == "compiled" for row in report)
    assert (kind == "padded") == ("inside attention only: torch.compile keeps static sizes (compiled)" in str(report))


def test_batches_without_padding_run_in_one_graph_for_every_length():
    model = hf_flash.patch_model(make("llama", num_hidden_layers=1))
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for step, length in enumerate((12, 31, 9)):
        ids = tokens(2, length)
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=step > 0):
            torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_a_compiled_call_that_takes_the_stock_path_is_reported():
    model = hf_flash.patch_model(make("llama", num_hidden_layers=1))
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    dense = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    for _ in range(2):
        with torch.no_grad():
            compiled(input_ids=tokens(1, 9), attention_mask=dense, use_cache=False)
    (row,) = hf_flash.report(model)
    assert row.fused is False and row.reason == "a dense attention mask was given (compiled)"
