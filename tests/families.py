"""Tiny random models of every family, from the adapters' own configurations, and padded batches for them."""

import functools

import torch
import transformers

import hf_flash
from hf_flash import patching

torch.set_num_threads(1)

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
VOCABULARY = 97

# name -> (model type, what differs from the adapter's tiny configuration)
FAMILIES = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "gptj": ("gptj", {}),
    "codegen": ("codegen", {}),
    "gpt2": ("gpt2", {}),
    "bert": ("bert", {}),
}
RELATIVES = {
    "mistral-window": ("mistral", {"sliding_window": 4}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {}),
    "gpt2-inverse-layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2-unscaled": ("gpt2", {"scale_attn_weights": False}),
    "gptj-full-rotary": ("gptj", {"rotary_dim": 16}),
}
EVERY = {**FAMILIES, **RELATIVES}
CAUSAL = [name for name in FAMILIES if name != "bert"]
ENCODERS = ("bert",)

MASKS = {
    "right": [[1] * 9 + [0] * 3, [1] * 12, [1] * 4 + [0] * 8],
    "left": [[0] * 3 + [1] * 9, [1] * 12, [0] * 8 + [1] * 4],
    "both": [[0, 0] + [1] * 7 + [0] * 3, [0] + [1] * 10 + [0], [0] * 5 + [1] + [0] * 6],
    "holes": [[1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0], [1] * 12],
    "full": [[1] * 12] * 3,
}


@functools.cache
def _config(name):
    kind, changes = EVERY[name]
    patching.supported_models()
    tiny = {**patching.ADAPTERS[kind].tiny(), **changes}
    return transformers.AutoConfig.for_model(kind, **tiny)


def config_of(name, **changes):
    config = type(_config(name)).from_dict(_config(name).to_dict())
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def make(name, head=None, attention="eager", **changes):
    """A tiny random model in fp32 eval mode. The same name gives the same weights, whatever the attention."""
    config = config_of(name, **changes)
    head = head or patching.ADAPTERS[config.model_type].heads[0]
    torch.manual_seed(7)
    model = getattr(transformers, head).from_config(config, attn_implementation=attention)
    for parameter in model.parameters():  # away from the tiny initial values, so that attention is not uniform
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.2)
    return model.eval()


def pair(name, head=None, **changes):
    """The stock eager model and a patched one with the same weights."""
    return make(name, head, **changes), hf_flash.patch_model(make(name, head, **changes))


def tokens(batch=3, length=12, seed=None):
    generator = torch.Generator().manual_seed(torch.seed() if seed is None else seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def mask_of(kind):
    return torch.tensor(MASKS[kind])


def position_ids(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


def hidden_of(output):
    return output.logits if "logits" in output else output.last_hidden_state


def assert_rows_close(ours, stock, mask, tolerance=1e-5):
    """Equal where the mask is one; there is no right value at padding."""
    rows = mask.bool()
    scale = stock[rows].abs().max().clamp(min=1)
    torch.testing.assert_close(ours[rows] / scale, stock[rows] / scale, atol=tolerance, rtol=0)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_close(ours, stock, tolerance=2e-5):
    ours, stock = gradients(ours), gradients(stock)
    assert ours.keys() == stock.keys()
    for name, grad in stock.items():
        scale = grad.abs().max().clamp(min=1e-2)
        torch.testing.assert_close(
            ours[name] / scale, grad / scale, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def batch_of(name, kind):
    """Inputs with labels that no padding predicts: a row's first token, and one after padding, have none."""
    mask = mask_of(kind)
    ids = tokens().masked_fill(mask == 0, 0)
    labels = ids.masked_fill(mask == 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if name not in ENCODERS:
        batch["position_ids"] = position_ids(mask)
        labels[:, 0] = -100
        labels[:, 1:] = labels[:, 1:].masked_fill(mask[:, :-1] == 0, -100)
    return batch


def positions_of(rows, first=0):
    return torch.stack([torch.cat([torch.arange(first, first + n) for n in row]) for row in rows])


def assert_documents_alone(name, stock, output, ids, rows, first=0):
    """Each document's output equals that of the stock model run on it alone."""
    for i, row in enumerate(rows):
        start = 0
        for n in row:
            positions = torch.arange(first, first + n)[None]
            lone = hidden_of(stock(input_ids=ids[i : i + 1, start : start + n], position_ids=positions))
            assert_rows_close(output[i : i + 1, start : start + n], lone, torch.ones(1, n))
            start += n
