"""Caches that grow in place hold what transformers' own hold, without copying the past, in fewer operations a step."""

import copy
import gc
import pickle
import random
import threading
import weakref

import pytest
import torch
import transformers
from families import CAUSAL, VERSION, make, pair, tokens
from test_generation import generate, prompt
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import hf_flash
from hf_flash import caches, interface, rotary, steps

CACHE = "cache" if VERSION >= (5, 24) else "past_key_values"


class Operations(TorchDispatchMode):
    """Counts operations, and the elements that they write to memory of their own."""

    def __init__(self):
        super().__init__()
        self.names, self.written = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        returned = function(*args, **(kwargs or {}))
        self.names.append(function.__name__)
        if isinstance(returned, torch.Tensor) and not function.is_view:
            # copy_ into a buffer writes what it is given; other operations in place write where they point.
            self.written.append(args[1].numel() if function.__name__ == "copy_.default" else returned.numel())
        return returned


def rows(n, batch=2, dtype=torch.float32):
    return torch.randn(batch, 2, n, 4, dtype=dtype), torch.randn(batch, 2, n, 4, dtype=dtype)


def layers(window=None):
    if window is None:
        return DynamicLayer(), caches.GrowingLayer()
    return DynamicSlidingWindowLayer(sliding_window=window), caches.GrowingSlidingLayer(sliding_window=window)


def assert_same(stock, ours):
    assert ours.get_seq_length() == stock.get_seq_length()
    for name in ("keys", "values"):
        assert torch.equal(getattr(ours, name), getattr(stock, name))
    for span in ours.spans:  # what a kernel writes is what is read
        assert not span.own or span.swapped.data_ptr() == span.buffer.data_ptr()


def change(kind, stock, ours):
    """One thing that generation does to a cache; returns the layer to go on with."""
    length, batch = stock.keys.shape[2], stock.keys.shape[0]
    if kind == "crop" and length > 3 and stock.get_seq_length() == length:
        gone = random.randint(1, 3)
        for layer in (stock, ours):
            layer.crop(-gone)
    elif kind == "reorder":
        order = torch.randint(batch, (batch,))
        for layer in (stock, ours):
            layer.reorder_cache(order)
    elif kind == "select":
        for layer in (stock, ours):
            layer.batch_select_indices(torch.tensor([1, 0]))
    elif kind == "repeat" and batch < 8:
        for layer in (stock, ours):
            layer.batch_repeat_interleave(2)
    elif kind == "copy":
        return copy.deepcopy(ours)
    elif kind == "pickle":
        return pickle.loads(pickle.dumps(ours))
    return ours


@pytest.mark.parametrize("window", [None, 7])
def test_any_sequence_of_changes_leaves_what_stock_holds(window):
    for _ in range(30):
        stock, ours = layers(window)
        for _ in range(25):
            new = rows(random.choice([1, 1, 1, 2, 5, 90]), stock.keys.shape[0] if stock.is_initialized else 2)
            for found, expected in zip(ours.update(*new), stock.update(*new)):
                assert torch.equal(found, expected)
            ours = change(
                random.choice(["crop", "reorder", "select", "repeat", "copy", "pickle"] + 6 * [""]), stock, ours
            )
            assert_same(stock, ours)


def test_a_cropped_tensor_of_someone_else_is_not_written_to():
    mine = rows(6)
    ours = caches.GrowingLayer()
    ours.lazy_initialization(*mine[: ours._lazy_arguments])
    ours.keys, ours.values = mine
    kept = [x.clone() for x in mine]
    ours.crop(4 if VERSION < (5, 0) else -2)
    ours.update(*rows(2))
    assert all(torch.equal(x, old) for x, old in zip(mine, kept))


def test_rows_are_copied_a_bounded_number_of_times_in_bounded_memory():
    ours, moved, buffers = caches.GrowingLayer(), 0, []
    for length in range(1, 3001):
        with Operations() as operations:
            ours.update(*rows(1))
        moved += sum(operations.written) - 4 * 16  # two random tensors, and the new rows
        buffer = ours.spans[0].buffer
        assert buffer.shape[2] <= 1.25 * length + caches.SPARE_ROWS
        if not any(buffer is other for other in buffers):
            buffers.append(buffer)
    assert moved < 5 * 2 * ours.keys.numel() + 2 * sum(buffer.numel() for buffer in buffers)
    assert len(buffers) < 20
    limited = caches.GrowingLayer()
    limited.limit = 50
    for _ in range(50):
        limited.update(*rows(1))
    assert limited.spans[0].buffer.shape[2] == 50


