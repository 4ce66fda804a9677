"""What `generate` of a patched model does by itself: it keeps keys and values in a cache that grows in place."""

import inspect
from contextvars import ContextVar

from .forward import STATE, BoundForward
from .graphs import KEPT, Graphs
from .steps import PRIVATE, cache_of

# The caches that the `generate` under way has made and not yet handed out.
made_here = ContextVar("made_here", default=None)
LOOP = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")


class BoundMethod(BoundForward):
    """A bound method of a model, with the signature and the text of the class's own of that name."""

    def __init__(self, function, module, name):
        super().__init__(function, module)
        self.name = name

    @property
    def __name__(self):
        return self.name

    @property
    def __doc__(self):
        return getattr(type(self.module), self.name).__doc__

    @property
    def __signature__(self):
        signature = inspect.signature(getattr(type(self.module), self.name))
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def install(patch, top):
    """Set the methods of a patched model that can generate."""
    if hasattr(top, "_prepare_cache_for_generation"):
        patch.set(top, "generate", BoundMethod(generate, top, "generate"))
        patch.set(
            top, "_prepare_cache_for_generation", BoundMethod(prepare_cache, top, "_prepare_cache_for_generation")
        )


def generate(top, *args, **kwargs):
    """The class's own `generate`. A cache that it made is its own until it returns."""
    made = []
    outer = made_here.set(made)
    try:
        return type(top).generate(top, *args, **kwargs)
    finally:
        made_here.reset(outer)
        for cache in made:
            setattr(cache, PRIVATE, False)


def prepare_cache(top, *args, **kwargs):
    """The class's own `_prepare_cache_for_generation`; a dynamic cache that it makes will grow in place."""
    from .caches import grow

    function = type(top)._prepare_cache_for_generation
    given = inspect.signature(function).bind(top, *args, **kwargs).arguments
    model_kwargs = given["model_kwargs"]
    passed = cache_of(model_kwargs)
    returned = function(top, *args, **kwargs)
    cache = cache_of(model_kwargs)
    if passed is not None or cache is None:
        return returned
    length, graphs = given.get("max_cache_length"), graphs_of(top)
    if grow(cache, length, graphs and graphs.lease(cache, length)):
        made = made_here.get()
        if made is not None:
            made.append(cache)
            setattr(cache, PRIVATE, _loop_is_stock(top))
    return returned


def graphs_of(top):
    """The captured steps of a patched model, or None."""
    return getattr(top.__dict__.get(STATE), "graphs", None)


def set_graphs(top, wanted):
    """Turn captured steps on (True, or how many to keep) or off for a patched model."""
    if wanted:
        state = getattr(top, STATE)
        state.graphs = state.graphs or Graphs()
        state.graphs.limit = KEPT if wanted is True else wanted
    elif graphs_of(top) is not None:
        getattr(top, STATE).graphs = None


def _loop_is_stock(top):
    """Whether the masks of later steps come from transformers' own code, which appends ones."""
    return all(
        name not in top.__dict__ and getattr(type(top), name).__module__.startswith("transformers.") for name in LOOP
    )
