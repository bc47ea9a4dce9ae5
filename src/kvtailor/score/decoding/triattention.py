"""TriAttention: the tokens whose keys stand, at their distance, where the head's mean query looks.

*Idea*: before their rotation the queries of a head lie around one centre, whatever the text. Turned to the places that
are to come, that centre tells how much a key will get at its distance: a sum of cosines, one for each plane of the
rotation. What the centre does not explain of the queries is weighed by the length of the key in each plane. Nothing is
looked at while the model runs.

*Paper*: "TriAttention: Efficient Long Reasoning with Trigonometric KV Compression", arXiv 2604.04921; our `reach` = the
farthest of its distances 1, 2, 4, ..., our slack = its 128 decoded tokens between two evictions.

*Source*: notes on the paper and a reading of its repository (Apache-2.0); nothing was taken. Its scores for each head
are the variant here that keeps a set for each kv head; its default keeps one set for all.

*Departs*: the prompt stays, as there, but where it alone is longer than the budget, it is cut by the same scores; the
repository keeps its beginning. The distances are counted from the newest token. Channels that the model does not turn
count with the mean query's product. Positions count from a row's first token.

*Cost*: no evidence; 6 d bytes for each query head, and g + 1 products with the keys, one kv head at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.calibration_file import CalibratedMethod
from kvtailor.ops.lanes.rotate import turn_on_average, turned_planes
from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs, Rotation

__all__ = ["TriAttention"]


@dataclass(frozen=True, kw_only=True)
class TriAttention(CalibratedMethod, Scorer):
    """What each key is expected to get from queries to come, by the centre of its head's queries.

    Attributes:
        file: of `kvtailor calibrate triattention`; None: the one that is shipped for the model.
        reach: the farthest distance of a query to come, of 1, 2, 4, ... tokens.
        prompt: keep the prompt.
        recent: newest tokens that always stay.
    """

    reach: int = 65536
    prompt: bool = True
    recent: int = 0
    calibrates: ClassVar[str] = "triattention"
    per_head: ClassVar[tuple[str, ...]] = ("centres", "lengths")
    slack: ClassVar[int | None] = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reach < 1:
            raise ValueError(f"triattention: reach must be at least 1 token, found {self.reach}; the paper uses 65536")
        if self.recent < 0:
            raise ValueError(f"triattention: recent must be 0 or more tokens, found {self.recent}; the paper uses 0")

    @property
    def needs(self) -> Needs:
        return Needs(rotation=True)

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32: the largest standard score of a kv head's query heads; the prompt lies above all others.

        Raises:
            ValueError: no centres or no rotation were given.
        """
        if held.calibration is None or not set(self.per_head) <= set(held.calibration):
            raise ValueError("triattention scores by calibrated centres, but none were given; see `kvtailor calibrate`")
        if held.rotation is None:
            raise ValueError("triattention turns centres, but no rotation was given; observe with Needs(rotation=True)")
        centres, lengths = (held.calibration[name].to(held.keys.device, torch.float32) for name in self.per_head)
        lengths = lengths[..., : held.rotation.size // 2]
        asked = held.valid & (held.positions < held.prompt) if self.prompt else torch.zeros_like(held.valid)
        judged = held.valid & ~asked
        ahead = self._centres_ahead(held, centres, held.rotation)
        spread = lengths - _plane_lengths(centres, held.rotation)
        heads = []
        for head, keys in enumerate(held.keys.unbind(1)):
            given = keys.float() @ ahead[:, head].transpose(1, 2)
            given += _plane_lengths(keys.float(), held.rotation) @ spread[head].transpose(0, 1)
            heads.append(_standard(given, judged[:, head]).amax(-1))
        scores = torch.stack(heads, 1)
        if not self.prompt:
            return scores
        top = scores.masked_fill(~held.valid, 0.0).abs().amax(-1, keepdim=True)
        return torch.where(asked, scores + 2 * top + 1, scores)

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """n (2 g d + 2 d + g d + 5 g): products with the centres, lengths of the planes and products with them, and
        for each query head two sums, a difference, a square and a division."""
        return tokens * (2 * group * size + 2 * size + group * size + 5 * group)

    @classmethod
    def example_calibration(
        cls, *, layers: int, heads: int, group: int, size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Centres (layers, heads, group, size), and mean lengths (layers, heads, group, size // 2) above theirs."""
        centres = torch.randn(layers, heads, group, size, generator=generator, dtype=torch.float32)
        return {
            "centres": centres,
            "lengths": 3 + torch.rand(layers, heads, group, size // 2, generator=generator, dtype=torch.float32),
        }

    def _centres_ahead(self, held: Held, centres: Tensor, rotation: Rotation) -> Tensor:
        """(b, h, g, d): the mean of the centres (h, g, d), turned to the queries to come of each row."""
        ahead = 2 ** torch.arange(self.reach.bit_length(), device=centres.device)
        newest = held.seen - 1 - held.first
        if held.front is not None:
            # Without padding all rows are at the same place.
            return turn_on_average(centres, newest[0] + ahead, rotation).expand(newest.shape[0], *centres.shape)
        return torch.stack([turn_on_average(centres, place + ahead, rotation) for place in newest])


def _plane_lengths(states: Tensor, rotation: Rotation) -> Tensor:
    """(..., r / 2) lengths of states (..., d) in each plane that is turned."""
    one, two = turned_planes(states, rotation)
    return torch.hypot(one, two)


def _standard(given: Tensor, judged: Tensor) -> Tensor:
    """(b, n, g): less the mean over the `judged` (b, n) tokens, over their deviation; sums in float64."""
    given, weight = given.double(), judged[..., None].double()
    count = weight.sum(1, keepdim=True).clamp_min(1)
    mean = (given * weight).sum(1, keepdim=True) / count
    apart = given - mean
    deviation = ((apart.square() * weight).sum(1, keepdim=True) / count).sqrt()
    return (apart / deviation.clamp_min(1e-6)).float()
