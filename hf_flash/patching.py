"""patch_model, unpatch_model and report, and the registry of model families behind them."""

import copy
import dataclasses
import importlib
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import MethodType

import torch

from . import forward, generation, interface, loss, rotary
from . import fused_layers as layers
from .hooks import forward_name, kind_of
from .record import RECORD, Record, Report, row_of
from .rotary import Rotary

PATCH = "_hf_flash_patch"
OLDEST = (4, 57)


@dataclass(frozen=True, eq=False)
class Adapter:
    """What hf_flash must know of a model family; `patches/` holds one file of them each.

    model_types   transformers' names
    attention     attention classes, one of which must be found
    features      what its attention uses, for the README's table and the tests
    tiny          () -> keyword arguments of a small configuration, for the tests
    heads         auto classes that the tests load it with
    replacements  (base model) -> (module, attribute, value) to set where the version has no hook; None: it has
    rotary        attention class -> Rotary, where the decode kernel may turn its queries and keys
    kwargs_since  first version whose heads pass cu_seq_lens on to the base model
    fused         class -> function of `fused_layers` that stands in for its forward
    """

    model_types: tuple[str, ...]
    attention: tuple[str, ...]
    features: tuple[str, ...]
    tiny: Callable[[], dict]
    heads: tuple[str, ...] = ("AutoModelForCausalLM",)
    replacements: Callable[[torch.nn.Module], Iterable[tuple]] | None = None
    kwargs_since: tuple[int, int] = OLDEST
    rotary: dict[str, Rotary] = field(default_factory=dict)
    fused: dict[str, Callable] = field(default_factory=dict)


ADAPTERS: dict[str, Adapter] = {}


def register(adapter):
    """Add an adapter to the registry and return it. Raises ValueError if another one has its model type."""
    for name in adapter.model_types:
        if ADAPTERS.get(name, adapter) is not adapter:
            raise ValueError(f"two adapters for model type {name!r}")
        ADAPTERS[name] = adapter
    return adapter


def supported_models():
    """The model types that patch_model knows, sorted."""
    _load_adapters()
    return sorted(ADAPTERS)


def _load_adapters():
    if not ADAPTERS:
        from . import patches

        for module in pkgutil.iter_modules(patches.__path__):
            importlib.import_module(f"{patches.__name__}.{module.name}")


@dataclass
class Patch:
    """What was done to one transformers model: enough to undo it."""

    adapter: Adapter
    strict: bool
    undo: list = field(default_factory=list)
    forwards: list = field(default_factory=list)
    told: set = field(default_factory=set)
    layers: "Patch | None" = None  # of fused_layers, which can be taken back alone
    fused: Counter = field(default_factory=Counter)  # how many layers of each kind it has fused

    def set(self, module, name, value):
        self.undo.append((module, name, name in module.__dict__, module.__dict__.get(name)))
        setattr(module, name, value)

    def set_forward(self, module, value):
        name = forward_name(module)
        self.forwards.append((module, value, name in module.__dict__, module.__dict__.get(name)))
        setattr(module, name, value)

    def bind(self, module, function, **options):
        previous = module.__dict__.get(forward_name(module))
        setattr(module, forward.STATE, forward.State(module, previous, **options))
        self.set_forward(module, forward.BoundForward(function, module))

    def revert(self):
        if self.layers is not None:
            self.layers.revert()
        for module, name, had, old in reversed(self.undo):
            if had:
                setattr(module, name, old)
            else:
                module.__dict__.pop(name, None)
        for module, value, had, old in self.forwards:
            state = module.__dict__.get(forward.STATE)
            held = [name for name in ("forward", "_old_forward") if _same(module.__dict__.get(name), value)]
            for name in held:
                if had and not (state and state.unwrapped(module)):
                    setattr(module, name, old)
                elif name == "_old_forward":
                    # accelerate's hooks came after the patch: they go on to call the class's forward.
                    setattr(module, name, MethodType(type(module).forward, module))
                else:
                    delattr(module, name)
            if held:
                module.__dict__.pop(forward.STATE, None)
            elif state is not None:
                # accelerate's prepare wrapped it after the patch, in a closure: it stays there and does nothing.
                state.active = False

    def __getstate__(self):
        # An adapter holds functions made on the spot; its name is enough to find it again.
        return {**self.__dict__, "adapter": self.adapter.model_types[0]}

    def __setstate__(self, state):
        _load_adapters()
        interface.register()
        self.__dict__.update(state, adapter=ADAPTERS[state["adapter"]])


def _same(found, value):
    """Whether `found` is the forward that was set; accelerate's unwrap_model puts a bound method around it."""
    function = getattr(value, "__func__", value)
    return found is value or isinstance(found, MethodType) and found.__func__ in (value, function)


