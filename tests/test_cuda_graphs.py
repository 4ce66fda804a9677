"""Captured decoding steps, with a stand-in that records operations and replays them as a CUDA graph does."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from families import CAUSAL, VERSION, make, pair, tokens
from replay import Recorder
from test_generation import generate, prompt

import hf_flash
from hf_flash import graphs


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(graphs, "CAPTURE", Recorder())
    return graphs.CAPTURE


def graphed(name, kept=True, **changes):
    return make(name, **changes), hf_flash.patch_model(make(name, **changes), cuda_graphs=kept)


def notes(model):
    return [note for note in hf_flash.report(model).notes if "decoding steps" in note]


@pytest.mark.parametrize("name", [*CAUSAL, "qwen3"])
def test_replayed_steps_give_the_tokens_of_stock(name, recorder):
    stock, ours = graphed(name)
    for kind in ("left", "full"):  # one batch size: the second prompt finds the graph of the first
        ids, mask = prompt(kind)
        expected = generate(stock, ids, mask, do_sample=False)
        assert torch.equal(generate(ours, ids, mask, do_sample=False), expected), kind
    assert len(recorder.recorded) == 1 and recorder.replays == 2 * 11
    assert notes(ours) == ["decoding steps replayed from CUDA graphs (22x)"]


def test_sampling_stops_and_streams_as_without_graphs(recorder):
    stock, ours = graphed("llama")
    ids, mask = prompt("left")
    sampled = [generate(model, ids, mask, do_sample=True, top_k=0, num_return_sequences=2) for model in (stock, ours)]
    assert torch.equal(*sampled)
    end = int(generate(stock, ids, mask, do_sample=False)[0, 15])
    ended = []
    for model in (stock, ours):
        ended.append(model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=end))
    assert torch.equal(*ended) and recorder.replays > 11


def test_a_graph_serves_prompts_of_other_lengths_and_weights_that_moved_on(recorder):
    stock, ours = graphed("llama")
    for length, scale in ((9, 1.0), (12, 1.5), (7, 0.5)):
        for model in (stock, ours):
            for parameter in model.parameters():
                parameter.data.mul_(scale)
        ids = tokens(2, length)
        expected = generate(stock, ids, torch.ones_like(ids), 21 - length, do_sample=False)
        assert torch.equal(generate(ours, ids, torch.ones_like(ids), 21 - length, do_sample=False), expected)
    assert len(recorder.recorded) == 1
    ours.lm_head.weight = torch.nn.Parameter(torch.randn_like(ours.lm_head.weight))  # elsewhere: captured anew
    stock.lm_head.weight = ours.lm_head.weight
    expected = generate(stock, ids, torch.ones_like(ids), 14, do_sample=False)
    assert torch.equal(generate(ours, ids, torch.ones_like(ids), 14, do_sample=False), expected)
    assert len(recorder.recorded) == 2


def test_a_cache_that_generate_returned_is_left_alone_by_later_calls(recorder):
    ours = graphed("gptj")[1]
    name = "cache" if VERSION >= (5, 24) else "past_key_values"
    ids, mask = prompt("full")
    kept = generate(ours, ids, mask, do_sample=False, return_dict_in_generate=True)
    before = [layer.keys.clone() for layer in kept[name].layers]
    generate(ours, tokens(3, 12), mask, do_sample=False)
    assert all(torch.equal(layer.keys, old) for layer, old in zip(kept[name].layers, before))
    assert len(recorder.recorded) == 2


def test_the_number_of_graphs_is_bounded_and_unpatching_drops_them(recorder):
    ours = graphed("llama", kept=2)[1]
    state = ours._hf_flash_state
    for batch in (1, 2, 3, 2, 3):
        ids = tokens(batch, 8)
        generate(ours, ids, torch.ones_like(ids), 4, do_sample=False)
    assert [graph.batch for graph in state.graphs.kept] == [2, 3] and len(recorder.recorded) == 3
    graph = state.graphs.kept[0]
    gone = [weakref.ref(tensor) for tensor in graph.buffers.values()]
    del graph, state
    hf_flash.unpatch_model(ours)
    gc.collect()
    assert all(reference() is None for reference in gone)


def test_a_copy_of_the_model_captures_its_own_steps(recorder):
    stock, ours = graphed("llama")
    ids, mask = prompt("left")
    expected = generate(stock, ids, mask, do_sample=False)
    generate(ours, ids, mask, do_sample=False)
    other = copy.deepcopy(ours)
    assert torch.equal(generate(other, ids, mask, do_sample=False), expected) and len(recorder.recorded) == 2


def beams(stock, ours, ids, mask):
    return [generate(model, ids, mask, num_beams=3, do_sample=False) for model in (stock, ours)]


def assisted(stock, ours, ids, mask):
    assistant = make("llama", num_hidden_layers=1)
    return [generate(m, ids[:1], mask[:1], do_sample=False, assistant_model=assistant) for m in (stock, ours)]


def with_hidden_states(stock, ours, ids, mask):
    options = {"output_hidden_states": True, "return_dict_in_generate": True, "do_sample": False}
    return [generate(model, ids, mask, **options).sequences for model in (stock, ours)]


def hooked(stock, ours, ids, mask):
    handle = ours.lm_head.register_forward_hook(lambda *_: None)
    found = [generate(model, ids, mask, do_sample=False) for model in (stock, ours)]
    handle.remove()
    return found


def own_cache(stock, ours, ids, mask):
    import transformers

    name = "cache" if VERSION >= (5, 24) else "past_key_values"
    return [generate(m, ids, mask, do_sample=False, **{name: transformers.DynamicCache()}) for m in (stock, ours)]


@pytest.mark.parametrize(
    "case, reason",
    [
        (beams, "beam search"),
        (assisted, "several new tokens at once"),
        (with_hidden_states, "output_hidden_states was given"),
        (hooked, "forward hooks"),
        (own_cache, "not one that generate made"),
    ],
)
def test_what_cannot_be_replayed_runs_as_before_and_says_why(case, reason, recorder):
    stock, ours = graphed("llama")
    ids, mask = prompt("full")
    with pytest.warns(UserWarning, match="decoding step is not replayed"):
        expected, found = case(stock, ours, ids, mask)
    assert torch.equal(found, expected)
    assert any(reason in note for note in notes(ours))
    with warnings.catch_warnings():  # said once
        warnings.simplefilter("error")
        assert torch.equal(case(stock, ours, ids, mask)[1], expected)


def test_a_capture_that_fails_is_tried_once_and_tokens_stay_right(recorder, monkeypatch):
    stock, ours = graphed("llama")
    ids, mask = prompt("left")
    rotary = type(ours.model.rotary_emb)
    forward = rotary.forward

    def reads_a_value(module, x, position_ids):
        assert int(position_ids.max()) >= 0
        return forward(module, x, position_ids)

    monkeypatch.setattr(rotary, "forward", reads_a_value)
    with pytest.warns(UserWarning, match="the capture failed: operation not permitted"):
        found = generate(ours, ids, mask, do_sample=False)
    assert torch.equal(found, generate(stock, ids, mask, do_sample=False)) and recorder.replays == 0


def test_a_model_on_the_cpu_says_that_it_has_no_graphs():
    stock, ours = graphed("gpt2")
    ids, mask = prompt("full")
    with pytest.warns(UserWarning, match="not replayed: the model is on cpu"):
        found = generate(ours, ids, mask, do_sample=False)
    assert torch.equal(found, generate(stock, ids, mask, do_sample=False))
    assert notes(ours) == ["decoding steps not replayed: the model is on cpu (11x)"]


def test_graphs_are_turned_on_and_off_by_patching_again(recorder):
    ours = pair("llama")[1]
    ids, mask = prompt("full")
    for wanted, replays in ((False, 0), (True, 11), (False, 11)):
        hf_flash.patch_model(ours, cuda_graphs=wanted)
        generate(ours, ids, mask, do_sample=False)
        assert recorder.replays == replays
    with pytest.raises(ValueError, match="models that generate"):
        hf_flash.patch_model(make("bert"), cuda_graphs=True)


def test_a_window_that_the_text_does_not_reach_is_replayed(recorder):
    for window, replays in ((64, 11), (16, 11)):  # the second one slides: no step of it is replayed
        stock, ours = graphed("mistral-window", sliding_window=window)
        ids, mask = prompt("left")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = generate(ours, ids, mask, do_sample=False)
        assert torch.equal(found, generate(stock, ids, mask, do_sample=False))
        assert recorder.replays == replays
