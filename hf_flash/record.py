"""What became of each attention module of a model: the table behind `hf_flash.report`."""

import warnings
from dataclasses import dataclass, field

RECORD = "_hf_flash_record"


@dataclass
class Record:
    """Calls of one attention module. `told` is shared by the modules of a model: one warning per reason.

    compiled  why the call that torch.compile traced last takes the stock path, "" where it is fused; its runs are not
              counted, as what a graph reads and writes would be compiled again
    """

    name: str
    kind: str
    strict: bool = False
    told: set = field(default_factory=set)
    fused: int = 0
    stock: int = 0
    backend: str = ""
    reasons: dict = field(default_factory=dict)
    notes: dict = field(default_factory=dict)
    compiled: str | None = None

    def count_fused(self, device):
        self.fused += 1
        self.backend = "kernels" if device.type == "cuda" else "CPU backend"

    def count_stock(self, reason):
        """Raises RuntimeError when the model was patched with strict=True."""
        if self.strict:
            raise RuntimeError(f"hf_flash cannot fuse {self.name} ({self.kind}): {reason} (patched with strict=True)")
        self.stock += 1
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if reason not in self.told:
            self.told.add(reason)
            warnings.warn(f"hf_flash: stock attention for this call: {reason}", UserWarning, stacklevel=3)


@dataclass(frozen=True)
class Row:
    """One attention module. `fused` is None before its first call."""

    name: str
    kind: str
    fused: bool | None
    fused_calls: int
    stock_calls: int
    reason: str


class Report:
    """A printable table, one row per attention module; iterable over `Row`.

    patched  whether the model is patched (or was loaded with attn_implementation="hf_fused")
    notes    what holds for the whole model, such as how padding is skipped
    """

    def __init__(self, rows, patched, notes=()):
        self.rows, self.patched, self.notes = list(rows), patched, list(notes)

    def __iter__(self):
        return iter(self.rows)

    def __len__(self):
        return len(self.rows)

    @property
    def fused_calls(self):
        return sum(row.fused_calls for row in self.rows)

    @property
    def stock_calls(self):
        return sum(row.stock_calls for row in self.rows)

    def __str__(self):
        head = ("module", "class", "fused", "fused calls", "stock calls", "reason")
        word = {True: "yes", False: "no", None: "not called"}
        lines = [(r.name, r.kind, word[r.fused], str(r.fused_calls), str(r.stock_calls), r.reason) for r in self.rows]
        widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in [head, *lines]]
        return "\n".join(table + [f"note: {note}" for note in self.notes])

    __repr__ = __str__


def row_of(record, patched):
    """The Row of a module from its Record, which is None where nothing replaces its attention."""
    if record.reasons:
        reason = "; ".join(f"{reason} ({count}x)" for reason, count in record.reasons.items())
    elif record.compiled:
        reason = f"{record.compiled} (compiled)"
    else:
        reason = (record.backend or ("compiled" if record.compiled == "" else "")) if patched else "not patched"
    called = record.fused or record.stock or record.compiled is not None
    fused = False if not patched else None if not called else record.fused > 0 or record.compiled == ""
    return Row(record.name, record.kind, fused, record.fused, record.stock, reason)
