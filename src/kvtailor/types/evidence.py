"""What plans' methods want to see of a layer when tokens are evicted, and what the engine keeps of it until then.

A `Repetition` is a second reading, in which the model repeats its context. Shape letters are those of `types`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

__all__ = ["Evidence", "Moments", "Needs", "Repetition", "Rotation", "first_of_window", "strided"]


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """How the model repeats its context, for methods that need the attention of a repetition.

    Attributes:
        chunk: at most so many tokens of a row are repeated in one pass.
        lead: tokens before a piece of the context that introduce it.
        sinks: a row's first tokens, with which the tokens of every piece share the attention.
        queries: at most so many queries spread over all that a row repeats are kept until the context is compressed.
        weighted: each probability counts times the length of what the value becomes in the layer's output, over the
            length of the hidden state that the query was made from. Where it is, `Needs.output` is needed, too.
        graded: with `weighted`, the length of a gradient stands in the place of one over the hidden state's: that of
            the sum of squares of the last layer's hidden states, by what the layer's attention adds at the query's
            token.
        mean_group: of each query head the highest counts, and of these the mean over the group; else the highest of
            the group.
    """

    chunk: int
    lead: int
    sinks: int
    queries: int = 0
    weighted: bool = False
    graded: bool = False
    mean_group: bool = False

    def __or__(self, other: Repetition | None) -> Repetition:
        """One repetition that serves both: a method that asks for queries takes them of any."""
        if other is None:
            return self
        leading = other if self.queries and not other.queries else self
        return replace(
            leading,
            queries=max(self.queries, other.queries),
            weighted=self.weighted or other.weighted,
            graded=self.graded or other.graded,
            mean_group=self.mean_group or other.mean_group,
        )


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The evidence that a method of any stage declares; nothing else is gathered for it.

    Attributes:
        window: the last `window` post-RoPE queries (0: none).
        mass: the attention mass that each held token received from all causal queries so far, summed over the
            group's query heads, kept running through decode.
        rows: at most so many queries spread evenly over all real tokens of a row (0: none).
        moments: mean and covariance of all real queries before their rotation.
        moments_skip: the first tokens of each row that the moments leave out.
        previous: what the scorer kept of each token at the eviction before: its scores, or its notes.
        notes: so many numbers of its own does the scorer keep of each token, in the place of its score; see
            `Scorer.note`.
        reconstruction: how the model is to repeat the whole context, for the most attention that each token receives
            meanwhile; None: not needed.
        output: the layer's own output projection.
        rotation: the model's rotary embedding.
        offset: the constant part of the layer's keys, where its projection has a bias.
    """

    window: int = 0
    mass: bool = False
    rows: int = 0
    moments: bool = False
    moments_skip: int = 0
    previous: bool = False
    notes: int = 0
    reconstruction: Repetition | None = None
    output: bool = False
    rotation: bool = False
    offset: bool = False

    @property
    def of_attention(self) -> bool:
        """Whether queries, or what they attend to, are among it."""
        return bool(self.window or self.mass or self.rows or self.moments or self.reconstruction)

    @property
    def of_prompt(self) -> Needs:
        """What a prompt's own forward gathers of it."""
        skip = self.moments_skip if self.moments else 0
        return Needs(window=self.window, mass=self.mass, rows=self.rows, moments=self.moments, moments_skip=skip)

    def covers(self, other: Needs) -> bool:
        """Whether what a prompt's forward gathers for these holds what it gathers for others, see `Evidence.within`."""
        mine, theirs = self.of_prompt, other.of_prompt
        moments = not theirs.moments or (mine.moments and mine.moments_skip == theirs.moments_skip)
        return mine.window >= theirs.window and mine.rows >= theirs.rows and mine.mass == theirs.mass and moments

    def __or__(self, other: Needs) -> Needs:
        """What serves both."""
        return Needs(
            window=max(self.window, other.window),
            mass=self.mass or other.mass,
            rows=max(self.rows, other.rows),
            moments=self.moments or other.moments,
            moments_skip=max(self.moments_skip, other.moments_skip),
            previous=self.previous or other.previous,
            notes=max(self.notes, other.notes),
            reconstruction=self.reconstruction | other.reconstruction if self.reconstruction else other.reconstruction,
            output=self.output or other.output,
            rotation=self.rotation or other.rotation,
            offset=self.offset or other.offset,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotation:
    """A model's rotary embedding on one layer: plane i of a state at position p is turned by p * frequencies[i].

    Attributes:
        frequencies: (r / 2,) float32 radians per position. The first r channels of a state are turned, the rest not.
        interleaved: plane i is the channels 2i and 2i + 1; else i and i + r / 2.
    """

    frequencies: Tensor
    interleaved: bool = False

    @property
    def size(self) -> int:
        """r, channels that are turned."""
        return 2 * int(self.frequencies.shape[0])


@dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """Mean and covariance of queries as they were before their rotation.

    A query of column c is turned back by c positions, less the padding between it and the row's first real token. Where
    a row's positions do not count from its column 0 (left padding), all of its moments are turned by the same angle,
    and so are the keys that they are multiplied with.

    Attributes:
        count: (b,) float32 queries.
        mean: (b, q, d) float32; zeros where there is no query.
        spread: (b, q, d, d) float32 sum of the outer products of the deviations from the mean.
    """

    count: Tensor
    mean: Tensor
    spread: Tensor

    def covariance(self) -> Tensor:
        """(b, q, d, d) float32: the spread over the count; zeros where there is no query."""
        return self.spread / self.count.clamp(min=1)[:, None, None, None]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What one layer remembers for its methods.

    Attributes:
        queries: (b, q, w, d) the newest post-RoPE queries, those of the needed window; None if none are needed.
        columns: (w,) int64 their columns, ascending. Where other layers of the model read what this one holds, their
            queries are here as well, and several are of one column.
        span: these columns, where the host knows that they are consecutive, with one query of each; else None.
        mass: for each stored part, in time order, (m, s) float32 attention mass received so far.
        sampled: (b, q, m, d) post-RoPE queries spread over each row; None if none are needed.
        sampled_columns: (b, m) int64 their columns, -1 for filler.
        moments_count, moments_mean, moments_spread: see `Moments`.
    """

    queries: Tensor | None = None
    columns: Tensor | None = None
    span: range | None = None
    mass: tuple[Tensor, ...] = field(default=())
    sampled: Tensor | None = None
    sampled_columns: Tensor | None = None
    moments_count: Tensor | None = None
    moments_mean: Tensor | None = None
    moments_spread: Tensor | None = None

    def with_newest(self, queries: Tensor, columns: Tensor, span: range) -> Evidence:
        """The same with other newest queries: as `dataclasses.replace`, which takes several times as long."""
        made = object.__new__(Evidence)
        made.__dict__.update(self.__dict__, queries=queries, columns=columns, span=span)
        return made

    @property
    def moments(self) -> Moments | None:
        """Return the three tensors as one value."""
        if self.moments_count is None or self.moments_mean is None or self.moments_spread is None:
            return None
        return Moments(count=self.moments_count, mean=self.moments_mean, spread=self.moments_spread)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that the evidence keeps alive, by name."""
        named = {f"mass.{i}": part for i, part in enumerate(self.mass)}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Tensor):
                named[each.name] = value
        return named

    @classmethod
    def from_tensors(cls, named: Mapping[str, Tensor]) -> Evidence:
        """The evidence that `tensors()` listed."""
        mass = tuple(named[f"mass.{i}"] for i in range(sum(name.startswith("mass.") for name in named)))
        own: dict[str, Any] = {name: tensor for name, tensor in named.items() if not name.startswith("mass.")}
        return cls(mass=mass, **own)

    def select_rows(self, index: Tensor, mass: Sequence[Tensor]) -> Evidence:
        """The evidence of a batch made of the rows `index` (k,); `mass` was picked lane by lane by the caller."""
        picked: dict[str, Any] = {
            name: tensor.index_select(0, index.to(tensor.device))
            for name, tensor in self.tensors().items()
            if name != "columns" and not name.startswith("mass.")
        }
        return replace(self, mass=tuple(mass), **picked)

    def within(self, needs: Needs) -> Evidence:
        """Return copies of what would be here, had the same prompt been read for needs that these cover."""
        found = Evidence()
        if needs.window and self.queries is not None and self.columns is not None:
            first = first_of_window(self.columns, self.span, needs.window)
            found = replace(
                found,
                queries=self.queries[:, :, first:].clone(),
                columns=self.columns[first:].clone(),
                span=None if self.span is None else self.span[first:],
            )
        if needs.rows and self.sampled is not None and self.sampled_columns is not None:
            queries, columns = strided(self.sampled, self.sampled_columns, needs.rows)
            assert queries is not None and columns is not None
            found = replace(found, sampled=queries.clone(), sampled_columns=columns.clone())
        if needs.moments and self.moments is not None:
            found = replace(
                found,
                moments_count=self.moments.count.clone(),
                moments_mean=self.moments.mean.clone(),
                moments_spread=self.moments.spread.clone(),
            )
        return replace(found, mass=tuple(each.clone() for each in self.mass)) if needs.mass else found

    @property
    def has_queries(self) -> bool:
        """Whether `without_queries` would leave anything out."""
        return self.queries is not None or self.sampled is not None or self.moments_count is not None

    def without_queries(self) -> Evidence:
        """Return the evidence without queries, for when no later eviction needs them."""
        return Evidence(mass=self.mass)


