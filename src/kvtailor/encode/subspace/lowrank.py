"""Low rank: keys, values or both as coordinates in a subspace of fewer directions than channels.

*Idea* States lie mostly in few directions. Those of most energy over a calibration text are found once; a token stores
its coordinates along them. Attention sums the values' coordinates and turns each sum back once, so that values are
never reconstructed token by token; keys are, when they are read.
*Paper* `chang2025palu` (arXiv 2407.21118), sections 3.1 to 3.3: heads = its group (G-LRD; 1 = M-LRD, 0 = J-LRD),
allocation = its rank search. Its keys are those before the rotary embedding: `unrotated(of=lowrank)`.
*Source* The paper, a description of its code, and one of the KV Plugin's; kvtailor's own code.
*Departs* Palu cuts the singular values of W S, where S S^T is the second moment of the layer's inputs x. As the left
singular vectors of W S are the eigenvectors of the second moment of W x, bases are made from cached states. A bias is
part of them, unless `centred` takes the mean off. Ranks are the same for all groups of a layer and side. A plan that
evicts projects each head alone, at the same share, since joined heads would have to keep the same tokens.
*Cost* rank / width of the bytes of what is projected. Encoding: 2 * width * rank operations for each token of a group;
at every step 2 * d * rank for each side of a query, but under `unrotated`, which turns all keys back at every step. The
directions, width * rank numbers for each group, are there once for all caches and are not in the ledger, as Palu's are
inside the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvtailor.calibration_file import CalibratedMethod
from kvtailor.encode.contract import Codec, CodecContext, Sides, refuse_non_finite
from kvtailor.method import renamed
from kvtailor.ops.attention.joined import group_layout, hold_the_same, members, together
from kvtailor.ops.codes.quant import largest_divisor
from kvtailor.ops.codes.subspace import (
    Basis,
    Moments,
    on_device,
    part_of_heads,
    principal,
    random_directions,
    rank_of,
    split_ranks,
)
from kvtailor.ops.segments.coded import alone
from kvtailor.ops.segments.latents import LatentSegment, inner_state
from kvtailor.types import ALL_HEADS, HeadShare, Layout, PlainSegment, Segment

__all__ = ["LowRank"]


@renamed(residual="recent")
@dataclass(frozen=True, kw_only=True)
class LowRank(CalibratedMethod, Codec):
    """Projection on the directions of most energy.

    Attributes:
        file: of `kvtailor calibrate lowrank`; None: the one that is shipped for the model.
        rank: directions of a group, at most its width; or a share of the width if it has a decimal point.
        heads: kv heads that are projected together, or the largest number below that divides the model's; 0: all.
        shared: all heads have the same directions, each for itself.
        centred: the mean is taken off before, and directions are those of the variance.
        only: what is projected; the other side stays as it is.
        of: the codec of the coordinates; None: they stay as they are.
        basis: "random" takes random directions, which no calibration is needed for.
        state: random state of these.
        allocation: "fisher" gives layers, and keys and values, ranks in proportion to the weights of the file, of the
            same sum.
        recent: newest tokens that stay in full precision, or more where `of` has more.
        block_size: tokens that are encoded at once where `of` has no block.
    """

    rank: int | float = 0.5
    heads: int = 1
    shared: bool = False
    centred: bool = False
    only: Sides = "both"
    of: Codec | None = None
    basis: Literal["calibrated", "random"] = "calibrated"
    state: int = 0
    allocation: Literal["uniform", "fisher"] = "uniform"
    recent: int = 0
    block_size: int = 128
    calibrates: ClassVar[str] = "lowrank"
    examples: ClassVar[tuple[str, ...]] = (
        "lowrank(rank=1.0, basis=random)",
        "lowrank(rank=1.0, heads=0, basis=random)",
        "lowrank(rank=1.0, heads=2, only=values, of=vector, basis=random)",
        "lowrank(rank=1.0, heads=0, only=keys, of=hadamard(of=kivi(bits=4, group=16, recent=16)), basis=random)",
    )
    _context: CodecContext | None = field(init=False, repr=False, compare=False, default=None)
    splits_heads: ClassVar[bool] = True
    latent_refusal: ClassVar[str | None] = (
        "it stores keys and values in bases of their own, and a latent is both at once"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        share = isinstance(self.rank, float)
        if not (0 < self.rank <= 1 if share else self.rank >= 1):
            raise ValueError(
                f"lowrank: rank must be 1 direction or more, or a share above 0.0 and at most 1.0, found {self.rank}"
            )
        if self.heads < 0:
            raise ValueError(f"lowrank: heads must be 1 or more, or 0 for all of a layer, found {self.heads}")
        if self.shared and self.heads != 1:
            raise ValueError(f"lowrank: shared directions are those of single heads, found heads={self.heads}")
        if self.basis == "random" and (self.centred or self.allocation == "fisher"):
            raise ValueError(
                "lowrank: centred=true and allocation=fisher read a calibration, and basis=random has none: leave them "
                "out, or take basis=calibrated"
            )
        if self.recent < 0 or self.block_size < 1:
            raise ValueError(
                f"lowrank: recent must be 0 or more tokens and block_size 1 or more, found {self.recent} and "
                f"{self.block_size}"
            )
        inner = self._latents
        if inner is not None and (inner.needs_rotation or inner.weighs_tokens):
            raise ValueError(
                "lowrank: of codes coordinates, which have no positions and cannot be merged; write "
                "unrotated(of=lowrank(...)) for keys before the rotary embedding"
            )

    @property
    def wants_calibration(self) -> bool:
        return self.basis == "calibrated"

    def split_refusal(self, *, heads: int, ranks: int) -> str | None:
        """Groups of heads that neither fit into a process nor are made of whole processes."""
        group = self._group(heads * ranks)
        if group % heads == 0 or heads % group == 0:
            return None
        return (
            f"lowrank: it projects {group} kv heads together, and each of the {ranks} processes holds {heads}: neither "
            "divides the other; give another `heads`, or another number of processes"
        )

    @property
    def coordinates(self) -> Codec | None:
        """The codec of the coordinates."""
        return self.of

    @property
    def tail(self) -> int:
        return max(self.recent, 0 if self._latents is None else self._latents.tail)

    @property
    def block(self) -> int:
        return (0 if self._latents is None else self._latents.block) or self.block_size

    @property
    def lane_multiple(self) -> int:
        return 1 if self._latents is None else self._latents.lane_multiple

    def one_sided(self, side: Sides, asked: str) -> LowRank:
        of = None if self.of is None else self.of.one_sided(side, asked)
        if of is None and self.only not in ("both", side):
            super().one_sided(side, asked)
        return replace(self, of=of, only=side if self.only in ("both", side) else self.only)

    def for_layer(self, context: CodecContext) -> LowRank:
        made = copy.copy(self)
        object.__setattr__(made, "_context", context)
        return made

    def segment_type(self) -> type[LatentSegment]:
        return LatentSegment

    def encode(self, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None = None) -> LatentSegment:
        """Keys (m, s, d) and values (m, s, dv), projected.

        Raises:
            CacheMisuse: NaN or infinity.
            ValueError: there is no calibration.
        """
        refuse_non_finite("lowrank", keys, values, "which would be in every direction")
        # `here` of the `joined` heads of a group are this process's; the others lie in those beside it.
        joined = self._joined(layout.heads)
        here = min(joined, layout.heads)
        lanes = members(layout, here) if here > 1 else None
        if here > 1 and not hold_the_same(layout, lanes):
            joined, lanes = 1, None
        own = layout if lanes is None else group_layout(layout, lanes)
        bases = self._bases(joined, layout.heads, keys.shape[-1], values.shape[-1], keys.device)
        latents = []
        for side, states, basis in zip(("keys", "values"), (keys, values), bases, strict=True):
            wide = states if lanes is None else together(states, lanes)
            if basis is None:
                latents.append(wide[..., :0])
            elif basis.apart == 1:
                latents.append(basis.latents(wide, own.owner))
            else:
                latents.append(self._latents_of_group(side, wide, own.owner, basis, layout.heads))
        codec = self._of_layer()
        inner: Segment = PlainSegment(layout=own, keys=alone(latents[0]), values=alone(latents[1]))
        if codec is not None:
            inner = codec.encode(own, latents[0], latents[1], first)
        whole = None if self.only == "both" else alone(keys if self.only == "values" else values)
        return LatentSegment(layout=layout, inner=inner, keys_basis=bases[0], values_basis=bases[1], whole=whole)

    def restore(self, layout: Layout, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> LatentSegment:
        joined, apart = int(str(fields["joined"])), int(str(fields["apart"]))
        lanes = members(layout, joined) if joined > 1 else None
        own = layout if lanes is None else group_layout(layout, lanes)
        own_fields, own_tensors = inner_state(fields, tensors)
        codec = self._of_layer()
        restore = PlainSegment.from_state if codec is None else codec.restore
        inner, whole = restore(own, own_fields, own_tensors), tensors.get("whole")
        key_size, value_size = (int(str(fields[name])) for name in ("key_size", "value_size"))
        device = next(iter(tensors.values())).device
        keys, values = self._bases(joined * apart, layout.heads, key_size, value_size, device)
        # The heads of a group went apart, and each has the group's latents for itself.
        keys, values = (None if each is None else each if each.joined == joined else each.by_head()
                        for each in (keys, values))  # fmt: skip
        return LatentSegment(layout=layout, inner=inner, keys_basis=keys, values_basis=values, whole=whole)

    def bytes_per_token(self, key_size: int, value_size: int, element_size: int) -> float:
        """A group's latents, shared by its heads, and the side that stays as it is."""
        heads, codec = self._known_heads, self._of_layer()
        joined = self._joined(heads)
        ranks = self._ranks(joined, heads, key_size, value_size)
        latents = sum(ranks) * element_size if codec is None else codec.bytes_per_token(*ranks, element_size)
        whole = {"both": 0, "keys": value_size, "values": key_size}[self.only]
        return latents / joined + whole * element_size

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        """2 w r for each projected token of a group of width w, and those of the inner codec; for one head of it."""
        return self._flops("encode_flops", tokens, key_size, value_size, ("keys", "values"))

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        """2 w r for each key of a group, and those of the inner codec; values are turned back once for each query."""
        return self._flops("decode_flops", tokens, key_size, value_size, ("keys",))

    def read_flops(self, *, tokens: int, queries: int, key_size: int, value_size: int) -> int | None:
        """2 d r for each side of a query, products with coordinates that are more than channels, and the inner codec's.

        What fewer coordinates than channels save of the products is not taken off.
        """
        joined, sizes = self._joined(self._known_heads), (key_size, value_size)
        ranks = self._ranks(joined, self._known_heads, key_size, value_size)
        own = sum(
            2 * queries * size * rank + 2 * queries * tokens * max(0, rank - size)
            for size, rank in zip(sizes, ranks, strict=True)
            if rank
        )
        if self._latents is None:
            return own
        inner = self._latents.read_flops(
            tokens=tokens, queries=queries * joined, key_size=ranks[0], value_size=ranks[1]
        )
        return None if inner is None else own + -(-inner // joined)

    @classmethod
    def example_calibration(
        cls, *, layers: int, heads: int, group: int, size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Moments of random states, and random weights."""
        found: dict[str, Tensor] = {
            f"fisher_{side}": torch.rand(layers, generator=generator) for side in ("keys", "values")
        }
        for side in ("keys", "unrotated", "values"):
            each = []
            for _ in range(layers):
                states = torch.randn(4 * heads * size, heads * size, generator=generator, dtype=torch.float64)
                states = states * torch.linspace(0.2, 3, heads * size) + 0.5
                each.append(Moments.of(states.mT @ states, states.sum(0).view(heads, size), states.shape[0]))
            for name in ("mean", "deviation", "correlation"):
                found[f"{side}_{name}"] = torch.stack([getattr(moments, name) for moments in each])
        return found

    @property
    def _latents(self) -> Codec | None:
        """The codec of the coordinates, of the projected side alone where there is one."""
        codec = self.coordinates
        return codec if codec is None or self.only == "both" else codec.one_sided(self.only, "lowrank")

    def _of_layer(self) -> Codec | None:
        codec = self._latents
        return codec if codec is None or self._context is None else codec.for_layer(self._context)

    def _group(self, heads: int) -> int:
        """Heads of a group, as the plan has it, of so many of a layer."""
        return heads if self.heads == 0 else largest_divisor(heads, self.heads)

    @property
    def _share(self) -> HeadShare:
        return ALL_HEADS if self._context is None else self._context.share

    def _joined(self, heads: int) -> int:
        """Heads of a group that are projected together, of this process's `heads` and those of others."""
        return 1 if self._context is not None and self._context.evicts else self._group(self._share.total(heads))

    def _latents_of_group(self, side: str, wide: Tensor, owner: Tensor | None, own: Basis, heads: int) -> Tensor:
        """(m', s, r) of a group that several processes hold, which is all heads of each of them.

        All of them take the same product of all of the group's states, as one process would: parts of it that were
        added up would be rounded otherwise, and coded otherwise.

        Args:
            side: "keys" or "values".
            wide: (m', s, w) the states of this process's heads.
            owner: see `Basis.latents`.
            own: the part of the basis that belongs to these heads.
            heads: how many they are.
        """
        share, near = self._share, own.apart
        first, width = share.rank // near * near, wide.shape[-1]
        states = share.gather(wide, 2)[..., first * width : (first + near) * width]
        whole = self._basis(side, own.rank, heads * near, share.total(heads), width // heads)
        group = part_of_heads(whole, first * heads, heads * near)
        return on_device(group, wide.device).latents(states, owner)

    def _ranks(self, joined: int, heads: int, key_size: int, value_size: int) -> tuple[int, int]:
        """Directions of so many joined heads' keys and values on this layer, 0 for a side that is not projected."""
        context, parts = self._context, self._group(self._share.total(heads)) // joined
        sizes = (0 if self.only == "values" else key_size, 0 if self.only == "keys" else value_size)
        widths = [joined * size for size in sizes]
        ranks = [rank_of(self.rank, width, parts) for width in widths]
        if self.allocation == "uniform" or context is None or context.calibration is None:
            return ranks[0], ranks[1]
        weights = torch.stack([context.calibration[f"fisher_{side}"].cpu() for side in ("keys", "values")])
        split = split_ranks(weights, torch.tensor(ranks), torch.tensor(widths))[:, context.layer].tolist()
        return split[0], split[1]

    def _bases(
        self, joined: int, heads: int, key_size: int, value_size: int, device: torch.device
    ) -> tuple[Basis | None, Basis | None]:
        sizes, ranks = (key_size, value_size), self._ranks(joined, heads, key_size, value_size)
        keys, values = (
            None if rank == 0 else on_device(self._own_basis(side, rank, joined, heads, size), device)
            for side, rank, size in zip(("keys", "values"), ranks, sizes, strict=True)
        )
        return keys, values

    def _own_basis(self, side: str, rank: int, joined: int, heads: int, size: int) -> Basis:
        """What the basis of all heads is for this process's `heads`."""
        share = self._share
        whole = self._basis(side, rank, joined, share.total(heads), size)
        return whole if share.ranks == 1 else part_of_heads(whole, share.first(heads), heads)

    def _basis(self, side: str, rank: int, joined: int, heads: int, size: int) -> Basis:
        """The basis of a layer with so many kv heads in all."""
        context = self._context
        if self.basis == "random":
            layer = 0 if context is None else context.layer
            drawn = 2 * (self.state * 10_007 + layer) + (side == "values")
            return random_directions(heads // joined, joined, joined * size, rank, drawn, shared=self.shared)
        if context is None or context.calibration is None:
            raise ValueError("lowrank: no calibration was given; call for_layer first, with the tensors of a file")
        name = "unrotated" if side == "keys" and context.unrotated else side
        tensors = {part: context.calibration[f"{name}_{part}"] for part in ("mean", "deviation", "correlation")}
        moments = Moments(**{part: tensor[context.layer] for part, tensor in tensors.items()})
        return principal(moments, joined, rank, centred=self.centred, shared=self.shared)[0]

    def _flops(self, name: str, tokens: int, key_size: int, value_size: int, sides: tuple[str, ...]) -> int | None:
        heads = self._known_heads
        joined = self._joined(heads)
        ranks = self._ranks(joined, heads, key_size, value_size)
        turned = zip(("keys", "values"), (key_size, value_size), ranks, strict=True)
        own = sum(2 * tokens * size * rank for side, size, rank in turned if side in sides)
        if self._latents is None:
            return own
        inner: int | None = getattr(self._latents, name)(tokens=tokens, key_size=ranks[0], value_size=ranks[1])
        return None if inner is None else own + -(-inner // joined)

    @property
    def _known_heads(self) -> int:
        return (self._context.heads if self._context is not None else None) or max(1, self.heads)
