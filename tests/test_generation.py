"""A patched model generates the tokens of the stock eager one, with every kind of cache, and reads caches in place."""

import pytest
import torch
import transformers
from families import (
    CAUSAL,
    VERSION,
    assert_rows_close,
    make,
    mask_of,
    pair,
    position_ids,
    tokens,
)

import hf_flash
from hf_flash import layout, ops

transformers.logging.set_verbosity_error()

MODES = {
    "greedy": {"do_sample": False},
    "no-cache": {"do_sample": False, "use_cache": False},
    "beam": {"num_beams": 3, "do_sample": False},
    "sampling": {"do_sample": True, "top_k": 0},
    "static": {"do_sample": False, "cache_implementation": "static", "disable_compile": True},
}


def prompt(kind):
    mask = mask_of(kind) if kind != "alone" else torch.ones(1, 12, dtype=torch.int64)
    return tokens(len(mask)).masked_fill(mask == 0, 0), mask


def generate(model, ids, mask, new=12, **options):
    torch.manual_seed(3)
    return model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=new, eos_token_id=None, pad_token_id=0, **options
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*CAUSAL, "mistral-window", "qwen3", "phi3"])
def test_tokens_equal_stock(name, mode):
    """Rows 8, 60, 62: 64 tokens of a left-padded batch, with a cache and without one."""
    stock, ours = pair(name)
    for kind in ("left", "full", "alone"):
        ids, mask = prompt(kind)
        new = 64 if kind == "left" and mode in ("greedy", "no-cache") else 12
        found = generate(ours, ids, mask, new, **MODES[mode])
        assert torch.equal(found, generate(stock, ids, mask, new, **MODES[mode])), kind
    assert hf_flash.report(ours).stock_calls == 0


@pytest.mark.parametrize("name", CAUSAL)
def test_assisted_generation_equals_greedy(name):
    """Row 65."""
    stock, ours = pair(name)
    ids, mask = prompt("alone")
    expected = generate(stock, ids, mask, do_sample=False)
    assistant = hf_flash.patch_model(make(name))
    assert torch.equal(generate(ours, ids, mask, do_sample=False, assistant_model=assistant), expected)
    if VERSION >= (5, 0):
        assert torch.equal(generate(ours, ids, mask, do_sample=False, prompt_lookup_num_tokens=3), expected)


@pytest.mark.parametrize("name", CAUSAL)
def test_each_row_of_a_left_padded_batch_equals_its_lone_run(name):
    """Row 61: prompts of 3 and 11 tokens, 32 steps."""
    ours = hf_flash.patch_model(make(name))
    mask = torch.ones(2, 11, dtype=torch.int64)
    mask[0, :8] = 0
    ids = tokens(2, 11).masked_fill(mask == 0, 0)
    together = generate(ours, ids, mask, 32, do_sample=False)
    assert torch.equal(together[0, 8:], generate(ours, ids[:1, 8:], mask[:1, 8:], 32, do_sample=False)[0])
    assert torch.equal(together[1], generate(ours, ids[1:], mask[1:], 32, do_sample=False)[0])


@pytest.mark.parametrize("name", CAUSAL)
def test_generated_rows_fed_back_in_one_forward_equal_stock(name):
    """Row 11: prompts padded on the left, finished rows on the right: padding on both sides."""
    stock, ours = pair(name)
    mask = mask_of("both")
    ids = tokens().masked_fill(mask == 0, 0)
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": position_ids(mask)}
    assert_rows_close(ours(**given).logits, stock(**given).logits, mask)


