"""Bytes that are read, never computed: the sum of the unique storages behind the tensors that a cache holds.

A view of a large buffer is charged for the whole buffer, because that is what it keeps alive. Not listed are 8 bytes
on the host for each token that `kvtailor.prefill` or `generate` has shown to the cache, by which it recognises ids of
another text (`hf.conversation`): they belong to no layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvtailor.ops.notebook_html import Share, Shown, Strong, html_block, html_table
from kvtailor.ops.sizes import byte_text

__all__ = ["Entry", "Ledger", "storage_bytes"]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the unique storages behind the tensors."""
    return _charge(tensors, set())


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Tensors of one layer that belong together.

    Attributes:
        layer: layer of the model.
        stage: "tail", "encode", "store", "window", "observe", "attend": what they are for.
        tier: "device", "host" or "disk".
        tensors: by name.
        stored: bytes that are no tensors of this process: files, as the file system counts them.
        closed_form: the bytes they must have, from counts and element sizes; None where no form is known.
    """

    layer: int
    stage: str
    tensors: Mapping[str, Tensor]
    tier: str = "device"
    stored: int = 0
    closed_form: int | None = None


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What a cache costs at this moment, in bytes.

    Attributes:
        total: all unique storages, and files on a tier.
        by_stage: the same split by what they are for: "tail" (full precision), "encode" (segments), "store" (copies on
            the device of segments that are on another tier: resident, or on their way), "window" (layers on which the
            model itself has a sliding window), "observe" (evidence for the scorer), "attend" (what the attention
            carries along).
        by_tier: split by where they live.
        by_layer: split by layer of the model.
        closed_form: `total` as it must be by arithmetic; None if some part has no closed form.
        full: bytes that the keys and values of the same tokens take without compression: every token seen on the layers
            that see all, the model's own window on the others, nothing else.
        seen: tokens seen, padding included, in each row.
        held: tokens held, on average over rows, and over layers and kv heads that the plan compresses; None before the
            first token or where the plan compresses no layer.
    """

    total: int
    by_stage: dict[str, int]
    by_tier: dict[str, int]
    by_layer: list[int]
    closed_form: int | None
    full: int
    seen: int
    held: float | None

    @classmethod
    def joined(cls, parts: Sequence[Ledger]) -> Ledger:
        """Return the ledger of a cache whose heads lie on several processes, from those of all of them.

        Where every process has all heads, the sums count each copy, in `full` as well.
        """
        first = parts[0]
        forms = [each.closed_form for each in parts]
        held = [each.held for each in parts if each.held is not None]

        def sums(dicts: Sequence[Mapping[str, int]]) -> dict[str, int]:
            names = dict.fromkeys(name for each in dicts for name in each)
            return {name: sum(each.get(name, 0) for each in dicts) for name in names}

        return cls(
            total=sum(each.total for each in parts),
            by_stage=sums([each.by_stage for each in parts]),
            by_tier=sums([each.by_tier for each in parts]),
            by_layer=[sum(layers) for layers in zip(*(each.by_layer for each in parts), strict=True)],
            closed_form=None if None in forms else sum(form for form in forms if form is not None),
            full=sum(each.full for each in parts),
            seen=first.seen,
            held=sum(held) / len(held) if held else None,
        )

    @property
    def ratio(self) -> float | None:
        """total / full; None before the first token."""
        return self.total / self.full if self.full else None

    def __repr__(self) -> str:
        ratio = "" if self.ratio is None else f", ratio={self.ratio:.3f}"
        held = "" if self.held is None else f", held={self.held:.1f}"
        form = "" if self.closed_form == self.total else f", closed_form={self.closed_form}"
        parts = [f"{name}={size}" for split in (self.by_stage, self.by_tier) for name, size in split.items() if size]
        split = "".join(f", {part}" for part in parts)
        return f"Ledger({self.total} of {self.full} bytes{ratio}, seen={self.seen}{held}{split}{form})"

    def _repr_html_(self) -> str:
        """For notebooks: the bytes by what they are for, by tier and by layer, as shares of the uncompressed cache."""
        splits = {"for": self.by_stage, "on": self.by_tier}
        rows: list[list[Shown]] = [[Strong("the whole cache"), byte_text(self.total), _share(self.total, self.full)]]
        for word, split in splits.items():
            rows += [
                [f"{word} {name}", byte_text(size), _share(size, self.full)] for name, size in split.items() if size
            ]
        rows.append([Strong("uncompressed"), byte_text(self.full), _share(self.full, self.full)])
        held = "" if self.held is None else f", {self.held:.1f} of them held on average"
        layers = ", ".join(byte_text(size) for size in self.by_layer)
        form = "no closed form is known" if self.closed_form is None else f"by arithmetic {byte_text(self.closed_form)}"
        return html_block(
            f"{self.seen} tokens seen{held}",
            html_table(rows, ["bytes", "read", "of the uncompressed cache"]),
            notes=[f"By layer: {layers}.", f"Read from the storages; {form}."],
        )

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        names = ("total", "full", "ratio", "closed_form", "by_stage", "by_tier", "by_layer", "seen", "held")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def of(cls, entries: Sequence[Entry], *, layers: int, full: int, seen: int, held: float | None) -> Ledger:
        """The ledger of these entries; a storage that two of them share is charged to the first."""
        charged: set[tuple[str, int]] = set()
        by_stage: dict[str, int] = {}
        by_tier: dict[str, int] = {}
        by_layer = [0] * layers
        closed: int | None = 0
        for entry in entries:
            own = _charge(entry.tensors.values(), charged) + entry.stored
            by_stage[entry.stage] = by_stage.get(entry.stage, 0) + own
            by_tier[entry.tier] = by_tier.get(entry.tier, 0) + own
            by_layer[entry.layer] += own
            closed = None if closed is None or entry.closed_form is None else closed + entry.closed_form
        return cls(
            total=sum(by_layer),
            by_stage=by_stage,
            by_tier=by_tier,
            by_layer=by_layer,
            closed_form=closed,
            full=full,
            seen=seen,
            held=held,
        )


def _share(size: int, full: int) -> Share | None:
    return Share(f"{100 * size / full:.1f} %", size / full) if full else None


def _charge(tensors: Iterable[Tensor], charged: set[tuple[str, int]]) -> int:
    """Bytes of the storages that were not charged yet; they are added to `charged`."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        key = str(tensor.device), storage.data_ptr()
        # An empty storage may begin where the next one does.
        if storage.nbytes() and key not in charged:
            charged.add(key)
            total += storage.nbytes()
    return total
