"""What a plan did in the rounds of the task `speculation`, and what of it stands in a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch

from kvtailor.bench.measure.cache_fields import weigh
from kvtailor.bench.measure.statistics import geometric_mean, timings_of
from kvtailor.hf.run.generate import Generated
from kvtailor.ledger import storage_bytes
from kvtailor.speculate.rounds import Level

__all__ = ["DraftRounds"]


@dataclass
class DraftRounds:
    """The rounds that count, of one plan; of the model's own cache only those of plain decoding.

    Attributes:
        plain: seconds without a draft.
        drafted: seconds with it.
        disturbed: whether either was.
        identical: 1: the same text.
        levels: the counts of each level, the target's first.
        weight: of the last cache, see `bench.measure.cache_fields.weigh`.
        device_bytes: of all caches of the last round together, on the device.
        plain_device_bytes: of the plan's own cache without a draft.
    """

    plain: list[float] = field(default_factory=list)
    drafted: list[float] = field(default_factory=list)
    disturbed: list[bool] = field(default_factory=list)
    identical: list[float] = field(default_factory=list)
    levels: list[tuple[Level, ...]] = field(default_factory=list)
    weight: dict[str, Any] = field(default_factory=dict)
    device_bytes: int | None = None
    plain_device_bytes: int | None = None

    @property
    def clean(self) -> int:
        """Rounds that were not disturbed."""
        return self.disturbed.count(False)

    def add(self, plain: Generated, drafted: Generated, disturbed: bool) -> None:
        """A round."""
        self.plain.append(plain.statistics.seconds)
        self.drafted.append(drafted.statistics.seconds)
        self.disturbed.append(disturbed)
        self.identical.append(float(torch.equal(plain.sequences, drafted.sequences)))
        self.levels.append(drafted.statistics.levels)
        self.weight = weigh(drafted.cache)
        self.plain_device_bytes = plain.cache.ledger().by_tier["device"]
        self.device_bytes = sum(each.ledger().by_tier["device"] for each in (drafted.cache, *drafted.drafts))

    def timings(self, wanted: int) -> dict[str, Mapping[str, float | None]]:
        """As in `Record.timings`, of `wanted` rounds."""
        drafted = {"generation": self.drafted} if self.drafted else {}
        return timings_of({"plain": self.plain, **drafted}, self.disturbed, wanted)

    def values(self, own: DraftRounds, *, greedy: bool) -> dict[str, tuple[float, ...]]:
        """As in `Record.values`; `own` is what the model's own cache did."""
        found: dict[str, Sequence[float]] = {"plain": self.plain, "disturbed": [float(bad) for bad in self.disturbed]}
        if self.drafted:
            target = [levels[0] for levels in self.levels]
            found |= {"generation": self.drafted, **self._ratios(own)}
            found["acceptance"] = [each.acceptance or 0.0 for each in target]
            found["emitted_per_verification"] = [each.emitted_per_verification or 1.0 for each in target]
            if greedy:
                found["identical"] = self.identical
        return {name: tuple(each) for name, each in found.items()}

    def metrics(
        self, own: DraftRounds, tokens: int, wanted: int, small: Any, *, greedy: bool
    ) -> dict[str, float | None]:
        """As in `Record.metrics`; nothing for the model's own cache.

        Args:
            own: what the model's own cache did.
            tokens: that were timed in each round.
            wanted: rounds that were asked for.
            small: the draft model; None: there is none.
            greedy: texts can be compared.
        """
        if not self.drafted:
            return {}
        found: dict[str, float | None] = {}
        timings = self.timings(wanted)
        for name, of in (("tokens_per_second", "generation"), ("plain_tokens_per_second", "plain")):
            seconds = timings.get(of, {}).get("median")
            found[name] = tokens / seconds if seconds else None
        target, *inner = (_together(level) for level in zip(*self.levels, strict=True))
        found["acceptance"], found["emitted_per_verification"] = target.acceptance, target.emitted_per_verification
        found["inner_acceptance"] = inner[0].acceptance if inner else None
        for name, each in self._ratios(own).items():
            found[name] = geometric_mean(each).value if each else None
        found["identical"] = fmean(self.identical) if greedy else None
        found["device_bytes"], found["plain_device_bytes"] = self.device_bytes, self.plain_device_bytes
        found["resident_hits"], found["bytes_read"] = _moved(self.weight.get("traffic"))
        found["draft_weight_bytes"] = None if small is None else storage_bytes(list(small.parameters()))
        return found

    def _ratios(self, own: DraftRounds) -> dict[str, list[float]]:
        """What plain decoding took over what this took, in each round that was undisturbed on both sides."""
        found = {}
        for name, base in (("speed_up", self), ("speed_up_own", own)):
            rounds = zip(base.plain, self.drafted, base.disturbed, self.disturbed, strict=False)
            found[name] = [plain / drafted for plain, drafted, *bad in rounds if not any(bad)]
        return found


def _moved(traffic: Mapping[str, float] | None) -> tuple[float | None, float | None]:
    """Share of looks at a layer that found all of it on the device, and bytes that came back from a tier."""
    if traffic is None:
        return None, None
    looks = traffic["hits"] + traffic["misses"]
    return traffic["hits"] / looks if looks else None, traffic["bytes_read"]


def _together(levels: Sequence[Level]) -> Level:
    names = ("proposed", "accepted", "verifications", "emitted")
    return Level(**{name: sum(getattr(each, name) for each in levels) for name in names})
