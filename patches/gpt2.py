"""GPT-2: learned positions, one fused projection, cross-attention in encoder-decoders."""

from ..fused_layers import tanh_gelu
from ..patching import Adapter, register

GPT2 = register(
    Adapter(
        model_types=("gpt2",),
        attention=("GPT2Attention",),
        features=("causal", "dropout", "cross-attention"),
        tiny=lambda: {
            "vocab_size": 97,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        fused={"NewGELUActivation": tanh_gelu},
        kwargs_since=(5, 0),
    )
)
