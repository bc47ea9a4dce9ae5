"""The projections of a layer that caches latents (multi-head latent attention), read from its own code.

transformers' modules expand latents by a function of their own, `expand_kv`. What it does is found by handing it the
rows of an identity matrix, which serves quantised and adapted weights as well as plain ones, and it is checked on other
latents: it must be a product with a matrix for each head, and hand the rotated key on as it is.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from kvtailor.errors import UnsupportedModel
from kvtailor.hf.model.devices import aligned, runs_on
from kvtailor.hf.model.projection import OutputProjection
from kvtailor.types.latent_attention import LatentAttention

__all__ = ["LatentOutput", "LatentProjections", "projections_of"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Latents that are no rows of an identity matrix, on which what was found is checked.
_PROBES = 4
_found: weakref.WeakKeyDictionary[nn.Module, LatentProjections] = weakref.WeakKeyDictionary()


def _holds_latents(module: nn.Module) -> bool:
    """Return whether an attention module caches latents and expands them after its cache."""
    return callable(getattr(module, "expand_kv", None))


def projections_of(module: nn.Module) -> LatentProjections:
    """Return the projections of an attention module, found once for each module.

    Raises:
        UnsupportedModel: its expansion is not what multi-head latent attention does.
    """
    known = _found.get(module)
    if known is None and not _holds_latents(module):
        raise UnsupportedModel(
            f"its configuration gives this model latents (kv_lora_rank), and its {type(module).__name__} has no "
            "expand_kv that would make keys and values of what it caches; kvtailor supports transformers' own code of "
            "multi-head latent attention"
        )
    if known is None:
        known = _found[module] = LatentProjections(module)
    return known


class LatentProjections(LatentAttention):
    """What `expand_kv` of one attention module multiplies latents with, as it is now.

    The weight of a plain linear layer is read where it lies. Of any other (adapted, quantised) the matrix is kept, and
    found anew whenever the module answers otherwise to a fixed latent.

    Attributes:
        heads: H.
        nope: d', channels of a key that come from the latent.
        value: dv.
        rank: r.
        rope: e.
        verified: the module's forward was seen to hand expanded states on to its attention as they are.
    """

    def __init__(self, module: nn.Module):
        self._module = weakref.ref(module)
        self._name = type(module).__name__
        self.rank, self.rope = int(module.kv_lora_rank), int(module.qk_rope_head_dim)  # type: ignore[arg-type]
        self.verified = False
        # The matrix (H, d' + dv, r), and the answer of the module that it belongs to.
        self._kept: tuple[Tensor, tuple[Tensor, Tensor]] | None = None
        with torch.no_grad(), torch.autocast(runs_on(module).type, enabled=False):
            keys, values = self._answer(module, *self._probes(module))
            self.heads, self.nope, self.value = keys.shape[1], keys.shape[-1] - self.rope, values.shape[-1]
            matrix = self._extracted(module)
            weight = self._weight(module)
            if weight is not None and not torch.equal(weight, matrix):
                raise self._other("does not lay out its linear layer as a key and a value for each head")

    @property
    def module(self) -> nn.Module | None:
        """The attention module; None where it is gone."""
        return self._module()

    def __deepcopy__(self, memo: dict[int, Any]) -> LatentProjections:
        """A copy of a cache belongs to the same model."""
        return self

    def matrix(self) -> Tensor:
        """Return (H, d' + dv, r): for each head the rows that make a key's first channels, then those of a value."""
        module = self._module()
        if module is None:
            raise UnsupportedModel(f"the {self._name} whose projections this cache needs is gone with its model")
        weight = self._weight(module)
        if weight is not None:
            return weight
        now = self._answer(module, *self._probes(module))
        if self._kept is None or not all(map(torch.equal, now, self._kept[1])):
            self._kept = self._extracted(module), now
        return self._kept[0]

    def absorbed(self, query: Tensor) -> Tensor:
        """See `LatentAttention.absorbed`."""
        b, _, t, _ = query.shape
        keys = self.matrix()[:, : self.nope].to(query)
        # Rows and tokens are one axis, (H, b * t, d') times (H, d', r): a broadcast product would copy the matrix.
        turned = query[..., : self.nope].transpose(0, 1).reshape(self.heads, b * t, self.nope) @ keys
        turned = turned.view(self.heads, b, t, self.rank).transpose(0, 1)
        return torch.cat([turned, query[..., self.nope :]], -1)

    def lifted(self, sums: Tensor) -> Tensor:
        """See `LatentAttention.lifted`."""
        b, _, t, _ = sums.shape
        values = self.matrix()[:, self.nope :].to(sums)
        lifted = sums.transpose(0, 1).reshape(self.heads, b * t, self.rank) @ values.transpose(1, 2)
        return lifted.view(self.heads, b, t, self.value).transpose(0, 1)

    def expanded(self, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """See `LatentAttention.expanded`."""
        matrix = self.matrix().to(latents)
        # (m, s, H, d' + dv) -> (m, H, s, d' + dv).
        both = (latents @ matrix.flatten(0, 1).t()).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        keys = torch.cat([both[..., : self.nope], rotated[:, None].expand(-1, self.heads, -1, -1)], -1)
        return keys, both[..., self.nope :]

    def expands_cheaply(self, new: int, held: int) -> bool:
        """See `LatentAttention.expands_cheaply`. Counts products, those with the projections included."""
        projected = self.rank * (self.nope + self.value)
        on_latents = new * held * (2 * self.rank + self.rope) + new * projected
        return new * held * (self.nope + self.rope + self.value) + held * projected < on_latents

    def check(self, keys: Tensor, values: Tensor, latents: Tensor, rotated: Tensor) -> None:
        """Raise where the states that the module hands to its attention are not those that its latents expand to.

        Args:
            keys: (b, H, k, d). values: (b, H, k, dv). As the attention got them.
            latents: (b, k, r). rotated: (b, k, e). From which the module made them.

        Raises:
            UnsupportedModel: they are not.
        """
        due = self.expanded(latents, rotated)
        for name, found, expected in (("keys", keys, due[0]), ("values", values, due[1])):
            if found.shape != expected.shape or not _close(found, expected):
                raise self._other(f"changes {name} between the expansion of its latents and its attention")
        self.verified = True

    def _weight(self, module: nn.Module) -> Tensor | None:
        """The weight of the module's plain linear layer, (H, d' + dv, r); None where it is none."""
        linear: Any = getattr(module, "kv_b_proj", None)
        if type(linear) is not nn.Linear or linear.bias is not None:
            return None
        with aligned(linear) as brought:
            weight = linear.weight.detach()
            if type(weight) is not Tensor or weight.dtype not in _FLOATS:
                return None
            if weight.shape != (self.heads * (self.nope + self.value), self.rank):
                return None
            # What waits on the CPU or a disk is here for as long as it takes to copy it.
            return (weight.clone() if brought else weight).view(self.heads, -1, self.rank)

    def _extracted(self, module: nn.Module) -> Tensor:
        """The matrix, from what the module makes of an identity matrix; checked."""
        latents, rotated = self._probes(module)
        zero = latents.new_zeros((1, self.rank))
        unit = torch.cat([torch.eye(self.rank, dtype=latents.dtype, device=latents.device), zero])
        keys, values = self._answer(module, unit, rotated.new_zeros((self.rank + 1, self.rope)))
        # (H, r + 1, d' + dv): what each latent of one channel alone becomes, and last what none does.
        found = torch.cat([keys[0, ..., : self.nope], values[0]], -1)
        if bool(found[:, -1].any()) or bool(keys[0, ..., self.nope :].any()):
            raise self._other("adds a bias to what it makes of its latents")
        matrix = found[:, :-1].transpose(1, 2).contiguous()
        keys, values = self._answer(module, latents, rotated)
        both = torch.einsum("hor,kr->hko", matrix.float(), latents.float())
        rope = rotated.expand(self.heads, -1, -1)
        for part, due in (
            (keys[0, ..., : self.nope], both[..., : self.nope]),
            (keys[0, ..., self.nope :], rope),
            (values[0], both[..., self.nope :]),
        ):
            if part.shape != due.shape or not _close(part, due.to(part.dtype)):
                raise self._other("does something else than multiply its latents by a matrix for each head")
        return matrix

    def _probes(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Latents (k, r) and rotated keys (k, e), always the same."""
        device = runs_on(module)
        floats = (each.dtype for each in module.parameters() if each.dtype in _FLOATS)
        dtype = next(floats, torch.get_default_dtype())
        count = _PROBES * (self.rank + self.rope)
        numbers = (
            torch.linspace(-9.0, 9.0, count, device=device, dtype=torch.float32)
            .mul(37.0)
            .sin()
            .to(dtype)
            .view(_PROBES, -1)
        )
        return numbers[:, : self.rank], numbers[:, self.rank :]

    def _answer(self, module: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (1, H, k, d) and values (1, H, k, dv) of latents (k, r) and rotated keys (k, e), by the module."""
        keys, values = module.expand_kv(latents[None, None], rotated[None, None])
        return keys.detach(), values.detach()

    def _other(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self._name} caches latents, and {what}; kvtailor supports multi-head latent attention whose keys and "
            "values are one product of the latent, beside the rotated key"
        )


class LatentOutput:
    """The output projection as latents go through it: that of each head's values, behind what makes those of latents.

    Raises:
        UnsupportedModel: see `OutputProjection`.
    """

    def __init__(self, projections: LatentProjections, module: nn.Module):
        self._projections = projections
        self._output = OutputProjection(module, projections.heads, projections.value)

    def __call__(self) -> Tensor:
        """(H, r, D): a weighted sum of latents times this is what the head adds to the layer's output."""
        values = self._projections.matrix()[:, self._projections.nope :]
        return values.float().transpose(1, 2) @ self._output().float()

    def __deepcopy__(self, memo: dict[int, Any]) -> LatentOutput:
        """A copy of a cache belongs to the same model."""
        return self


def _close(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors of one dtype differ by the rounding of sums alone."""
    largest = max(float(found.abs().max()), float(expected.abs().max()))
    return bool(((found.float() - expected.float()).abs() <= 8 * torch.finfo(found.dtype).eps * largest).all())
