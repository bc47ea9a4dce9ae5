"""Stage 2's space: what a plan can be made of, and the plan of a point at a memory.

A point is a dict of parameters, as Optuna suggests them. There are three ways to make a plan of one:

- `how="preset"`: a shipped preset, with the budget that fills the memory;
- `how="layers"`: the optimum of stage 1 under the memory, with a scorer, and with bounds on widths and shares: what
  adds up on paper may not where layers are cut very deeply. Its tokens stand where stage 1 put them (`TABLE`), or an
  allocator shares them out anew over layers and heads, while the codecs stay stage 1's;
- `how="words"`: a scorer, an allocator, a merger and a codec with its widths.

A plan with a scorer gets the largest budget that fits, so that all points of a search are compared at the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import optuna

from kvtailor.errors import PlanError
from kvtailor.fitting.layers import PLAIN, LayerMap, solved_plan
from kvtailor.fitting.sizing import Sizer
from kvtailor.plan import Plan, registry
from kvtailor.presets import FULL

__all__ = ["NONE", "POOLED", "TABLE", "Point", "Space", "layers_start", "score_words"]

Point = Mapping[str, Any]
NONE = "none"
TABLE = "table"
"""The allocation of stage 1's optimum."""
POOLED = "pooled(floor=0.0)"
_SCORES = (
    "snapkv(kernel=5)",
    "snapkv",
    "critical(of=snapkv)",
    "h2o",
    "tova",
    "expected",
    "kvzip",
    "keydiff",
    "position(sinks=4)",
)
_ALLOCATORS = ("uniform", "adakv", POOLED, "pyramid")
_MERGERS = ("drop", "d2o", "cam")
_FAMILIES = (NONE, "kivi", "rotated", "nuq", "lowrank")
_BITS = (2, 3, 4, 5, 6, 8)
_RANKS = (0.4, 0.5, 0.6, 0.75)
# What these cost is read at every token, and what they save is reading, not memory.
_SAVE_NO_MEMORY = ("quest", "rocketkv_mt")


@dataclass(frozen=True, kw_only=True)
class Space:
    """What can be suggested for a model.

    Attributes:
        sizer: sizes of plans on the model, at the question's context and batch.
        layers: what stage 1 found; None: it did not run.
        scores: scorers that the model can have, of which points are suggested.
        presets: names of the presets that it can have.
        families: of codecs.
        allocators, mergers: in the plan language.
    """

    sizer: Sizer
    layers: LayerMap | None
    scores: tuple[str, ...]
    presets: tuple[str, ...]
    families: tuple[str, ...]
    allocators: tuple[str, ...] = _ALLOCATORS
    mergers: tuple[str, ...] = _MERGERS

    @classmethod
    def of(
        cls, sizer: Sizer, layers: LayerMap | None, *, without: Sequence[str] = (), reads_twice: bool = True
    ) -> Space:
        """Return the space of what the model can have.

        Args:
            sizer: see the class.
            layers: see the class.
            without: names of methods and presets that no plan may have.
            reads_twice: scorers and presets that read a prompt twice are among them.
        """
        left = set(without)
        words = {word: Plan.parse(f"{word} @ tokens={sizer.context}") for word in score_words(left)}
        scores = tuple(
            word
            for word, plan in words.items()
            if sizer.refusal(plan) is None and (reads_twice or not plan.needs.reconstruction)
        )
        families = tuple(
            name
            for name in _FAMILIES
            if not _named(_codec_word({"family": name, "key_bits": 4, "value_bits": 4, "rank": 0.5})) & left
            and (
                name == NONE
                or sizer.refusal(Plan.parse(_codec_word({"family": name, "key_bits": 4, "value_bits": 4, "rank": 0.5})))
                is None
            )
        )
        presets = tuple(
            name
            for name in registry.presets()
            if name not in (FULL, *_SAVE_NO_MEMORY)
            and name not in left
            and not _of_preset(name) & left
            and (reads_twice or not _preset(name).needs.reconstruction)
        )
        allocators = tuple(word for word in _ALLOCATORS if word.partition("(")[0] not in left)
        return cls(
            sizer=sizer,
            layers=layers,
            scores=scores,
            presets=presets,
            families=families,
            allocators=allocators,
            mergers=tuple(word for word in _MERGERS if word not in left),
        )

    @property
    def preset_plans(self) -> list[Plan]:
        """The presets, whatever the memory."""
        return [_preset(name) for name in self.presets]

    @property
    def allocations(self) -> list[str]:
        """How tokens of stage 1's optimum may be shared out."""
        return [TABLE, POOLED] if POOLED in self.allocators else [TABLE]

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        """Return the point that a trial suggests."""
        hows = ["layers", "words"] if self.layers is not None else ["words"]
        how = trial.suggest_categorical("how", [*hows, "preset"])
        if how == "preset":
            return {"how": how, "preset": trial.suggest_categorical("preset", list(self.presets))}
        if how == "layers":
            assert self.layers is not None
            widths = [width for width in sorted(self.layers.widths) if width != PLAIN] or [1]
            shares = sorted(self.layers.shares)
            return {
                "how": how,
                "score": trial.suggest_categorical("layers_score", list(self.scores)),
                "least_width": trial.suggest_categorical("least_width", widths),
                "least_share": trial.suggest_categorical("least_share", shares),
                "merge": trial.suggest_categorical("layers_merge", list(self.mergers)),
                "allocate": trial.suggest_categorical("layers_allocate", self.allocations),
            }
        point: dict[str, Any] = {
            "how": how,
            "score": trial.suggest_categorical("score", [NONE, *self.scores]),
            "family": trial.suggest_categorical("family", list(self.families)),
        }
        if point["score"] != NONE:
            point["allocate"] = trial.suggest_categorical("allocate", list(self.allocators))
            point["merge"] = trial.suggest_categorical("merge", list(self.mergers))
        if point["family"] == "lowrank":
            point["rank"] = trial.suggest_categorical("rank", list(_RANKS))
            point["key_bits"] = trial.suggest_categorical("lowrank_bits", list(_BITS))
        elif point["family"] in ("kivi", "rotated", "nuq"):
            point["key_bits"] = trial.suggest_categorical("key_bits", list(_BITS))
            same = point["family"] != "kivi"
            point["value_bits"] = point["key_bits"] if same else trial.suggest_categorical("value_bits", list(_BITS))
        return point

    def starts(self, memory: int) -> list[dict[str, Any]]:
        """Return parameters to begin with, as Optuna takes them: the presets that fit, and stage 1's optimum."""
        found: list[dict[str, Any]] = []
        if self.layers is not None:
            # The scorer that stage 1 measured with; without one, nothing was dropped and its name does not matter.
            score = self.layers.score if self.layers.score in self.scores else (self.scores or ("",))[0]
            if score:
                found += [layers_start(self.layers, score, least_share=share) for share in (0.0, 1.0)]
        for name in self.presets:
            if self.plan({"how": "preset", "preset": name}, memory) is not None:
                found.append({"how": "preset", "preset": name})
        return found

    def plan(self, point: Point, memory: int) -> Plan | None:
        """Return the plan of a point that fills the memory; None where the model cannot have it, or it does not fit."""
        try:
            if point["how"] == "preset":
                plan = self.sizer.filled(_preset(point["preset"]), memory)
                # Where nothing is left of it, it is the uncompressed cache and no longer the preset.
                return None if plan is None or str(plan) == FULL else plan
            if point["how"] == "words":
                return self.sizer.filled(Plan.parse(_words(point, self.sizer.context)), memory)
            return self._solved(point, memory)
        except PlanError:
            return None

    def _solved(self, point: Point, memory: int) -> Plan | None:
        assert self.layers is not None
        sizer = self.sizer
        found = self.layers.restricted(least_width=point["least_width"], least_share=point["least_share"])
        merge = "" if point["merge"] == "drop" else point["merge"]

        def made(plan: Plan) -> Plan:
            if not plan.evicts:
                return plan
            if merge:
                plan = replace(plan, merge=Plan.parse(f"{point['score']} + {merge} @ tokens=1").merge)
            if point["allocate"] != TABLE:
                plan = replace(plan, allocate=Plan.parse(f"{point['score']} + {point['allocate']} @ tokens=1").allocate)
            return plan

        solved = solved_plan(
            found,
            sizer.geometry,
            context=sizer.context,
            batch=sizer.batch,
            element=sizer.element,
            memory=memory,
            size=lambda plan: sizer.most(made(plan)),
            score=point["score"],
        )
        return None if solved is None else made(solved.plan)


