"""AsymKV (merging): a dropped token joins the kept one before it; keys are averaged, values add up.

*Idea*: keys of neighbours are alike, values are not. Where keys are equal, tokens can be merged without loss: the
values add up, and the token counts in the softmax as often as there are tokens in it. Where they are only alike, each
channel of the merged key is the mean in which a token weighs as much as the output depends on that channel of its key.

*Paper*: cui2025asymkv, "Homogeneous Keys, Heterogeneous Values: Exploiting Local KV Cache Asymmetry for Long-Context
LLMs", arXiv 2506.05410. k = sum h_i k_i / sum h_i for each channel, with h the diagonal of the Fisher information;
v = sum v_i, l = sum l_i, and the output is sum exp(q k_j) v_j / sum l_j exp(q k_j). We store the mean v / l and log l,
with which a softmax over q k_j + log l_j gives the same.

*Source*: the paper and a description of its repository; nothing was taken.

*Departs*: h comes from the layer's own output instead of the gradient of the loss, so that no backward pass is needed.
With o = sum_j a_j v_j, and a_j the share of token j, multiplicity counted, the derivative of o by channel c of k_j is
a_j (v_j - o) s q_c (s: the scaling), so over the window's queries h_jc = sum (a_j s q_c)^2 |v_j - o|^2; under a cap on
logits a_j is times its slope, and a learned sink has a share and the value 0. Multiplicities are not clipped at 5 as in
the repository, where what is above it adds to the values and counts no more. Pairs that share a token become one, where
the repository loses a part. The paper numbers tokens anew by their multiplicities; here a token keeps its position, and
keys are turned to that of the kept one before they are averaged (`turned`; set it false for a model without rotary
embedding). A token whose neighbour is encoded by a lossy codec, and can take nothing in, is dropped; those before the
first kept token join that one. Each kv head merges by itself.

*Cost*: the last `window` queries; scratch (g * window, n) float32 and some blocks, one kv head at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.merge.contract import Merged, Merger
from kvtailor.method import Serves
from kvtailor.ops.attention.observed import window_attention
from kvtailor.ops.lanes.kept import kept_first, kept_states
from kvtailor.ops.lanes.rotate import turn
from kvtailor.types import Held, Needs

__all__ = ["AsymKV"]

_BLOCK = 2048
# Tokens that received no attention all weigh the same.
_UNSEEN = 1e-30


@dataclass(frozen=True, kw_only=True)
class AsymKV(Merger):
    """Merges neighbours.

    Attributes:
        window: newest queries, from which it is computed how much the output depends on a key.
        turned: keys are turned to the position of the kept token before they are averaged; else they are averaged as
            they are stored, so that stored keys that are equal merge without loss.
    """

    window: int = 32
    turned: bool = True
    weighted: ClassVar[bool] = True
    examples: ClassVar[tuple[str, ...]] = ("asymkv", "asymkv(turned=false)")
    serves: ClassVar[Serves] = Serves(latents="it changes values otherwise than keys, and a latent is both at once")

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"asymkv: window must be at least 1 query, found {self.window}")

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window, rotation=self.turned)

    def merge(self, held: Held, keep: Tensor, into: Tensor) -> Merged:
        """See the contract.

        Raises:
            ValueError: no queries, or no rotation where keys are to be turned, were gathered.
        """
        if held.queries is None or (self.turned and held.rotation is None):
            raise ValueError(
                f"asymkv needs the last {self.window} queries{' and the rotation' if self.turned else ''}, and did not "
                f"get them; observe with {self.needs}"
            )
        index, filled = kept_first(keep, held.kept)
        keys, values = kept_states(held.keys, index, filled), kept_states(held.values, index, filled)
        before = torch.zeros_like(keep, dtype=torch.float32) if held.log_weight is None else held.log_weight
        log_weight = before.gather(-1, index).masked_fill_(~filled, 0.0)
        for row in range(keep.shape[0]):
            for head in range(keep.shape[1]):
                tokens = torch.arange(keep.shape[-1], device=keep.device)[held.there(row, head)]
                here = keep[row, head][tokens]
                # The number, among the kept ones, of the token that each token joins.
                joined = (here.cumsum(0) - 1).clamp(min=0)
                places = index[row, head]
                ones = torch.ones_like(joined)
                counts = torch.zeros_like(places).index_add_(0, joined, ones)
                # Of tokens that stay as they are nothing is asked; nor need the host know how many these are.
                some = (into[row, head][places] & (counts > 1))[joined]
                weighing = before[row, head][tokens].exp() * some
                total = torch.zeros_like(log_weight[row, head]).index_add_(0, joined, weighing)
                takes = total > 0
                one = log_weight[row, head]
                one.copy_(torch.where(takes, total.log(), one))
                mass = _averaged(held.values[row, head], tokens, joined, weighing[:, None], total.shape[0])
                _put(values[row, head], mass, takes)
                _put(keys[row, head], self._keys(held, row, head, tokens, joined, places, some), takes)
        return Merged(keys=keys, values=values, log_weight=log_weight)

    def flops(self, *, tokens: int, kept: int, group: int, size: int) -> int:
        """g w n (2 d + 6) for the attention, 4 d for each query and token for h, 12 d for each token that is merged."""
        if tokens == kept:
            return 0
        seen = group * min(self.window, tokens) * tokens
        return seen * (2 * size + 6) + seen * (4 * size + 3) + 12 * size * tokens

    def _keys(
        self, held: Held, row: int, head: int, at: Tensor, target: Tensor, places: Tensor, some: Tensor
    ) -> Tensor:
        """(k, d) float32 means of the keys at `at` (n,), of those that join the same of the kept tokens at `places`.

        Of keys at `at` those alone count that are among `some` (n,) bool.
        """
        assert held.queries is not None and held.query_columns is not None
        group, size = held.queries.shape[1] // held.keys.shape[1], held.keys.shape[-1]
        positions, kept = held.positions[row, head], places.shape[0]
        sums = torch.zeros((kept, size), dtype=torch.float32, device=held.keys.device)
        if not at.shape[0]:
            return sums
        given, _ = window_attention(held, row, head)
        queries = held.queries[row, head * group : (head + 1) * group]
        if not held.holds_window:
            queries = queries[:, held.held_by_any(row)]
        queries = queries.float() * held.scaling
        given, squares = given.flatten(0, 1), queries.flatten(0, 1) ** 2
        values = held.values[row, head]
        output = _summed_up(given, values, at)
        # A token that has nearly all of the attention is nearly the output, and only a difference tells them apart.
        most = given.argmax(-1)
        nearest = (values[at[most]].float() - output).square_().sum(-1)
        from_output = torch.cat([-2 * output, (output**2).sum(-1, keepdim=True)], 1)
        total = torch.zeros_like(sums)
        for first in range(0, at.shape[0], _BLOCK):
            block = slice(first, first + _BLOCK)
            tokens, where, counts = at[block], target[block], some[block]
            states = values.index_select(0, tokens).float()
            keys = held.keys[row, head].index_select(0, tokens).float()
            # |v - o|^2 = |v|^2 - 2 o v + |o|^2, the last two as one product with a channel of ones.
            ones = states.new_ones((states.shape[0], 1))
            apart = torch.addmm((states**2).sum(-1), from_output, torch.cat([states, ones], 1).t())
            there = (most >= first) & (most < first + tokens.shape[0])
            place = (most - first).clamp(0, tokens.shape[0] - 1)[:, None]
            apart.scatter_(1, place, torch.where(there[:, None], nearest[:, None], apart.gather(1, place)))
            given_here = given[:, block]
            if held.softmax.softcap is not None:
                # The slope of the cap, d (c tanh(l / c)) / dl = 1 - tanh(l / c)^2, at each product l.
                products = queries.flatten(0, 1) @ keys.t()
                given_here = given_here * (1 - products.div_(held.softmax.softcap).tanh_().square_())
            fisher = apart.clamp_min_(0.0).mul_(given_here).mul_(given_here).t() @ squares
            fisher = fisher.clamp_min_(_UNSEEN).mul_(counts[:, None])
            if self.turned:
                assert held.rotation is not None
                keys = turn(keys, positions[places[where]] - positions[tokens], held.rotation)
            sums.index_add_(0, where, keys * fisher)
            total.index_add_(0, where, fisher)
        return sums / total.clamp_min(_UNSEEN)


def _put(states: Tensor, merged: Tensor, takes: Tensor) -> None:
    """Put the merged states (k, c) float32 in place of those (k, c) that take others in (k,)."""
    states.copy_(torch.where(takes[:, None], merged.to(states.dtype), states))


def _averaged(states: Tensor, at: Tensor, target: Tensor, weighing: Tensor, kept: int) -> Tensor:
    """(k, d) float32 means of the states at `at` (e,) that join the same kept token, weighed with (e, 1)."""
    sums = torch.zeros((kept, states.shape[-1]), dtype=torch.float32, device=states.device)
    total = torch.zeros((kept, 1), dtype=torch.float32, device=states.device)
    for some, where, weight in zip(at.split(_BLOCK), target.split(_BLOCK), weighing.split(_BLOCK), strict=True):
        sums.index_add_(0, where, states.index_select(0, some).float() * weight)
        total.index_add_(0, where, weight)
    return sums / total.clamp_min(1e-30)


def _summed_up(given: Tensor, values: Tensor, at: Tensor) -> Tensor:
    """(v, dv) float32 attention output, of shares (v, n) and the values of the n tokens at `at`."""
    output = given.new_zeros((given.shape[0], values.shape[-1]))
    # Not by `split`, which has a part of nothing where a row has but padding so far.
    for first in range(0, at.shape[0], _BLOCK):
        output += given[:, first : first + _BLOCK] @ values.index_select(0, at[first : first + _BLOCK]).float()
    return output
