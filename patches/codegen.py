"""CodeGen: GPT-J's attention with one fused projection; CodeGen2 loads as it."""

from ..off_interface import replace_inner
from ..patching import Adapter, register
from .gptj import GPTJ

CODEGEN = register(
    Adapter(
        model_types=("codegen",),
        attention=("CodeGenAttention",),
        features=("causal", "dropout"),
        tiny=GPTJ.tiny,
        replacements=lambda base: replace_inner(base, "CodeGenAttention"),
        kwargs_since=(5, 24),
    )
)
