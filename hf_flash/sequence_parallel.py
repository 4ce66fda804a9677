"""Sequence parallelism: several processes share each sequence, for contexts that one GPU cannot hold.

Every process is given the same batch and computes its share of the tokens. In attention, the one place where tokens
meet, an all-to-all exchange turns a share of the tokens into a share of the heads, and back (DeepSpeed-Ulysses,
arXiv:2309.14509): each process attends over whole sequences, with its heads, through the same kernels as ever.
"""

import warnings
from collections import Counter

import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import forward, patching, wholemodel
from .layout import Inputs, Layout, Rows, build_layout
from .loss import CAUSAL_HEADS, next_labels
from .steps import cache_of

PER_TOKEN = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids")


def split_sequences(model, group=None):
    """Share the tokens of every batch among the processes of a group, in place. Patches a model that is not patched.

    Call it in every process, before or after accelerate's or DDP's or FSDP's own preparation, and give every process
    of the group the same batch. The loss is that of the whole batch, and gradients are right once they are averaged
    over the processes, as DDP and FSDP do. Logits and hidden states are those of the process's own tokens, (1, tokens,
    ...): the batch's real tokens row after row, in equal shares, the last one filled up. Padding masks, packed
    position_ids and cu_seq_lens mean what they always do. A forward that keeps a cache (use_cache=True, generate) is
    not split. `unpatch_model` undoes it.

    Args:
        model: a causal language model, or anything that holds one, as for `patch_model`.
        group: a torch.distributed process group, or None for all processes. Its size must divide the query heads, and
            divide the key/value heads or be a multiple of them (they are then sent more than once).

    Returns:
        The same object.

    Raises:
        RuntimeError: torch.distributed has not been initialised.
        NotImplementedError: the model is no causal language model; at a forward, what cannot be split exactly.
        ValueError: the heads cannot be shared; at a forward, the processes were given different batches.
    """
    if not dist.is_initialized():
        raise RuntimeError("there are no processes to share sequences: start them with accelerate launch or torchrun")
    group = dist.group.WORLD if group is None else group
    tops = patching._transformers_models(model)
    for top in tops:
        if not type(top).__name__.endswith(CAUSAL_HEADS):
            raise NotImplementedError(f"sequences are split in causal language models, not in {type(top).__name__}")
        heads, size = top.config.num_attention_heads, group.size()
        kv_heads = getattr(top.config, "num_key_value_heads", None) or heads
        if heads % size or (kv_heads % size and size % kv_heads):
            raise ValueError(
                f"{heads} query and {kv_heads} key/value heads cannot be shared by {size} processes: choose a group "
                "whose size divides the query heads, and divides the key/value heads or is a multiple of them"
            )
    if not tops or any(patching.PATCH not in top.__dict__ for top in tops):
        patching.patch_model(model)
    for top in tops:
        getattr(top, forward.STATE).split = Split(group)
    return model


class Exchange(torch.autograd.Function):
    """(processes, ...) -> the same shape: part i goes to process i, and part j of the result came from process j."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        received = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, ctx.group), None


class Total(torch.autograd.Function):
    """The sum over the processes. Its gradient is times their number, as the parameters' gradients get averaged."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.size, total = group.size(), x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.size, None