def transformers_version():
    import transformers

    return tuple(int(part) for part in transformers.__version__.split(".")[:2])


def _transformers_models(model):
    """The outermost transformers models inside `model` (a PeftModel, DDP, FSDP, a compiled module, a container)."""
    from transformers import PreTrainedModel

    found, inside = [], set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found


def _attention_modules(model, adapter):
    return [(name, module) for name, module in model.named_modules() if kind_of(module) in adapter.attention]


def on_interface(module):
    """Whether this version's attention class asks transformers' AttentionInterface for its function."""
    return any(
        hasattr(sys.modules.get(kind.__module__), "ALL_ATTENTION_FUNCTIONS") for kind in type(module).__mro__[:2]
    )


def patch_model(model, strict=False, whole_model=True, keep_logits=True, cuda_graphs=False, fused_layers=False):
    """Make a model that is already loaded use hf_flash's attention, in place.

    Args:
        model: a transformers model, or anything that holds one: PeftModel, DistributedDataParallel, FSDP, the result of
            torch.compile or accelerate's prepare, a container.
        strict: raise RuntimeError where a call cannot be fused, instead of taking the stock path for that call.
        whole_model: skip padding in the whole model, not in attention alone, in forwards that keep no cache. In
            training a cache counts as kept only if use_cache=True is passed. `report` says which was done, and why.
        keep_logits: False leaves the logits out of what a causal language model returns in training with labels: the
            loss is then computed on a part of the tokens at a time, which saves the largest tensors of long contexts
            for one more product with the head's weight. For training loops that read the loss alone, such as the
            Trainer's. Forwards in eval mode, without labels, with logits_to_keep or under torch.compile keep them.
        cuda_graphs: in `generate`, capture the step that follows the prompt, head included, and replay it for every
            token. A number says how many captured steps to keep (True: 4), one for each batch size. Each holds a cache
            as long as `generate` was told that the text can get (max_new_tokens), and keeps it for later calls. What
            cannot be replayed (beam search, assisted generation, forward hooks, ...) runs as without, and `report`
            says why.
        fused_layers: run norms, rotary embeddings and MLPs in fused kernels too, for faster training in less memory:
            Llama's family in Liger-Kernel's (`pip install liger-kernel`; on CUDA), GPT-2, GPT-J and CodeGen in
            PyTorch's GELU. BERT has nothing that stock does not fuse. Under torch.compile, which fuses them itself,
            Llama's layers stay stock's. Liger's backward pass overwrites what its forward saved: a second one raises.

    Returns:
        The same object. Parameters, state-dict keys, class names, signatures and what save_pretrained writes stay as
        they were. Patching twice is patching once; `unpatch_model` undoes it.

    Raises:
        ImportError: fused_layers needs Liger-Kernel for this model, and it cannot be imported.
        NotImplementedError: the family, or this version of it, is not supported; the text lists what is.
        TypeError: there is no transformers model inside.
        ValueError: keep_logits or cuda_graphs is not for this kind of model.
    """
    version = transformers_version()
    if version < OLDEST:
        raise NotImplementedError(f"hf_flash needs transformers 4.57 or later, found {version[0]}.{version[1]}")
    _load_adapters()
    interface.register()
    tops = _transformers_models(model)
    if not tops:
        raise TypeError(f"there is no transformers model in this {type(model).__name__}")
    plans = [_plan(top, strict, keep_logits, cuda_graphs, fused_layers) for top in tops]
    for top, adapter, modules in plans:
        if PATCH in top.__dict__:
            _adjust(top, modules, strict, whole_model, keep_logits)
        else:
            _patch(model, top, adapter, modules, strict, whole_model, keep_logits, version)
        layers.turn(top.__dict__[PATCH], top, fused_layers)
        generation.set_graphs(top, cuda_graphs)
    return model


