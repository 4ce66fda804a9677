"""Llama and its kin: rotary embeddings, grouped heads, in some a sliding window."""

from ..patching import Adapter, register

LLAMA = register(
    Adapter(
        model_types=("llama", "mistral", "qwen2", "qwen3", "phi3"),
        attention=("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention", "Phi3Attention"),
        features=("causal", "gqa", "window"),
        rotary=("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention"),
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