class Share(Layout):
    """The layout of one process's share, (1, share) tokens of the whole batch that `rows` describes."""

    def __init__(self, rows, share, group):
        super().__init__(1, share, share)
        self.group, self.whole = group, Layout(1, share * group.size(), share * group.size())
        self.whole.keys = self.whole.queries = self.keys = rows

    def attend(self, q, k, v, causal, window, **options):
        """Attention for q, k, v (1, heads, share, head_dim) -> (1, share, heads, head_dim), over whole sequences."""
        size = self.group.size()
        if k.shape[1] < size:
            k, v = (x.repeat_interleave(size // x.shape[1], 1) for x in (k, v))
        # (heads, share, head_dim) -> (size, share, heads / size, head_dim), all three in one exchange
        parts = [x[0].unflatten(0, (size, -1)).transpose(1, 2) for x in (q, k, v)]
        tokens = Exchange.apply(torch.cat(parts, 2), self.group).flatten(0, 1)
        q, k, v = (x.transpose(0, 1)[None] for x in tokens.split([part.shape[2] for part in parts], 1))
        out = self.whole.attend(q, k, v, causal, window, **options)
        out = Exchange.apply(out[0].unflatten(0, (size, -1)), self.group)
        return out.transpose(0, 1).flatten(1, 2)[None]

    def dense(self, *_):
        raise RuntimeError("stock attention cannot run on split sequences; the warning before this says why it would")


class Split:
    """What a patched head's forward does where sequences are split among the processes of `group`."""

    def __init__(self, group):
        self.group, self.told, self.counts = group, False, Counter()

    def notes(self):
        """Lines for the report."""
        notes = [f"sequences split among {self.group.size()} processes ({self.counts['split']}x)"]
        if self.counts["whole"]:
            notes.append(f"sequences not split: a cache is kept ({self.counts['whole']}x)")
        return notes

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):  # a process group ends with its process: what is loaded again is not split
        return type(None), ()

    def steps_back(self, given):
        """Whether this forward is run whole in every process, as it keeps a cache."""
        kept = bool(given.get("use_cache")) or cache_of(given) is not None
        if kept and not self.told:
            warnings.warn("hf_flash: a forward that keeps a cache is not split", UserWarning, stacklevel=3)
            self.told = True
        self.counts["whole"] += kept
        return kept

    def forward(self, module, state, given):
        """The head's forward on this process's tokens, with the loss of the whole batch."""
        given = {name: value for name, value in given.items() if name not in ("cache_position", "use_cache")}
        labels, mask = given.pop("labels", None), given.pop("attention_mask", None)
        targets = given.pop("shift_labels", None)
        if targets is None and labels is not None:
            targets = next_labels(labels, wholemodel.IGNORED)
        tokens = wholemodel.tokens_of(given)
        batch, length = tokens.shape[:2]
        mask = torch.ones(batch, length, dtype=torch.bool, device=tokens.device) if mask is None else mask
        rows = self.measure(module, given, tokens, mask, labels)
        if given.get("position_ids") is None:
            given["position_ids"] = torch.arange(length, device=tokens.device)[None]

        total, size = len(rows.indices), self.group.size()
        share = -(-total // size)
        places, cu_seqlens, longest = rows.indices, rows.cu_seqlens, rows.max_length
        if share * size > total:  # what fills the last share is a sequence of its own, whose results count nowhere
            places = F.pad(places, (0, share * size - total))
            cu_seqlens, longest = F.pad(cu_seqlens, (0, 1), value=share * size), max(longest, share * size - total)
        mine = places.view(size, share)[self.group.rank()]
        for name in PER_TOKEN:
            if given.get(name) is not None:
                whole = given[name].expand(batch, *given[name].shape[1:]).flatten(0, 1)
                given[name] = whole.index_select(0, mine)[None]
        if targets is not None:
            targets = targets.flatten().index_select(0, places).to(tokens.device)
            targets[total:] = wholemodel.IGNORED
            if given.get("num_items_in_batch") is None:
                given["num_items_in_batch"] = (targets != wholemodel.IGNORED).sum()
            given["labels"] = given["shift_labels"] = targets.view(size, share)[self.group.rank()][None]
        given |= {"attention_mask": Share(Rows(None, cu_seqlens, longest), share, self.group), "use_cache": False}

        output = state.call(module, given)
        self.counts["split"] += 1
        if targets is None:
            return output
        loss = Total.apply(output[0], self.group)
        if isinstance(output, tuple):
            return loss, *output[1:]
        output["loss"] = loss
        return output

    def measure(self, module, given, tokens, mask, labels):
        """The Rows of the whole batch. Raises where the processes' batches differ or splitting would not be exact."""
        batch, length = tokens.shape[:2]
        facts = [torch.tensor([batch, length], device=tokens.device), mask.sum()[None]]
        if not tokens.is_floating_point():
            facts.append((tokens * torch.arange(1, length + 1, device=tokens.device)).sum()[None])
        facts = torch.cat(facts)
        every = [torch.empty_like(facts) for _ in range(self.group.size())]
        dist.all_gather(every, facts, group=self.group)
        if (torch.stack(every) != facts).any():
            raise ValueError(
                "processes that share sequences were given different batches: give each the same, undivided"
            )
        if mask.shape != (batch, length):
            refuse(f"the mask's shape is {tuple(mask.shape)}, that of the tokens {(batch, length)}")
        cu_seqlens, longest = forward.packed_arguments(given)
        inputs = Inputs(batch, length, mask.to(torch.bool), given.get("position_ids"))
        inputs.weights = forward._weights_wanted(module, given)
        refuse(wholemodel.obstacle(module, {**given, "use_cache": False}, inputs, False))
        refuse("logits_to_keep was given" if given.get("logits_to_keep") else None)
        flag = None
        if labels is not None:
            flag = wholemodel.labels_at_padding({"labels": labels, "attention_mask": mask})
        layout = build_layout(batch, length, length, mask=inputs.mask, position_ids=inputs.position_ids,
                              cu_seqlens=cu_seqlens, max_length=longest, flag=flag)  # fmt: skip
        if layout is not None:
            refuse("padding carries labels (set them to -100)" if layout.flag else None)
            reason = wholemodel.layout_obstacle(module, given, layout)
            refuse(None if reason == "no padding" else reason)
        offsets = torch.arange(batch + 1, dtype=torch.int32, device=tokens.device) * length
        rows = layout.keys if layout is not None else Rows(None, offsets, length)
        indices = torch.arange(batch * length, device=tokens.device) if rows.indices is None else rows.indices
        return Rows(indices, rows.cu_seqlens, rows.max_length)


def refuse(reason):
    if reason is not None:
        raise NotImplementedError(f"sequences cannot be split: {reason}")
