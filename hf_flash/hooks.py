"""What other libraries do to a module: accelerate's hooks keep its forward aside, fully_shard changes its class."""


def forward_name(module):
    """The attribute of a module's instance that holds, or would hold, the forward of its own."""
    return "_old_forward" if "_old_forward" in module.__dict__ else "forward"


def kind_of(module):
    """The name of a module's own class; fully_shard puts a subclass in front of it."""
    return next(kind.__name__ for kind in type(module).__mro__ if not kind.__name__.startswith("FSDP"))
