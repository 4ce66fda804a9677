"""GPT-J: interleaved partial rotary embeddings, parallel attention and MLP, head dim 256 in the 6B model."""

from ..fused_layers import tanh_gelu
from ..off_interface import replace_inner
from ..patching import Adapter, register
from ..rotary import Rotary

OUTPUTS = ("out_proj", "resid_dropout")


def _project(module, hidden_states, shape):
    return tuple(project(hidden_states).view(shape) for project in (module.q_proj, module.k_proj, module.v_proj))


def angles(module, position_embeddings=None, position_ids=None, **kwargs):
    if position_embeddings is None:  # before 5.24 every layer looks them up, in a table of its own
        position_embeddings = module.embed_positions.to(position_ids.device)[position_ids].chunk(2, -1)
    sin, cos = position_embeddings
    return cos, sin


GPTJ = register(
    Adapter(
        model_types=("gptj",),
        attention=("GPTJAttention",),
        features=("causal", "dropout"),
        rotary={"GPTJAttention": Rotary(_project, angles, OUTPUTS, interleaved=True)},
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
        fused={"NewGELUActivation": tanh_gelu},
        kwargs_since=(5, 24),
    )
)