def test_a_reordered_cache_still_has_room():
    ours = caches.GrowingLayer()
    ours.update(*rows(500))
    ours.reorder_cache(torch.tensor([1, 0]))
    buffer = ours.spans[0].buffer
    ours.update(*rows(1))
    assert ours.spans[0].buffer is buffer


class LastStep(transformers.LogitsProcessor):
    """The operations from the logits of the token before last to those of the last."""

    def __init__(self, operations):
        self.all, self.names = operations.names, []

    def __call__(self, input_ids, scores):
        self.names = self.all[:]
        self.all.clear()
        return scores


@pytest.mark.parametrize("name", ["llama", "gptj"])
@pytest.mark.parametrize("kind", ["left", "full"])
def test_a_step_takes_no_more_operations_than_stock_and_copies_no_past(name, kind):
    """Counted per layer, as the difference between models of two depths, and for what all layers share."""
    attention = "sdpa" if name == "llama" else "eager"
    depth = "num_hidden_layers" if name == "llama" else "n_layer"
    ids, mask = prompt(kind)
    counts, written = {}, {}
    for number in (2, 4):
        for patched in (False, True):
            model = make(name, attention=attention, **{depth: number})
            model = hf_flash.patch_model(model) if patched else model
            with Operations() as operations:
                last = LastStep(operations)
                generate(model, ids, mask, 5, do_sample=False, logits_processor=[last])
            counts[number, patched], written[patched] = len(last.names), last.names
    assert counts[4, True] - counts[2, True] <= counts[4, False] - counts[2, False]
    assert counts[2, True] <= counts[2, False]
    extra = written[False].count("cat.default") - written[True].count("cat.default")
    assert extra >= 2 * 4  # keys and values of four layers


@pytest.mark.parametrize("name", CAUSAL)
def test_nothing_as_large_as_the_past_is_written_in_a_step(name):
    ours = hf_flash.patch_model(make(name))
    ids = tokens(2, 100)
    found = generate(ours, ids, torch.ones_like(ids), 20, do_sample=False, return_dict_in_generate=True)
    cache = found[CACHE]
    assert {type(layer) for layer in cache.layers} == {caches.GrowingLayer}
    for _ in range(2):  # the first goes past the length that `generate` announced, so it moves the rows
        with torch.no_grad(), Operations() as operations:
            ours(input_ids=ids[:, :1], **{CACHE: cache}, use_cache=True)
    assert max(operations.written) < cache.layers[0].keys.numel() / 2
    assert operations.names.count("decode.default") == len(cache.layers)


@pytest.mark.parametrize("name", ["llama", "gptj", "mistral-window"])
def test_a_returned_cache_goes_on_in_later_calls(name):
    ids, mask = prompt("full")
    results = []
    for model in pair(name):
        first = generate(model, ids, mask, 4, do_sample=False, return_dict_in_generate=True)
        longer = torch.cat([first.sequences, tokens(3, 2, seed=1)], 1)
        second = generate(model, longer, torch.ones_like(longer), 4, do_sample=False, **{CACHE: first[CACHE]})
        results.append(second)
    assert torch.equal(*results)


def test_a_mask_that_changes_its_past_is_read_anew_outside_generate():
    """Only within `generate` is it known that masks grow by ones."""
    stock, ours = pair("llama")
    ids, mask = prompt("left")
    mask = mask.clone()
    found = []
    for model in (stock, ours):
        cache = generate(model, ids, mask, 3, do_sample=False, return_dict_in_generate=True)[CACHE]
        for hidden in (5, 9):  # more padding, then a hole
            changed = torch.cat([mask, mask.new_ones(3, cache.get_seq_length() + 1 - 12)], 1)
            changed[:, slice(0, hidden) if hidden == 5 else hidden] = 0
            changed[2, 8:] = 1
            given = {"input_ids": ids[:, :1], "attention_mask": changed, "position_ids": torch.full((3, 1), 7)}
            with torch.no_grad():
                found.append(model(**given, **{CACHE: cache}, use_cache=True).logits)
    for ours_, stock_ in zip(found[2:], found[:2]):
        torch.testing.assert_close(ours_, stock_, atol=1e-5, rtol=1e-5)


def test_calls_that_overlap_keep_their_caches_apart():
    """One begins when the other has made its cache, and makes its own when that one has ended."""
    model = hf_flash.patch_model(make("llama").eval())
    ids, mask = prompt("full")
    prepare, began, ended = model._prepare_cache_for_generation, threading.Event(), threading.Event()
    returned = []

    def in_turn(*args, **kwargs):
        if threading.current_thread() is thread:
            began.set()
            ended.wait(60)
            return prepare(*args, **kwargs)
        prepare(*args, **kwargs)
        thread.start()
        assert began.wait(60)

    def run():
        returned.append(generate(model, ids, mask, 2, do_sample=False, return_dict_in_generate=True)[CACHE])

    model._prepare_cache_for_generation = in_turn
    thread = threading.Thread(target=run)
    run()
    ended.set()
    thread.join(60)
    assert [getattr(cache, steps.PRIVATE) for cache in returned] == [False, False]


