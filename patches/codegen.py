"""CodeGen: GPT-J's attention with one fused projection; CodeGen2 loads as it."""

from ..fused_layers import tanh_gelu
from ..off_interface import replace_inner
from ..patching import Adapter, register
from ..rotary import Rotary
from .gptj import GPTJ, OUTPUTS, angles

SHARDS = 4


def _project(module, hidden_states, shape):
    """Each of the projection's four parts holds its heads' queries, values and keys."""
    parts = module.qkv_proj(hidden_states).unflatten(-1, (SHARDS, 3, -1)).transpose(-2, -3)
    query, value, key = parts.reshape(*shape[:2], 3, *shape[2:]).unbind(2)
    return query, key, value


CODEGEN = register(
    Adapter(
        model_types=("codegen",),
        attention=("CodeGenAttention",),
        features=("causal", "dropout"),
        rotary={"CodeGenAttention": Rotary(_project, angles, OUTPUTS, interleaved=True)},
        tiny=GPTJ.tiny,
        replacements=lambda base: replace_inner(base, "CodeGenAttention"),
        fused={"NewGELUActivation": tanh_gelu},
        kwargs_since=(5, 24),
    )
)
