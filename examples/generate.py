"""Generate for a left-padded batch with the patched and the stock model: first token, tokens/s, memory traffic.

    python examples/generate.py --model path/or/hub-name --prompts 8 --prompt-tokens 2048

Without --model a small CodeGen is first trained for a moment on Python's standard library. The text of the first
prompt is streamed as it comes. On a GPU the patched model is measured with its steps replayed from CUDA graphs too.
"""

import argparse

import common
import finetune
import torch
from tqdm import tqdm
from transformers import TextStreamer
from transformers.generation.streamers import BaseStreamer

import hf_flash

GRAPHS = "with graphs"


def arguments(argv=None):
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="Hub path or folder (default: a small CodeGen, trained for a moment)")
    parser.add_argument("--text", help="a text file to take the prompts from (default: Python's standard library)")
    parser.add_argument("--prompts", type=int, default=8 if cuda else 4)
    parser.add_argument("--prompt-tokens", type=int, default=2048 if cuda else 128, help="the longest prompt")
    parser.add_argument("--fill", type=float, default=0.6, help="share of real tokens in the batch of prompts")
    parser.add_argument("--new-tokens", type=int, default=128 if cuda else 48)
    parser.add_argument("--training-steps", type=int, default=30, help="for the default model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--static-cache", action="store_true")
    return parser.parse_args(argv)


class FirstPrompt(TextStreamer):
    """Prints the text of a batch's first prompt as it comes."""

    def put(self, value):
        super().put(value[:1])


class FirstToken(BaseStreamer):
    """Notes when the first new token was there."""

    def __init__(self, clock):
        self.clock, self.calls, self.first = clock, 0, None

    def put(self, value):
        self.calls += 1
        if self.calls == 2:
            self.first = self.clock.seconds()

    def end(self):
        pass


def make_prompts(ids, options, device):
    generator = torch.Generator().manual_seed(2)
    rows = common.rows(ids, options.prompts, options.prompt_tokens, generator)
    lengths = common.ragged_lengths(options.prompts, options.prompt_tokens, options.fill, generator)
    mask = torch.arange(options.prompt_tokens) >= options.prompt_tokens - lengths[:, None]
    return {"input_ids": (rows * mask).to(device), "attention_mask": mask.long().to(device)}


def bytes_per_step(model, prompts, new_tokens):
    """What a decoding step must read at least: the weights, and the keys and values of the real tokens."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tokens = int(prompts["attention_mask"].sum()) + len(prompts["input_ids"]) * new_tokens / 2
    cache = 2 * tokens * config.num_hidden_layers * heads * head_dim * model.dtype.itemsize
    return sum(p.numel() * p.element_size() for p in model.parameters()) + cache


@torch.no_grad()
def run(model, prompts, options, streamer_of):
    """One generation: (new tokens (batch, n), seconds to the first token, seconds for the others), if streamed so."""
    clock = common.Clock(model.device)
    streamer = streamer_of(clock)
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    if options.static_cache:
        settings["cache_implementation"] = "static"
    count = options.new_tokens
    ids = model.generate(**prompts, max_new_tokens=count, min_new_tokens=count, streamer=streamer, **settings)
    total = clock.seconds()
    first = getattr(streamer, "first", total)
    return ids[:, prompts["input_ids"].shape[1] :], first, total - first


def main(argv=None):
    options = arguments(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids = common.load_ids(options.model, options.text)
    tokenizer = common.load_tokenizer(options.model)
    if options.model:
        model = finetune.load_model(options)
    else:
        steps = ["--steps", str(options.training_steps), "--seq", "192", "--batch", "8"]
        training = finetune.arguments(steps)
        model = hf_flash.patch_model(finetune.small_codegen(options.prompt_tokens + options.new_tokens))
        model = finetune.train(model, ids, training, finetune.Accelerator(), "training")[0]
        hf_flash.unpatch_model(model)
    model = model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
    prompts = make_prompts(ids, options, device)

    results, tokens = {}, {}
    kinds = ["stock", "patched"] + [GRAPHS] * (device.type == "cuda" and not options.static_cache)
    bar = tqdm(total=len(kinds) * options.repeats, unit="run", leave=False)
    for kind in kinds:
        if kind != "stock":
            hf_flash.patch_model(model, cuda_graphs=kind == GRAPHS)
        run(model, prompts, options, FirstToken)  # warms up
        measured = []
        for _ in range(options.repeats):
            tokens[kind], first, rest = run(model, prompts, options, FirstToken)
            measured.append((first, rest))
            bar.update()
        first, rest = (sorted(column)[len(measured) // 2] for column in zip(*measured))
        step = rest / max(1, options.new_tokens - 1)
        traffic = bytes_per_step(model, prompts, options.new_tokens) / step / 1e9
        results[kind] = (first, step, options.prompts / step, traffic)
    bar.close()
    print("\nThe first prompt's text, as it comes:")
    run(model, prompts, options, lambda clock: FirstPrompt(tokenizer, skip_prompt=True, skip_special_tokens=True))
    real = int(prompts["attention_mask"].sum())
    common.print_table(
        f"{options.prompts} prompts of up to {options.prompt_tokens} tokens, padded on the left ({real} real tokens), "
        f"{options.new_tokens} new tokens each",
        ["", "first token, ms", "step, ms", "tokens/s", "GB/s read"],
        [[kind, f"{1e3 * first:.1f}", f"{1e3 * step:.2f}", f"{speed:,.0f}", f"{traffic:,.1f}"]
         for kind, (first, step, speed, traffic) in results.items()],
    )  # fmt: skip
    for kind in kinds[1:]:
        ratio = results[kind][2] / results["stock"][2]
        same = (tokens["stock"] == tokens[kind]).float().mean().item()
        print(f"  {kind} / stock: {ratio:.2f} times the tokens/s; {same:.0%} of the greedy tokens are the same")
    return results


if __name__ == "__main__":
    main()