def test_a_cache_made_in_inference_mode_goes_on_outside():
    stock, ours = pair("llama")
    ids, mask = prompt("full")
    with torch.inference_mode():
        cache = generate(ours, ids, mask, 3, do_sample=False, return_dict_in_generate=True)[CACHE]
    again = generate(ours, tokens(3, 20, seed=2), torch.ones(3, 20, dtype=torch.long), 2, **{CACHE: cache})
    assert again.shape == (3, 22)


def test_gradients_flow_through_a_cache_as_in_stock():
    stock, ours = layers()
    grads = []
    for layer in (stock, ours):
        torch.manual_seed(2)
        leaf = torch.randn(2, 2, 1, 4, requires_grad=True)
        for _ in range(3):
            keys, values = layer.update(leaf * 2, leaf + 1)
        (keys.sum() + values.square().sum()).backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_mixed_dtypes_are_promoted_as_by_concatenation():
    stock, ours = layers()
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16):
        keys, values = rows(1)
        new = keys.to(dtype), values.to(dtype)
        stock.update(*new), ours.update(*new)
    assert_same(stock, ours)


def test_a_compiled_forward_takes_a_growing_cache():
    stock, ours = pair("llama")
    ids, mask = prompt("full")
    expected = generate(stock, ids, mask, 4, do_sample=False)
    ours.forward = torch.compile(ours.forward, backend="eager")
    assert torch.equal(generate(ours, ids, mask, 4, do_sample=False), expected)


@pytest.mark.parametrize("kind", ["left", "full"])
def test_a_cache_dies_with_its_generate(kind, monkeypatch):
    """Without waiting for the garbage collector: it is most of the memory."""
    made = []
    monkeypatch.setattr(
        caches, "grow", lambda cache, *a, f=caches.grow: (made.append(weakref.ref(cache)), f(cache, *a))[1]
    )
    ours = hf_flash.patch_model(make("llama"))
    ids, mask = prompt(kind)
    gc.disable()
    try:
        generate(ours, ids, mask, 4, do_sample=False)
        assert len(made) == 1 and made[0]() is None
    finally:
        gc.enable()


def test_other_caches_stay_as_they_are():
    config = make("llama").config
    static = transformers.StaticCache(config=config, max_cache_len=8)
    assert not caches.grow(static)
    used = transformers.DynamicCache(config=config)
    used.update(*rows(2), 0)
    assert not caches.grow(used) and type(used.layers[0]) is DynamicLayer


def test_prefix_tuning_generates_as_in_stock():
    peft = pytest.importorskip("peft")
    # transformers 5.24 ignores PEFT's prefix, but not its mask: with padding, that shows keys of padding.
    ids, mask = prompt("full" if VERSION >= (5, 24) else "left")
    found = []
    for model in pair("llama"):
        torch.manual_seed(4)
        tuned = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
        found.append(generate(tuned, ids, mask, 6, do_sample=False))
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", ["left", "full"])
@pytest.mark.parametrize("name", ["llama", "codegen", "mistral-window"])
def test_a_layer_that_does_not_fit_the_step_takes_the_long_way(name, kind, monkeypatch):
    """As under autocast, or where head dims are too large: keys are spelt out, the new ones written first."""
    stock, ours = pair(name)
    ids, mask = prompt(kind)
    monkeypatch.setattr(steps.Step, "pending_of", lambda *_: None)
    expected = generate(stock, ids, mask, 8, do_sample=False)
    assert torch.equal(generate(ours, ids, mask, 8, do_sample=False), expected)


def test_layers_of_a_step_whose_kernel_cannot_turn_them_project_once(monkeypatch):
    """The first finds it out after projecting, and the others do not try."""
    _, ours = pair("llama")
    ids, mask = prompt("left")
    projected = []
    for module in ours.modules():
        if hasattr(module, "q_proj"):
            module.q_proj.register_forward_hook(lambda *_: projected.append(1))
    for caller in (interface, rotary):
        monkeypatch.setattr(caller, "fits_step", lambda *_: False)
    generate(ours, ids, mask, 1, do_sample=False)
    layers, before = len(projected), len(projected)
    generate(ours, ids, mask, 2, do_sample=False)
    assert layers == 2 and len(projected) - before == layers + layers + 1