@pytest.mark.parametrize("kind", ["left", "full", "holes"])
@pytest.mark.parametrize("name", CAUSAL)
def test_chunks_over_a_cache_equal_one_forward(name, kind):
    """Prefill in three pieces, then single tokens: the cache's padding, and holes in it, are seen by no query."""
    stock, ours = pair(name)
    mask = mask_of(kind)
    ids, positions = tokens(), position_ids(mask)
    expected = stock(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    cache, found = transformers.DynamicCache(config=ours.config), []
    name_of_cache = "cache" if VERSION >= (5, 24) else "past_key_values"
    with torch.no_grad():
        for start, end in ((0, 5), (5, 9), (9, 10), (10, 11), (11, 12)):
            part = {"input_ids": ids[:, start:end], "position_ids": positions[:, start:end], name_of_cache: cache}
            if kind != "full":
                part["attention_mask"] = mask[:, :end]
            found.append(ours(**part, use_cache=True).logits)
    assert_rows_close(torch.cat(found, 1), expected, mask)
    assert cache.get_seq_length() == 12 and hf_flash.report(ours).stock_calls == 0


@pytest.mark.parametrize("name", CAUSAL)
def test_a_cropped_cache_continues_like_stock(name):
    """Row 65."""
    results = []
    for model in pair(name):
        torch.manual_seed(1)
        ids = tokens(1, 10, seed=5)
        cache = transformers.DynamicCache(config=model.config)
        name_of_cache = "cache" if VERSION >= (5, 24) else "past_key_values"
        model(input_ids=ids, **{name_of_cache: cache}, use_cache=True)
        cache.crop(-4)
        results.append(model(input_ids=ids[:, :3], **{name_of_cache: cache}, use_cache=True).logits)
    assert_rows_close(results[1], results[0], torch.ones(1, 3))


def counted(monkeypatch, module, function):
    calls = []
    monkeypatch.setattr(module, function, lambda *a, f=getattr(module, function), **k: (calls.append(1), f(*a, **k))[1])
    return calls


@pytest.mark.parametrize("name", CAUSAL)
def test_left_padded_steps_read_the_cache_without_copies(name, monkeypatch):
    ours = hf_flash.patch_model(make(name))
    ids, mask = prompt("left")
    cached = counted(monkeypatch, layout, "flash_attn_with_kvcache")
    varlen = counted(monkeypatch, layout, "flash_attn_varlen_func")
    generate(ours, ids, mask, 5, do_sample=False, cache_implementation="static", disable_compile=True)
    assert len(cached) == 2 * 4 and len(varlen) == 2  # two layers, four steps after the prefill
    steps = counted(monkeypatch, ops, "decode")
    generate(ours, ids, mask, 5, do_sample=False)
    assert len(steps) == 2 * 4 and len(cached) == 2 * 4


@pytest.mark.parametrize("name", CAUSAL)
def test_metadata_is_made_once_per_step_and_never_without_padding(name, monkeypatch):
    ours = hf_flash.patch_model(make(name))
    made = []
    monkeypatch.setattr(layout, "_rows", lambda *a, f=layout._rows: (made.append(1), f(*a))[1])
    ids, mask = prompt("left")
    generate(ours, ids, mask, 5, do_sample=False)
    assert len(made) == 1  # for the prefill; a step needs only where each row's padding ends
    made.clear()
    ids, mask = prompt("full")
    with torch.no_grad():
        ours(input_ids=ids, use_cache=True)
    assert not made


@pytest.mark.parametrize("name", ["llama", "gptj", "gpt2", "mistral"])
@pytest.mark.parametrize("kind", ["left", "full"])
def test_static_cache_steps_compile_once_without_breaks_and_read_the_cache_in_place(name, kind):
    stock, ours = pair(name)
    ids, mask = prompt(kind)
    expected = generate(stock, ids, mask, do_sample=False)
    graphs = []

    def backend(module, inputs):
        graphs.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return module.forward

    torch._dynamo.reset()
    compiling = transformers.CompileConfig(fullgraph=True, backend=backend, mode=None)
    compiling._compile_all_devices = True
    for _ in range(2):
        found = generate(ours, ids, mask, do_sample=False, cache_implementation="static", compile_config=compiling)
        assert torch.equal(found, expected)
    assert len(graphs) == 1  # fullgraph: a break would raise; a second graph would be a recompilation
    assert graphs[0].count("hf_flash.decode.default") == 2  # one a layer, and nothing gathers its keys
    assert not {"flatten", "index_select"} & {target.split(".")[-1] for target in graphs[0]}


@pytest.mark.parametrize("name", [*CAUSAL, "mistral-window"])
def test_prompts_leave_their_padding_once_and_their_cache_keeps_it(name):
    stock, ours = pair(name)
    ids, mask = prompt("left")
    name_of_cache = "cache" if VERSION >= (5, 24) else "past_key_values"
    widths, found = [], {}
    embedding = ours.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, output: widths.append(tuple(output.shape[:2])))
    for model in (stock, ours):
        found[model] = generate(model, ids, mask, 2, do_sample=False, return_dict_in_generate=True)
    assert widths == [(1, mask.sum()), (3, 1)]
    for layer, other in zip(found[ours][name_of_cache].layers, found[stock][name_of_cache].layers):
        seen = mask.bool()[:, -layer.keys.shape[2] + 1 :]
        for ours_, stock_ in ((layer.keys, other.keys), (layer.values, other.values)):
            assert ours_.shape == stock_.shape
            ours_, stock_ = (x[:, :, :-1].transpose(1, 2)[seen] for x in (ours_, stock_))
            torch.testing.assert_close(ours_, stock_, atol=1e-5, rtol=1e-4)
    assert any("by the whole model" in note for note in hf_flash.report(ours).notes)


@pytest.mark.parametrize("chunk", [3, 5, 20])
@pytest.mark.parametrize("name", ["llama", "codegen", "gpt2", "mistral-window"])
def test_prompts_in_chunks_give_the_tokens_of_whole_ones(name, chunk):
    stock, ours = pair(name)
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[0, :18] = 0
    ids = tokens(2, 40).masked_fill(mask == 0, 0)
    options = {"do_sample": False}
    if VERSION < (5, 0):  # whose positions in chunks count the padding
        options["prefill_chunk_size"] = chunk
    expected = generate(stock, ids, mask, **options)
    assert torch.equal(generate(ours, ids, mask, do_sample=False, prefill_chunk_size=chunk), expected)
