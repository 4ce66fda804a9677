"""GPT-J: interleaved partial rotary embeddings, parallel attention and MLP, head dim 256 in the 6B model."""

from ..off_interface import replace_inner
from ..patching import Adapter, register

GPTJ = register(
    Adapter(
        model_types=("gptj",),
        attention=("GPTJAttention",),
        features=("causal", "dropout"),
        tiny=lambda: {
            "vocab_size": 97,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
            "rotary_dim": 8,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        replacements=lambda base: replace_inner(base, "GPTJAttention"),
        kwargs_since=(5, 24),
    )
)
