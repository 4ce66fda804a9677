"""Text that is on every machine, and a tokenizer for it: Python's standard library, byte by byte."""

import sysconfig
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
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


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
