"""Train a BERT classifier on heavily padded batches, patched and stock: program text or prose?

    python examples/bert_classify.py --model path/or/hub-name

The data is on every machine: program text from Python's standard library, and the prose of its manual (pydoc_data).
Most snippets are short and a few are long, so that padding is most of a batch.
"""

import argparse
import ast
import copy
from pathlib import Path

import common
import torch
import transformers
from tqdm import tqdm

import hf_flash


def arguments(argv=None):
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="Hub path or folder of a BERT (default: random weights, byte tokens)")
    parser.add_argument("--steps", type=int, default=200 if cuda else 40)
    parser.add_argument("--batch", type=int, default=64 if cuda else 16)
    parser.add_argument("--seq", type=int, default=512 if cuda else 256, help="the longest snippet")
    parser.add_argument("--lr", type=float, help="default: 5e-4 from scratch, 2e-5 for a model that is loaded")
    return parser.parse_args(argv)


def prose():
    """The prose of Python's manual, as the standard library carries it for help()."""
    import pydoc_data.topics as topics

    source = Path(topics.__file__).read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            return "\n".join(ast.literal_eval(node.value).values())
    raise RuntimeError("pydoc_data.topics has no dictionary of texts")


def load(options):
    """The model and the token ids of the two classes, each int64 (n,)."""
    kinds = (bytes(common.standard_library(1 << 20).tolist()).decode(errors="replace"), prose())
    if options.model:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2)
        encode = lambda text: tokenizer(text.splitlines(), add_special_tokens=False)["input_ids"]  # noqa: E731
        return model, [torch.tensor(sum(encode(text[: 1 << 19]), [])) for text in kinds]
    layers, width, heads = (12, 768, 12) if torch.cuda.is_available() else (2, 128, 2)
    config = transformers.BertConfig(
        vocab_size=common.VOCABULARY, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width, max_position_embeddings=options.seq, num_labels=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,  # so that both kinds have the same losses
    )  # fmt: skip
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    return model, [torch.tensor(list(text.encode())) for text in kinds]


def make_batch(kinds, options, step, device):
    """Snippets of both classes, their lengths spread over the logarithm, at least one of the full length."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(2, (options.batch,), generator=generator)
    exponent = torch.rand(options.batch, generator=generator)
    lengths = (12 * (options.seq / 12) ** exponent).long()
    lengths[0] = options.seq
    rows = torch.cat([common.rows(kinds[label], 1, options.seq, generator) for label in labels.tolist()])
    mask = torch.arange(options.seq) < lengths[:, None]
    batch = {"input_ids": rows * mask, "attention_mask": mask.long(), "labels": labels}
    return {name: tensor.to(device) for name, tensor in batch.items()}, int(lengths.sum())


def train(model, kinds, options, device, name):
    """(losses per step, tokens/s, peak GiB or None)."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr or (2e-5 if options.model else 5e-4))
    losses, tokens, clock = [], 0, common.Clock(device)
    bar = tqdm(range(options.steps), desc=name, unit="step")
    for step in bar:
        batch, real = make_batch(kinds, options, step, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        tokens += real
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
        if step == 0:
            tokens, clock = 0, common.Clock(device)
    return losses, tokens / clock.seconds(), clock.peak_gib()


@torch.no_grad()
def accuracy(model, kinds, options, device, batches=4):
    model.eval()
    right = []
    for step in range(batches):
        batch, _ = make_batch(kinds, options, 10**6 + step, device)
        right.append(model(**batch).logits.argmax(-1) == batch["labels"])
    return torch.cat(right).float().mean().item()


def main(argv=None):
    options = arguments(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model, kinds = load(options)
    results = {}
    for kind in ("patched", "stock"):
        torch.manual_seed(0)
        trained = copy.deepcopy(model).to(device)
        if kind == "patched":
            hf_flash.patch_model(trained)
        results[kind] = (*train(trained, kinds, options, device, kind), accuracy(trained, kinds, options, device))
        if kind == "patched":
            print(hf_flash.report(trained))
    fill = sum(make_batch(kinds, options, s, "cpu")[1] for s in range(options.steps))
    fill /= options.steps * options.batch * options.seq
    common.print_table(
        f"{options.steps} steps of {options.batch} x {options.seq} tokens, {fill:.0%} of them real",
        ["", "first loss", "last loss", "accuracy", "tokens/s", "peak GiB"],
        [[kind, f"{losses[0]:.4f}", f"{sum(losses[-5:]) / len(losses[-5:]):.4f}", f"{right:.0%}", f"{speed:,.0f}",
          common.gib(peak)] for kind, (losses, speed, peak, right) in results.items()],
    )  # fmt: skip
    print(f"  patched / stock: {results['patched'][1] / results['stock'][1]:.2f} times the tokens/s")
    return results


if __name__ == "__main__":
    main()
