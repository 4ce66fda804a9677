"""The examples' training in every way that processes can share it: a program for `accelerate launch`.

    accelerate launch ... tests/launched.py FOLDER [--shard]

Writes FOLDER/results.json, way of training -> losses. accelerate shards over accelerators only: --shard tells it that
these CPU processes are some.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import finetune
import lora_long_context
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

SMALL = ["--batch", "4", "--seq", "48", "--steps"]
SHARE = "--split-sequences"
# way of training -> arguments; those of "resumed" run for half of the steps first, and then take up what they left
WAYS = {
    "checkpointed": [*SMALL, "3", "--gradient-checkpointing"],
    "resumed": [*SMALL, "4", "--lora", "4", "--checkpoint"],
    "shared": [*SMALL, "3", SHARE],
    "autocast": [*SMALL, "3", "--precision", "bf16"],
}
CONTEXTS = ["--kinds", "patched", "--start", "64", "--limit", "128", "--steps", "1", "--refine", "0", "--plot", ""]


def reset():
    """A process keeps its first precision and, sharded, its first model's classes otherwise."""
    AcceleratorState._reset_state()
    if "--shard" in sys.argv:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def losses_of(way, folder=None):
    """The losses of a way of training; without a folder those of one process that is never interrupted."""
    arguments = WAYS[way]
    if folder is None:
        arguments = [word for word in arguments if word not in (SHARE, "--checkpoint")]
    elif way == "resumed":
        arguments = [*arguments, str(folder / "state")]
        reset()
        finetune.main([*arguments, "--steps", "2"])
    reset()
    return finetune.main(arguments)["patched"][0]


def losses_of_contexts(sharing=False):
    reset()
    points = lora_long_context.main([*CONTEXTS, SHARE] if sharing else CONTEXTS)["patched"]
    return [point[3] for point in points.values()]


def main(folder, shard=None):
    state, train = PartialState(cpu=True), finetune.train
    assert state.num_processes == 2

    def checked(*arguments):
        model, *rest = train(*arguments)
        assert all(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in model.parameters()) is bool(
            shard
        )
        return model, *rest

    finetune.train = checked
    results = {way: losses_of(way, Path(folder)) for way in WAYS}
    results["contexts"] = losses_of_contexts(sharing=True)
    if state.is_main_process:
        Path(folder, "results.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
