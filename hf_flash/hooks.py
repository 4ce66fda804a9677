"""Where a module's own forward is found: accelerate's hooks keep it aside and put theirs in its place."""


def forward_name(module):
    """The attribute of a module's instance that holds, or would hold, the forward of its own."""
    return "_old_forward" if "_old_forward" in module.__dict__ else "forward"
