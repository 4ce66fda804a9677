"""The loss of a language model without the fp32 copies of its logits, and where they are not wanted without the logits.

Stock casts all logits to fp32 and saves their log-softmax: 16 bytes for each token and word of the vocabulary at the
peak, which at 32k tokens and 128k words is 64 GiB. The same arithmetic on pieces of the rows needs the logits and their
gradient alone, in the model's own dtype.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from .hooks import forward_name

# Elements of fp32 that a piece holds, and elements of logits that are there at a time where they are not kept.
PIECE, PART = 1 << 24, 1 << 28
CAUSAL_HEADS = ("ForCausalLM", "LMHeadModel")


class SumOfLosses(torch.autograd.Function):
    """logits (n, vocabulary), targets (n,) -> 0-d fp32 sum of the cross-entropies of rows whose target counts."""

    @staticmethod
    def forward(ctx, logits, targets, ignored):
        ctx.save_for_backward(logits, targets)
        ctx.ignored = ignored
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        for rows, wanted in _pieces(logits, targets):
            scores = rows.log_softmax(1, dtype=torch.float32)
            total += F.nll_loss(scores, wanted, ignore_index=ignored, reduction="sum")
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, targets = ctx.saved_tensors
        grads = torch.empty_like(logits)
        for rows, wanted, out in _pieces(logits, targets, grads):
            probabilities = rows.softmax(1, dtype=torch.float32)
            counts = wanted != ctx.ignored
            index = wanted.masked_fill(~counts, 0)[:, None]
            probabilities.scatter_add_(1, index, probabilities.new_full((), -1.0).expand_as(index))
            # Where no target counts the mean's gradient is infinite, and that of every row 0.
            torch.mul(probabilities, grad.where(counts, 0.0)[:, None], out=out)
        return grads, None, None


def _pieces(logits, *others):
    rows = max(1, PIECE // logits.shape[1])
    return zip(*(x.split(rows) for x in (logits, *others)))


def next_labels(labels, ignored):
    """(..., length) -> the same shape: at each place the label of the next, at the last `ignored`."""
    return F.pad(labels, (0, 1), value=ignored)[..., 1:]


def _targets(labels, ignored, shift_labels, rows):
    """Each place's target, in one row. Raises ValueError where there are not as many as `rows`."""
    targets = (next_labels(labels, ignored) if shift_labels is None else shift_labels).reshape(-1)
    if len(targets) != rows:
        raise ValueError(f"labels are for {len(targets)} tokens, logits for {rows}: give each token's logits a label")
    return targets


def _mean(total, targets, ignored, items):
    if items is None:
        return total / (targets != ignored).sum()
    return total / (items.to(total.device) if isinstance(items, torch.Tensor) else items)


def language_loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs):
    """transformers' ForCausalLMLoss: the same arguments, value and gradients in less memory.

    It is called itself under torch.compile, which fuses it, for tensors of other kinds (DTensor), and where another
    library has replaced torch's cross-entropy.
    """
    replaced = F.cross_entropy.__module__ != F.__name__
    if torch.compiler.is_compiling() or replaced or type(logits) is not torch.Tensor:
        from transformers.loss.loss_utils import ForCausalLMLoss

        return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    logits = logits.reshape(-1, vocab_size)
    targets = _targets(labels, ignore_index, shift_labels, len(logits)).to(logits.device)
    total = SumOfLosses.apply(logits, targets, ignore_index)
    return _mean(total, targets, ignore_index, num_items_in_batch)


def _has_stock_loss(model):
    """Whether transformers gives this model the loss that `language_loss` stands in for."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    # GPT-2 names no loss, which stands for this one.
    stock = LOSS_MAPPING.get(getattr(model, "loss_type", None), ForCausalLMLoss)
    return type(model).__name__.endswith(CAUSAL_HEADS) and stock is ForCausalLMLoss


def install(patch, model):
    """Give a causal language model `language_loss`, unless it has a loss of its own choice."""
    if _has_stock_loss(model) and "_loss_function" not in model.__dict__:
        patch.set(model, "_loss_function", language_loss)


def can_skip_logits(model):
    """Whether the head and the loss of this model can be computed on a part of the tokens at a time."""
    return _has_stock_loss(model) and model.__dict__.get("_loss_function", language_loss) is language_loss


def skips_logits(module, given):
    """Whether a forward of a causal model, patched with keep_logits=False, is for its loss alone."""
    kept = given.get("logits_to_keep", 0)
    return (
        module.training
        and torch.is_grad_enabled()
        and given.get("labels") is not None
        and isinstance(kept, int)
        and kept == 0
        and module.__dict__.get("_loss_function") is language_loss
        and not torch.compiler.is_compiling()
    )


def without_logits(module, call, given):
    """`call(module, given)`, a stock forward with labels, whose output has no logits.

    The head hands the hidden states through to the loss, which runs the head on a part of the tokens at a time, in the
    backward pass again. The head is called as a module, so it may be sharded, quantised or an adapter.
    """
    head, own = module.get_output_embeddings(), module.__dict__["_loss_function"]
    name = forward_name(head)
    had, old, passed, asked = name in head.__dict__, head.__dict__.get(name), [], []

    def restore():
        if had:
            setattr(head, name, old)
        else:
            head.__dict__.pop(name, None)

    def loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **_):
        restore()
        hidden = passed[0]
        asked.append(True)
        # Hooks of a head may wrap what it returns, and GPT-J and CodeGen cast it: neither changes a value.
        if logits.data_ptr() != hidden.data_ptr() and not (logits.dtype == torch.float32 != hidden.dtype):
            raise RuntimeError(f"{type(module).__name__} changes its logits: patch it with keep_logits=True")
        targets = _targets(labels, ignore_index, shift_labels, hidden.shape[:-1].numel()).to(hidden.device)
        total = _loss_by_parts(head, hidden, targets, vocab_size, ignore_index)
        return _mean(total, targets, ignore_index, num_items_in_batch)

    setattr(head, name, lambda hidden: passed.append(hidden) or hidden)
    module._loss_function = loss
    try:
        output = call(module, given)
    finally:
        restore()
        module._loss_function = own
    if not passed:  # another library's forward, with a head and a loss of its own
        return output
    if not asked:
        raise RuntimeError(f"{type(module).__name__}'s forward has a loss of its own: patch it with keep_logits=True")
    if isinstance(output, tuple):
        return (output[0], None, *output[2:])
    return type(output)(**{key: value for key, value in output.items() if key != "logits"})


def _loss_by_parts(head, hidden, targets, vocabulary, ignored):
    rows = max(1, PART // vocabulary)
    parts = list(zip(hidden.flatten(0, 1).split(rows), targets.split(rows)))

    def loss(part, wanted):
        return SumOfLosses.apply(head(part[None])[0], wanted, ignored)

    if len(parts) == 1:
        return loss(*parts[0])
    return sum(checkpoint(loss, part, wanted, use_reentrant=False) for part, wanted in parts)
