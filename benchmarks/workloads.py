"""The models that are measured end to end: their rows, configurations and batches.

Random weights in bf16, text of Python's standard library byte by byte, fused AdamW; a training step is forward,
backward, clipping and the optimiser.
"""

import gc
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]
import common  # noqa: E402
import transformers  # noqa: E402

import hf_flash  # noqa: E402


@dataclass(frozen=True)
class Row:
    model: str
    task: str  # "train", "packed" (documents one after another in one row) or "generate"
    batch: int
    seq: int
    fill: float  # share of real tokens; training pads on the right, generation on the left

    @property
    def name(self):
        return f"{self.model}/{self.task}/{self.batch}x{self.seq}"


ROWS = (
    Row("gpt2-355m", "train", 16, 1024, 1),
    Row("gpt2-355m", "train", 4, 4096, 1),
    Row("bert-large", "train", 64, 512, 0.6),
    Row("llama-1b", "train", 4, 4096, 0.6),
    Row("llama-1b", "packed", 4, 4096, 0.6),
    Row("llama-1b", "train", 1, 16384, 1),
    Row("llama-1b", "train", 1, 32768, 1),
    Row("gptj-6-layers", "train", 4, 2048, 0.6),
    Row("codegen-12-layers", "train", 4, 2048, 0.6),
    Row("gpt-1.3b", "train", 2, 8192, 1),
    Row("llama-1b", "generate", 8, 8192, 0.75),
    Row("llama-1b", "generate", 1, 128, 1),
    Row("gptj-6-layers", "generate", 8, 2048, 0.75),
)


def shrunk(row):
    """The row at a size for the CPU."""
    return Row(row.model, row.task, min(row.batch, 2), min(64, row.seq // 32), row.fill)


def configuration(model, seq, tiny=False):
    """The configuration of a model by its name here; tiny: two narrow layers with the same head dim."""
    seq = seq + 256
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    if model in ("gpt2-355m", "gpt-1.3b"):
        layers, width = (24, 1024) if model == "gpt2-355m" else (24, 2048)
        layers, width, heads = (2, 128, 2) if tiny else (layers, width, 16)
        return transformers.GPT2Config(n_embd=width, n_layer=layers, n_head=heads, n_positions=seq, **no_dropout)
    if model == "bert-large":
        layers, width, heads = (2, 128, 2) if tiny else (24, 1024, 16)
        return transformers.BertConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width,
            max_position_embeddings=seq, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
    if model == "llama-1b":
        layers, width, heads, kv_heads = (2, 256, 2, 1) if tiny else (16, 2048, 16, 8)
        return transformers.LlamaConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
            intermediate_size=4 * width, max_position_embeddings=seq, tie_word_embeddings=True,
        )  # fmt: skip
    if model == "gptj-6-layers":
        layers, width, heads = (2, 512, 2) if tiny else (6, 4096, 16)
        return transformers.GPTJConfig(
            n_embd=width, n_layer=layers, n_head=heads, n_positions=seq, rotary_dim=64, **no_dropout
        )
    if model == "codegen-12-layers":
        layers, width, heads = (2, 320, 4) if tiny else (12, 2560, 32)
        return transformers.CodeGenConfig(
            n_embd=width, n_layer=layers, n_head=heads, n_positions=seq, n_ctx=seq, rotary_dim=64, vocab_size=51200,
            **no_dropout,
        )  # fmt: skip
    raise ValueError(f"no model is called {model!r}")


REPLACED = []  # (names of a modelling module, what they meant before Liger-Kernel put its classes there)


def build(row, mode, device, tiny):
    """The row's model with random weights (the same for every mode), in bf16, ready for the mode."""
    while REPLACED:
        names, before = REPLACED.pop()
        names.update(before)
    attention, *additions = mode.split("+")
    config = configuration(row.model, row.seq, tiny)
    kind = transformers.AutoModelForMaskedLM if row.model.startswith("bert") else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    stock = ("sdpa", "eager") if attention == "hf_flash" else (attention,)
    for implementation in stock:
        try:
            with torch.device(device):
                model = kind.from_config(config, attn_implementation=implementation, dtype=torch.bfloat16)
            break
        except ValueError:
            if implementation == stock[-1]:
                raise NotImplementedError(f"not offered by transformers {transformers.__version__}") from None
    if attention == "hf_flash":
        hf_flash.patch_model(
            model,
            cuda_graphs="graphs" in additions,
            keep_logits="no_logits" not in additions,
            fused_layers="liger" in additions,
        )
    elif "liger" in additions:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        names = vars(sys.modules[type(model).__module__])
        REPLACED.append((names, dict(names)))
        _apply_liger_kernel_to_instance(model=model)
    return torch.compile(model) if "compile" in additions else model


# ---- batches ---------------------------------------------------------------------------------------------------------


def clean(device):
    """Gives back what earlier models held, and measures the peak of memory from here."""
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def training_batch(row, text, step, device):
    """The step's batch, the same for every mode: (keyword arguments of the model, lengths of its documents)."""
    generator = torch.Generator().manual_seed(step)
    ids = common.rows(text, row.batch, row.seq, generator)
    lengths = common.ragged_lengths(row.batch, row.seq, row.fill, generator)
    mask = torch.arange(row.seq) < lengths[:, None]
    labels = ids.masked_fill(~mask, -100)
    if row.model.startswith("bert"):
        chosen = (torch.rand(ids.shape, generator=generator) < 0.15) & mask
        labels = ids.masked_fill(~chosen, -100)
        ids = ids.masked_fill(chosen, common.EOS)
    batch = {"input_ids": ids.masked_fill(~mask, 0), "labels": labels}
    if row.task == "packed":
        positions = torch.arange(row.seq).expand_as(ids)
        labels = labels.masked_fill(positions == 0, -100)
        batch = {"input_ids": ids[mask][None], "labels": labels[mask][None], "position_ids": positions[mask][None]}
    elif row.fill < 1:
        batch["attention_mask"] = mask.long()
    return {name: tensor.to(device) for name, tensor in batch.items()}, lengths.tolist()


def prompt_batch(row, text, device):
    generator = torch.Generator().manual_seed(1)
    ids = common.rows(text, row.batch, row.seq, generator)
    lengths = common.ragged_lengths(row.batch, row.seq, row.fill, generator)
    mask = torch.arange(row.seq) >= row.seq - lengths[:, None]
    return {
        "input_ids": ids.masked_fill(~mask, 0).to(device),
        "attention_mask": mask.long().to(device),
    }, lengths.tolist()


# ---- steps -----------------------------------------------------------------------------------------------------------


def optimiser(model, device):
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")


def train_step(model, optimizer, batch):
    loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()