def _plan(top, strict, keep_logits, cuda_graphs, fused_layers):
    """Everything that can be refused is refused here, before anything is changed."""
    kind = getattr(top.config, "model_type", None)
    if kind not in ADAPTERS:
        raise NotImplementedError(
            f"hf_flash has no adapter for model type {kind!r}; it has {', '.join(sorted(ADAPTERS))}"
        )
    adapter = ADAPTERS[kind]
    modules = _attention_modules(top, adapter)
    if not modules:
        raise NotImplementedError(
            f"{kind}: expected attention modules of class {' or '.join(adapter.attention)} in {type(top).__name__}, "
            "found none; load the model with attn_implementation='sdpa' or 'eager', on a supported transformers version"
        )
    for name, module in modules:
        if not on_interface(module) and adapter.replacements is None:
            raise NotImplementedError(f"{kind}: this transformers version gives no hook for {name}")
        size = getattr(module, "head_dim", getattr(module, "attention_head_size", 0))
        if strict and size > interface.MAX_HEAD_DIM:
            raise RuntimeError(f"{name} has head dim {size}; hf_flash fuses up to {interface.MAX_HEAD_DIM}")
    for device in {p.device for p in top.parameters() if strict and p.is_cuda}:
        if reason := interface._no_kernels(device):
            raise RuntimeError(f"hf_flash cannot fuse anything on {device}: {reason}")
    if not (keep_logits or loss.can_skip_logits(top)):
        raise ValueError(
            f"keep_logits=False is for causal language models with transformers' own loss, not for {type(top).__name__}"
        )
    if cuda_graphs and not (type(top).__name__.endswith(forward.HEADS) and "causal" in adapter.features):
        raise ValueError(f"cuda_graphs=True is for models that generate, not for {type(top).__name__}")
    if fused_layers:
        layers.check(adapter)
    return top, adapter, modules


def _patch(model, top, adapter, modules, strict, whole_model, keep_logits, version):
    from transformers import PreTrainedModel

    base = top.base_model
    patch = Patch(adapter, strict)
    inside = list(top.modules())
    # Models made from one config share the object: the patched one gets copies of its own.
    copies = {id(m.config): copy.deepcopy(m.config) for m in inside if isinstance(m, PreTrainedModel)}
    for module in {*model.modules(), *inside}:
        new = copies.get(id(module.__dict__.get("config")))
        if new is not None:
            new._attn_implementation = interface.NAME
            patch.set(module, "config", new)
    for name, module in modules:
        patch.set(module, RECORD, Record(name, kind_of(module), strict, patch.told))
        if kind_of(module) in adapter.rotary:
            state = adapter.rotary[kind_of(module)], module.__dict__.get(forward_name(module))
            patch.set(module, rotary.STATE, state)
            patch.set_forward(module, forward.BoundForward(rotary.forward, module))
    if not on_interface(modules[0][1]):
        for module, name, value in adapter.replacements(base):
            if name == "forward":
                patch.set_forward(module, value)
            else:
                patch.set(module, name, value)
    encoder = "bidirectional" in adapter.features and not getattr(base.config, "is_decoder", False)
    patch.bind(base, forward.base_forward, whole_model=whole_model, encoder=encoder)
    if top is not base and (version < adapter.kwargs_since or type(top).__name__.endswith(forward.HEADS)):
        patch.bind(top, forward.top_forward, base=base, keep_logits=keep_logits)
        loss.install(patch, top)
    generation.install(patch, top)
    top.__dict__[PATCH] = patch


def _adjust(top, modules, strict, whole_model, keep_logits):
    top.__dict__[PATCH].strict = strict
    if forward.STATE in top.__dict__:
        top.__dict__[forward.STATE].keep_logits = keep_logits
    getattr(top.base_model, forward.STATE).whole_model = whole_model
    for _, module in modules:
        getattr(module, RECORD).strict = strict


def unpatch_model(model):
    """Undo `patch_model`: the model as it was, bit for bit. A model that is not patched stays as it is.

    Returns:
        The same object.
    """
    for top in _transformers_models(model):
        patch = top.__dict__.pop(PATCH, None)
        if patch is not None:
            patch.revert()
    return model


def report(model):
    """What is fused in a model and what is not.

    Returns:
        Report: prints as a table, one row per attention module: fused or not, calls counted, and the reason. A model
        loaded with attn_implementation="hf_fused" has rows too; one that is not patched says so.
    """
    _load_adapters()
    rows, patched, notes = [], False, []
    for top in _transformers_models(model):
        patch = top.__dict__.get(PATCH)
        here = patch is not None or getattr(top.config, "_attn_implementation", None) == interface.NAME
        patched = patched or here
        adapter = patch.adapter if patch else ADAPTERS.get(getattr(top.config, "model_type", None))
        found = _attention_modules(top, adapter) if adapter else []
        found = found or [(name, m) for name, m in top.named_modules() if RECORD in m.__dict__]
        for name, module in found:
            record = getattr(module, RECORD, None) or Record(name, kind_of(module))
            row = row_of(record, here)
            rows.append(dataclasses.replace(row, name=name))
        if patch is not None:
            notes += getattr(top.base_model, forward.STATE).notes()
            graphs = generation.graphs_of(top)
            notes += graphs.notes() if graphs else []
            split = getattr(top.__dict__.get(forward.STATE), "split", None)
            notes += split.notes() if split else []
            notes += layers.notes(patch)
    return Report(rows, patched, notes)
