"""Llama and its kin: rotary embeddings, grouped heads, in some a sliding window."""

from ..fused_layers import packed_swiglu, rms_norm, rotary, swiglu
from ..patching import Adapter, register
from ..rotary import Rotary


def _project(module, hidden_states, shape):
    inner = module._modules  # rather than attributes, which are slow to find, and slower to miss
    query = inner["q_proj"](hidden_states).view(shape)
    key = inner["k_proj"](hidden_states).view(shape)
    value = inner["v_proj"](hidden_states).view(shape)
    if "q_norm" in inner:
        query, key = inner["q_norm"](query), inner["k_norm"](key)
    return query, key, value


def _angles(module, position_embeddings, **kwargs):
    half = position_embeddings[0].shape[-1] // 2  # each angle is there twice
    return tuple(x[..., :half] for x in position_embeddings)


HALVES = Rotary(_project, _angles, outputs=("o_proj",), interleaved=False)

KINDS = ("Llama", "Mistral", "Qwen2", "Qwen3")

LLAMA = register(
    Adapter(
        model_types=("llama", "mistral", "qwen2", "qwen3", "phi3"),
        attention=(*(f"{kind}Attention" for kind in KINDS), "Phi3Attention"),
        features=("causal", "gqa", "window"),
        rotary={f"{kind}Attention": HALVES for kind in KINDS},
        fused={
            **{f"{kind}RMSNorm": rms_norm for kind in (*KINDS, "Phi3")},
            **{f"{kind}Attention": rotary for kind in (*KINDS, "Phi3")},
            **{f"{kind}MLP": swiglu for kind in KINDS},
            "Phi3MLP": packed_swiglu,
        },
        tiny=lambda: {
            "vocab_size": 97,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    )
)
