"""What the examples share: text that is on every machine, a tokenizer for it, ragged batches, and the closing table."""

import sysconfig
import time
from pathlib import Path

import torch

BYTES, EOS, PAD, VOCABULARY = 256, 256, 257, 258


def standard_library(limit=4 << 20):
    """The source text of Python's standard library, at most `limit` bytes, as a uint8 tensor."""
    text, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text.append(path.read_bytes())
        size += len(text[-1])
        if size >= limit:
            break
    return torch.frombuffer(bytearray(b"".join(text)[:limit]), dtype=torch.uint8)


def byte_tokenizer():
    """A Hugging Face tokenizer whose ids are the bytes of the text, then <eos> and <pad>. Pads on the left."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Byte-level tokenizers write each byte as a printable character: itself where it is one, else from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(BYTES) if byte not in characters]
    characters.update({byte: chr(BYTES + index) for index, byte in enumerate(others)})
    tokenizer = Tokenizer(models.BPE(vocab={characters[byte]: byte for byte in range(BYTES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"eos_token": "<eos>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **names)


def load_tokenizer(path):
    """The tokenizer of a Hub path or folder, able to pad on the left; None: the byte tokenizer."""
    if path is None or not has_tokenizer(path):
        return byte_tokenizer()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def has_tokenizer(path):
    folder = Path(path)
    return not folder.is_dir() or any(folder.glob("tokenizer*")) or any(folder.glob("vocab*"))


def load_ids(path, text_file=None, limit=4 << 20):
    """Token ids of a text, by default Python's standard library, for the model at `path` (None: bytes). int64 (n,)."""
    text = torch.frombuffer(bytearray(Path(text_file).read_bytes()[:limit]), dtype=torch.uint8) if text_file else None
    text = standard_library(limit) if text is None else text
    if path is None or not has_tokenizer(path):
        return text.long()
    lines = bytes(text.tolist()).decode(errors="replace").splitlines(keepends=True)
    pieces = load_tokenizer(path)(lines, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return torch.tensor([token for piece in pieces for token in piece])


def rows(text, batch, length, generator):
    """A batch of pieces of the text at random places: int64 (batch, length)."""
    starts = torch.randint(len(text) - length, (batch,), generator=generator)
    return torch.stack([text[start : start + length] for start in starts.tolist()]).long()


def ragged_lengths(batch, length, fill, generator):
    """Lengths up to `length` whose mean is about `fill` of it: int64 (batch,)."""
    if fill == 1:
        return torch.full((batch,), length)
    low = max(2 * fill - 1, 0.1)
    shares = low + (1 - low) * torch.rand(batch, generator=generator)
    shares = shares * (fill / shares.mean())
    return (shares * length).round().long().clamp(2, length)


class Clock:
    """Seconds since it was made, with the device's work finished; and the device's peak memory since then."""

    def __init__(self, device):
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        self.began = time.perf_counter()

    def seconds(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - self.began

    def peak_gib(self):
        """None on the CPU, which keeps no such count."""
        return torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else None


def print_table(title, header, lines):
    """A closing summary: the first column on the left, the others on the right."""
    cells = [[str(cell) for cell in line] for line in [header, *lines]]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    print(f"\n{title}")
    for line in cells:
        print("  " + line[0].ljust(widths[0]) + "".join(c.rjust(w + 3) for c, w in zip(line[1:], widths[1:])))


def draw_contexts(results, path, title=""):
    """Peak memory and speed against context: kind -> [(tokens, peak GiB, tokens/s)], drawn into a file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6))
    for column, (axis, label) in enumerate(zip(axes, ("peak GiB", "tokens/s")), start=1):
        for kind, points in results.items():
            axis.plot([p[0] for p in sorted(points)], [p[column] for p in sorted(points)], marker="o", label=kind)
        axis.set(xlabel="context, tokens", ylabel=label)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def gib(value):
    return "-" if value is None else f"{value:.2f}"