def first_of_window(columns: Tensor, span: range | None, window: int) -> int:
    """Return the place of the first query of the newest `window` columns among queries of these `columns` (w,).

    By columns and not by number: several modules that read one layer have queries of the same columns.

    Args:
        columns: ascending.
        span: see `Evidence.span`.
        window: at least 1.
    """
    if columns.shape[0] <= window:
        return 0
    return len(span) - window if span is not None else int((columns <= columns[-1] - window).sum())


def strided(queries: Tensor, columns: Tensor, most: int) -> tuple[Tensor | None, Tensor | None]:
    """At most `most` of the queries (b, q, m, d) of each row: those that a sample of so many would hold."""
    if not most:
        return None, None
    if columns.shape[1] <= most:
        return queries, columns
    counts = (columns >= 0).sum(-1, keepdim=True)
    # As strides double in a sample. The host waits for no number of the device.
    stride = torch.ones_like(counts)
    for _ in range((-(-columns.shape[1] // most) - 1).bit_length()):
        stride = torch.where(counts > most * stride, 2 * stride, stride)
    place = torch.arange(most, device=columns.device) * stride
    here, place = place < counts, place.clamp(max=columns.shape[1] - 1)
    fewer = queries.gather(2, place[:, None, :, None].expand(*queries.shape[:2], most, queries.shape[3]))
    return fewer.masked_fill(~here[:, None, :, None], 0.0), columns.gather(1, place).masked_fill(~here, -1)
