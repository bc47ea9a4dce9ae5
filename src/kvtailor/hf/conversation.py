"""Which conversation a cache has seen: hashes of its token ids, as far as kvtailor got them.

A cache gets keys and values, never token ids. Where ids pass through kvtailor (`prefill`, a session, `generate`), or
the frames of transformers show them (`hf.callers`), the cache keeps a rolling hash of each row, and refuses one
that begins otherwise. Embeddings have no ids.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.errors import CacheMisuse
from kvtailor.hf.versions import CACHE_ARGUMENT

__all__ = ["NOTES", "Conversation", "Known", "check_longer", "right_call"]

# A polynomial in a fixed base modulo a Mersenne prime: 61 bits for each row, and more tokens can join at any time.
_PRIME = (1 << 61) - 1
_BASE = 1_000_003
# Two texts that begin alike by chance do not do so for longer.
_NO_CHANCE = 16
# What is not told by ids, and is the reason more often than not.
_OF_TEMPLATES = (
    "A chat template that leaves the reasoning out of earlier turns, or writes them otherwise, does that: give it the "
    "turns as they were, or begin with a new cache"
)
# Ids of so many forwards are kept apart, then joined.
NOTES = 64


@dataclass(frozen=True)
class Known:
    """The beginning of a conversation.

    Attributes:
        columns: how many tokens, padding included.
        hashes: of each row.
    """

    columns: int
    hashes: tuple[int, ...]


class Conversation:
    """What is known of the ids that a cache has seen.

    Attributes:
        known: its beginnings, each longer than the one before; the last reaches as far as ids were shown without a gap.
        reordered: rows were put in another order after tokens that were not shown, as beam search does.
        real: (b, columns) bool on the CPU, False for what was padding when it was noted, whose ids do not matter; None:
            no padding.
        notes: of forwards that have begun, of whose end nothing is known here: the column of the first token, its ids
            (b, t), and how often the tensor had been written to by then, None where nobody else can write to it. See
            `take_notes`.
        newest: the tensor of the newest forward of one token, and how often it had been written to by then; None behind
            any other.
        written: who feeds token by token writes to tensors that were fed, so copies are noted.
    """

    def __init__(self, known: Sequence[Known] = (), real: Tensor | None = None, *, reordered: bool = False):
        self.known, self.real, self.reordered = tuple(known), real, reordered
        self.notes: list[tuple[int, Tensor, int | None]] = []
        self.newest: tuple[Tensor, int] | None = None
        self.written = False
        # (b, columns) int64, the hash of each row after each column; shorter where it is not known of all.
        self._trail: Tensor | None = None

    @property
    def columns(self) -> int:
        """How many of the tokens seen are known, from the first one on."""
        return self.known[-1].columns if self.known else 0

    @property
    def bytes(self) -> int:
        """What is kept takes, 8 bytes for each token: of no layer, and in no ledger. Noted ids lie where they came."""
        notes = [ids for _, ids, _ in self.notes]
        return sum(each.untyped_storage().nbytes() for each in (self._trail, self.real, *notes) if each is not None)

    def note_forward(self, ids: Tensor, *, at: int) -> None:
        """Note the ids (b, t) of a forward that has begun at column `at`."""
        if ids.shape[1] > 1 or ids.is_inference():
            self.newest, kept, writes = None, ids.clone(), None
        else:
            # A copy would be an operation more. The first token's shows whether one tensor serves for all.
            before, self.newest = self.newest, (ids, ids._version)
            self.written = self.written or (before is not None and before[0]._version != before[1])
            kept, writes = (ids.clone(), None) if self.written or before is None else self.newest
        self.notes.append((at, kept, writes))
        if len(self.notes) > NOTES:
            self.join_notes()

    def note(self, ids: Tensor, *, at: int) -> None:
        """Note the ids (b, 1) of a step that is about to be replayed."""
        kept, writes = (ids.clone(), None) if ids.is_inference() else (ids, ids._version)
        self.notes.append((at, kept, writes))
        if len(self.notes) > NOTES:
            self.join_notes()

    def take_notes(self, *, seen: int, real: Tensor | None) -> None:
        """Make known what was noted of forwards that came to their end. Nothing is left noted.

        Args:
            seen: tokens that the cache has seen.
            real: (b, seen) bool or more columns, False for padding; None: no padding.
        """
        self.join_notes()
        notes, self.notes = self.notes, []
        for at, ids, _ in notes:
            columns = self.columns
            if at <= columns:
                self.append(ids[:, columns - at : seen - at], real, at=columns)

    def join_notes(self) -> None:
        """Make one tensor, which nobody else can write to, of notes that follow each other."""
        found: list[tuple[int, Tensor]] = []
        first: float = math.inf
        for at, ids, writes in reversed(self.notes):
            # A forward that came to no end is followed by another at its column.
            if at < first and (writes is None or ids._version == writes):
                found.append((at, ids))
            first = min(at, first)
        runs: list[list[tuple[int, Tensor]]] = []
        for at, ids in reversed(found):
            before, last = runs[-1][-1] if runs else (0, None)
            alike = last is not None and (len(ids), ids.device) == (len(last), last.device)
            if last is not None and alike and at == before + last.shape[1]:
                runs[-1].append((at, ids))
            else:
                runs.append([(at, ids)])
        self.notes = [(run[0][0], torch.cat([ids for _, ids in run], 1), None) for run in runs]
        self.newest = None

    def append(self, ids: Tensor, real: Tensor | None, *, at: int) -> None:
        """Take note of tokens that the cache has seen.

        Args:
            ids: (b, t) token ids.
            real: (b, at + t) bool or more columns, False for padding; None: no padding.
            at: the column of the first of them. Where it is not the first unknown one, nothing is noted.
        """
        if at != self.columns or not ids.shape[1]:
            return
        before = self.known[-1].hashes if self.known else (0,) * ids.shape[0]
        if len(before) != ids.shape[0]:
            return
        end = at + ids.shape[1]
        # Of columns that are known already it stays as they were counted: a later mask may hide what was fed for a row
        # that had ended.
        here = None if real is None else real[:, at:end].to(device="cpu", dtype=torch.bool)
        if self.real is not None or (here is not None and not bool(here.all())):
            earlier = torch.ones((ids.shape[0], at), dtype=torch.bool) if self.real is None else self.real
            self.real = torch.cat([earlier, earlier.new_ones(ids.shape) if here is None else here], 1)
        trail = _trails(ids, None if self.real is None else self.real[:, at:], before)
        if at == 0:
            self._trail = trail
        elif self._trail is not None and self._trail.shape == (ids.shape[0], at):
            self._trail = torch.cat([self._trail, trail], 1)
        self.known += (Known(end, tuple(trail[:, -1].tolist())),)
        self.notes = [note for note in self.notes if note[0] + note[1].shape[1] > end]

    def check(self, ids: Tensor, *, seen: int, rows: int) -> None:
        """Raise where ids are not a conversation whose beginning the cache has seen.

        Args:
            ids: (b, n) token ids of a whole conversation.
            seen: tokens that the cache has seen.
            rows: of the cache; several of them may belong to one row of ids, next to each other.

        Raises:
            CacheMisuse: it is no longer than what was seen, has other rows, or begins otherwise.
        """
        self.crop(seen)
        if not seen:
            return
        self.check_rows(seen=seen)
        if ids.ndim != 2 or ids.shape[0] == 0 or rows % ids.shape[0]:
            raise CacheMisuse(
                f"this cache holds {rows} rows, and got token ids {tuple(ids.shape)}: hand it the "
                "batch that it has seen"
            )
        check_longer(ids.shape[1], seen=seen)
        equal = 0
        spread = ids.repeat_interleave(rows // ids.shape[0], 0)
        hashes = (0,) * rows
        for known in self.known:
            piece = slice(equal, known.columns)
            trail = _trails(spread[:, piece], None if self.real is None else self.real[:, piece], hashes)
            hashes = tuple(trail[:, -1].tolist())
            for row, (found, wanted) in enumerate(zip(hashes, known.hashes, strict=True)):
                if found != wanted:
                    where = f"between columns {equal} and {known.columns}"
                    if self._trail is not None and self._trail.shape[1] >= known.columns:
                        where = f"from column {equal + int((trail[row] != self._trail[row, piece]).nonzero()[0])} on"
                    raise CacheMisuse(
                        f"row {row} is another conversation than the one of which this cache has seen {seen} tokens: "
                        f"token ids differ {where}. {_OF_TEMPLATES}; else {right_call()}"
                    )
            equal = known.columns

    def check_new(self, ids: Tensor, *, seen: int) -> None:
        """Raise where ids (b, t) begin with all that was seen once more; warn where they are just that."""
        columns = self.columns
        if columns < max(seen, _NO_CHANCE) or ids.shape[1] < columns or ids.shape[0] != len(self.known[-1].hashes):
            return
        beginning = _hashes(ids[:, :columns], self.real, (0,) * ids.shape[0])
        if beginning == self.known[-1].hashes:
            if ids.shape[1] == columns:
                # The same words twice may be meant.
                warnings.warn(
                    f"these {columns} token ids are those that this cache has seen, and prefill feeds them once more",
                    stacklevel=5,
                )
                return
            raise CacheMisuse(
                f"these {ids.shape[1]} token ids begin with the {seen} that this cache has seen, and prefill takes "
                f"what follows them: give it input_ids[:, {seen}:], or a new cache"
            )

    def crop(self, seen: int) -> None:
        """The cache has forgotten all but its first `seen` tokens."""
        cut = self.columns > seen
        self.notes = [
            (at, ids if at + ids.shape[1] <= seen else ids[:, : seen - at], writes)
            for at, ids, writes in self.notes
            if at < seen
        ]
        self.known = tuple(known for known in self.known if known.columns <= seen)
        if cut and seen and self._trail is not None and self._trail.shape[1] >= seen > self.columns:
            self.known += (Known(seen, tuple(self._trail[:, seen - 1].tolist())),)
        if self._trail is not None:
            self._trail = self._trail[:, :seen]
        if self.real is not None:
            self.real = self.real[:, : self.columns] if self.known else None

    def check_rows(self, *, seen: int) -> None:
        """Raise where it is not known which row of the cache has seen which text."""
        if self.reordered and seen:
            raise CacheMisuse(
                f"beam search has left its beams in this cache, which has seen {seen} tokens, in an order that the "
                "sequences it returned do not tell: go on with a new cache and the whole conversation"
            )

    def select_rows(self, index: Sequence[int], *, seen: int = 0) -> None:
        """Become the conversation of a batch made of the rows `index` of this one, which has seen so many tokens."""
        self.reordered = self.reordered or seen > self.columns
        # Rows of tokens that were noted alone are not followed: `take_notes` comes before, or they are unknown.
        self.notes = []
        if self._trail is not None:
            self._trail = self._trail[list(index)]
        self.known = tuple(Known(known.columns, tuple(known.hashes[i] for i in index)) for known in self.known)
        if self.real is not None:
            self.real = self.real[list(index)]


def check_longer(tokens: int, *, seen: int) -> None:
    """Raise where a conversation is no longer than what a cache has seen."""
    if tokens <= seen:
        found = f"this cache has seen {seen} tokens, and got a conversation of {tokens}"
        raise CacheMisuse(f"{found}. {_OF_TEMPLATES}; else {right_call()}")


def right_call() -> str:
    """What to do with a used cache, in words."""
    return (
        f"hand it the whole conversation, model.generate(torch.cat([seen_ids, new_ids], 1), {CACHE_ARGUMENT}=cache), "
        "of which generate() feeds what is new; for another conversation make a new cache or call cache.reset(); for "
        "several questions on one context, kvtailor.read(model, tokenizer, context, plan=plan).ask(questions); "
        "a pipeline takes a list of prompts as one batch with batch_size=len(prompts)"
    )


def _hashes(ids: Tensor, real: Tensor | None, before: Sequence[int]) -> tuple[int, ...]:
    """The hash of each row after ids (b, t) follow what had the hashes `before`."""
    return tuple(_trails(ids, real, before)[:, -1].tolist()) if ids.shape[1] else tuple(before)


def _trails(ids: Tensor, real: Tensor | None, before: Sequence[int]) -> Tensor:
    """(b, t) int64: the same after each of the ids."""
    terms = ids.to(device="cpu", dtype=torch.int64) + 1
    if real is not None:
        terms = terms.masked_fill(~real.to(device="cpu", dtype=torch.bool), 0)
    found = []
    for row, value in zip(terms.tolist(), before, strict=True):
        trail = []
        for term in row:
            value = (value * _BASE + term) % _PRIME
            trail.append(value)
        found.append(trail)
    return torch.tensor(found, dtype=torch.int64).reshape(len(before), ids.shape[1])