def layers_start(layers: LayerMap, score: str, *, least_share: float = 0.0, allocate: str = TABLE) -> dict[str, Any]:
    """Return parameters of stage 1's optimum with a scorer, as Optuna takes them.

    Args:
        layers: what stage 1 found.
        score: in the plan language.
        least_share: of the tokens of a layer; the next that stage 1 tried is taken.
        allocate: see `Space.allocations`.
    """
    return {
        "how": "layers",
        "layers_score": score,
        "least_width": min(width for width in layers.widths if width != PLAIN),
        "least_share": min(share for share in layers.shares if share >= least_share),
        "layers_merge": "drop",
        "layers_allocate": allocate,
    }


def score_words(without: set[str]) -> tuple[str, ...]:
    """Return the scorers of the space, in the plan language."""
    return tuple(word for word in _SCORES if not _named(word) & without)


def _preset(name: str) -> Plan:
    text = name
    try:
        return Plan.parse(text)
    except PlanError:
        return Plan.parse(f"{text} @ tokens=1024")


def _of_preset(name: str) -> set[str]:
    plan = _preset(name)
    return _named(str(plan))


def _named(text: str) -> set[str]:
    """The names of the methods in a plan."""
    plan = Plan.parse(text if "@" in text or not _is_score(text) else f"{text} @ tokens=1024")
    from kvtailor.plan.arguments import with_nested

    parts = [part for part in plan.parts.values() if part is not None]
    return {registry.name_of(each) for part in parts for each in with_nested(part)}


def _is_score(text: str) -> bool:
    return registry.stage_of(text.split("(", 1)[0].split(" ", 1)[0]) == "score" if text != FULL else False


def _words(point: Point, context: int) -> str:
    words = [] if point["score"] == NONE else [point["score"]]
    if words:
        words.append(point["allocate"])
    if words and point["merge"] != "drop":
        words.append(point["merge"])
    codec = _codec_word(point)
    if codec != FULL:
        words.append(codec)
    budget = f" @ tokens={context}" if point["score"] != NONE else ""
    return (" + ".join(words) or FULL) + budget


def _codec_word(point: Point) -> str:
    family, bits = point["family"], point.get("key_bits")
    if family == "kivi":
        return f"kivi(key_bits={bits}, value_bits={point['value_bits']}, recent=32)"
    if family == "rotated":
        return f"hadamard(of=vector(bits={bits}, symmetric=false))"
    if family == "nuq":
        return f"unrotated(of=nuq(bits={min(4, int(bits or 4))}))"
    if family == "lowrank":
        inner = f"hadamard(of=vector(bits={bits}, symmetric=false))"
        return f"unrotated(of=lowrank(heads=4, rank={point['rank']}, allocation=fisher, of={inner}))"
    return FULL
