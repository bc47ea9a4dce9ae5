"""A plan: which method does the work in each stage, under which budget. Python, TOML and one line are three forms of
it.

    Plan(score=SnapKV(window=16), allocate=AdaKV(), encode=Kivi(bits=4), tokens=1024)
    snapkv(window=16) + adakv + kivi(bits=4) @ tokens=1024

A line names methods in any order, since each belongs to one stage, and presets, which bring several methods at once; a
method written beside a preset takes that stage over. A plan is checked when it is made, and all of its faults are
reported together.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from kvtailor.allocate.contract import Allocator
from kvtailor.attend.contract import Attention
from kvtailor.encode.contract import Codec
from kvtailor.errors import KvtailorError, PlanError
from kvtailor.merge.contract import Merger
from kvtailor.method import Method
from kvtailor.ops.files import file_within, read_text, read_toml
from kvtailor.ops.notebook_html import Shown, Strong, html_block, html_table
from kvtailor.plan import registry
from kvtailor.plan.arguments import given_of, identity_of, with_nested, word_of
from kvtailor.plan.check import SETTINGS, all_faults, wrong_kinds
from kvtailor.plan.engines import EngineSetting, LayerLosses, nearest_settings, setting_of
from kvtailor.plan.grammar import Word, toml_value, write_bytes, write_value
from kvtailor.plan.read import ParsedPlan, line_parts, toml_parts
from kvtailor.presets import FULL
from kvtailor.score.contract import Scorer
from kvtailor.select.contract import Selector
from kvtailor.store.contract import Placement
from kvtailor.types import Needs, Softmax

__all__ = ["Plan", "parse"]

# Of a plan card, and of a fit.
_PLAN_FILES = ("plan.toml", "fitted.toml")
_CARD_FILE = "card.json"


def _null(stage: str) -> Any:
    return registry.method_of(stage, registry.null(stage))


# Stages that neither drop tokens nor encode them.
_BESIDE = ("attend", "store")


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """One way to hold a cache.

    Attributes:
        score: ranks tokens by how much they matter; None: nothing is ever evicted.
        allocate: splits the budget over layers and kv heads.
        select: turns scores and budget into the kept set.
        merge: what becomes of tokens that are not kept.
        encode: how kept tokens are encoded; in blocks where they live elsewhere, see `Placement.block`.
        store: where they live.
        attend: how they are read.
        tokens: budget: tokens per kv head, on average over heads and layers, an observation window included.
        keep: budget: fraction of each row's tokens, above 0 and at most 1.
        bytes: budget: bytes that an eviction leaves in the whole cache.
        slack: tokens past the budget after which a decoding cache is cut back to it. None: the scorer's own; "never":
            nothing is evicted while decoding, even where the scorer would. Beside a codec a preset's own slack gives
            way to a longer one of the scorer: what is evicted at each token would be encoded token by token.

    A scorer needs exactly one of the three budgets, and no scorer allows none.

    Raises:
        PlanError: with all faults at once.
    """

    score: Scorer | None = None
    allocate: Allocator = field(default_factory=partial(_null, "allocate"))
    select: Selector = field(default_factory=partial(_null, "select"))
    merge: Merger = field(default_factory=partial(_null, "merge"))
    encode: Codec = field(default_factory=partial(_null, "encode"))
    store: Placement = field(default_factory=partial(_null, "store"))
    attend: Attention = field(default_factory=partial(_null, "attend"))
    tokens: int | None = None
    keep: float | None = None
    bytes: int | None = None
    slack: int | Literal["never"] | None = None

    def __post_init__(self) -> None:
        wrong = wrong_kinds(self.parts)
        faults = wrong or all_faults(self.parts, self._settings)
        if faults:
            raise PlanError(repr(self) if wrong else str(self), faults)
        if self.store.block:
            object.__setattr__(self, "encode", self.encode.in_blocks(self.store.block))
        if self.keep is not None:
            object.__setattr__(self, "keep", float(self.keep))

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan of one line; see `parse`."""
        return parse(text)

    @classmethod
    def from_toml(cls, text: str) -> Plan:
        """The plan of a TOML document, as `to_toml` writes it.

        A stage is a table with `method` and its arguments, or just the method's name; `preset` names one preset or a
        list of them; budgets and slack stand at the top. The word "none" stands for None.

        Raises:
            PlanError: with all faults at once.
        """
        return _made(text, toml_parts(text))

    @classmethod
    def named(cls, text: str) -> Plan:
        """The plan that a user named: in one line, or by the path of what `load` reads.

        A folder whose name is a plan too, such as "kivi4", has to be written with a separator: "./kivi4".

        Raises:
            PlanError: with all faults at once.
            KvtailorError: the file cannot be read, or the folder has no plan.
        """
        path = text.strip()
        if path.endswith(".toml"):
            return cls.load(path)
        try:
            return parse(text)
        except PlanError:
            if path and _is_folder(path):
                return cls.load(path)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan of a TOML file, or of a folder that has one: a plan card's, or what a fit wrote.

        Raises:
            PlanError: with all faults at once.
            KvtailorError: there is none, or it cannot be read.
        """
        where = Path(path).expanduser()
        file = where
        try:
            if where.is_dir():
                there = [found for name in _PLAN_FILES if (found := file_within(where, name)) is not None]
                if not there:
                    raise KvtailorError(f"asked for the plan in {where}, found none of {', '.join(_PLAN_FILES)} there")
                file = there[0]
            plan = cls.from_toml(read_toml(file))
        except OSError as error:
            raise KvtailorError(f"the plan file {file} cannot be read: {error}") from error
        try:
            card = file_within(where, _CARD_FILE) if where.is_dir() else None
            told = None if card is None else json.loads(read_text(card))["plan"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise KvtailorError(
                f"{where / _CARD_FILE}, beside {file}, cannot be read ({error}): run `kvtailor card` again"
            ) from error
        if told is not None and told != str(plan):
            raise KvtailorError(f"{file} has the plan {plan}, and the card beside it is of {told}: one was changed")
        return plan

    @property
    def parts(self) -> dict[str, Any]:
        """The method of each stage, in the order in which they work."""
        return {stage: getattr(self, stage) for stage in registry.stages()}

    def misfits(self, *, layers: int, heads: int, size: int) -> list[str]:
        """Why a model cannot be served, a sentence for each method that does not fit it; see `Method.misfit`."""
        inside = [each for part in self.parts.values() for each in with_nested(part)]
        found = [each.misfit(layers=layers, heads=heads, size=size) for each in inside]
        return [sentence for sentence in found if sentence is not None]

    def latent_misfits(self) -> list[str]:
        """Why layers that hold latents cannot be served, a sentence for each method; see `Serves.latents`."""
        sentences = []
        for each in (method for part in self.parts.values() for method in with_nested(part)):
            if (why := each.capabilities.latents) is not True:
                name = registry.name_of(each)
                sentences.append(f"{name} does not serve layers that hold latents (multi-head latent attention): {why}")
        return list(dict.fromkeys(sentences))

    def softmax_faults(self, softmax: Softmax) -> list[str]:
        """Why a model with this softmax cannot be served, a sentence for each method that does not know one like it."""
        faults = [
            f"{registry.name_of(each)} is not known to be right for a model that {what}: take another method, or set "
            f"serves = Serves({twist}=True) in its class, if it is"
            for part in self.parts.values()
            for each in with_nested(part)
            for twist, what in softmax.twists.items()
            if not getattr(each.capabilities, twist)
        ]
        return list(dict.fromkeys(faults))

    @property
    def evicts(self) -> bool:
        """Whether anything is ever dropped."""
        return self.score is not None

    @property
    def scope(self) -> str:
        """When layers are cut.

        "layer": each as soon as it is done; "prompt": all together once the last is; "progressive": each as soon as it
        is done, and again with those that follow.
        """
        scopes = () if self.score is None else (self.score.scope, self.allocate.scope)
        return next((scope for scope in ("prompt", "progressive") if scope in scopes), "layer")

    @cached_property
    def needs(self) -> Needs:
        """The evidence that its methods declare, together."""
        rotation = self.attend.needs_rotation or self.encode.needs_rotation
        needs = Needs(rotation=rotation, offset=self.encode.needs_offset) | self.encode.needs
        if self.score is not None:
            needs |= self.score.needs | self.allocate.needs | self.merge.needs
        return replace(needs, rotation=needs.rotation or needs.moments)

    @property
    def prompt_pass(self) -> tuple[str, bool] | None:
        """By which pass a prompt is read: plans with the same one can share its forward; None: it shares with none."""
        name = None if self.encode.rounds_on_write else self.attend.shared_pass()
        return None if name is None else (name, self.needs.mass)

    @property
    def slack_tokens(self) -> int | None:
        """Tokens past the budget that decoding may hold before it is cut back; None where it is never cut."""
        if self.score is None or self.slack == "never":
            return None
        return self.score.slack if self.slack is None else self.slack

    @cached_property
    def hash(self) -> str:
        """The 12 hex digits that name results, of the sha256 of all methods, arguments, budgets and resulting slack.

        Methods among arguments count like any, and so does the content of the files that methods read.
        """
        parts = {stage: identity_of(part) for stage, part in self.parts.items()}
        text = json.dumps({**parts, **self._settings, "slack": self.slack_tokens}, sort_keys=True, default=repr)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def export(
        self, engine: str, *, layers: int | Sequence[int] | None = None, measured: LayerLosses | None = None
    ) -> EngineSetting:
        """Return the nearest setting of another engine, what it lacks, and the layers that it is to leave whole.

        ```python
        setting = Plan.parse("kivi4").export("vllm")
        print(setting.setting, setting.lacks)
        ```

        Args:
            engine: "vllm", "sglang", "tensorrt-llm", "llama.cpp" or "transformers", in any case.
            layers: how many layers the plan compresses, or their numbers in the model; None: as many as its codec
                names, or as were measured.
            measured: what each layer loses by itself, as `Fit.layers` has it. Where the engine can leave layers whole,
                its types are compared by what the layers that they encode lost, at no more bits than the plan has.

        Raises:
            UnknownName: there is no such engine here.
            ArgumentError: the numbers of layers do not agree, are above 100,000, or are not known and the plan's bits
                depend on them.
        """
        return setting_of(engine, self.encode, drops=self._drops, beside=self._beside, layers=layers, measured=measured)

    def exports(
        self, *, layers: int | Sequence[int] | None = None, measured: LayerLosses | None = None
    ) -> tuple[EngineSetting, ...]:
        """Return `export` of each engine."""
        return nearest_settings(self.encode, drops=self._drops, beside=self._beside, layers=layers, measured=measured)

    def to_toml(self) -> str:
        """The plan as TOML; arguments at their defaults are left out."""
        lines = [f"{name} = {toml_value(value)}" for name, value in self._settings.items()]
        for stage, word in self._words().items():
            given = (f"{key} = {toml_value(value)}" for key, value in word.arguments.items())
            lines += ["", f"[{stage}]", f'method = "{word.name}"', *given]
        return "\n".join(lines).strip() + "\n" if lines else f'preset = "{FULL}"\n'

    def __str__(self) -> str:
        words = [str(word) for word in self._line_words().values()]
        sized = {k: write_bytes(v) for k, v in self._settings.items() if k == "bytes" and isinstance(v, int)}
        tail = ", ".join(f"{k}={sized.get(k) or write_value(v)}" for k, v in self._settings.items())
        return (" + ".join(words) or FULL) + (f" @ {tail}" if tail else "")

    def __repr__(self) -> str:
        methods = [f"{stage}={_python(self.parts[stage])}" for stage in self._words()]
        return f"Plan({', '.join([*methods, *(f'{name}={value!r}' for name, value in self._settings.items())])})"

    def _repr_html_(self) -> str:
        """For notebooks: the method of each stage with its arguments and what it does; those of the null plan plain."""
        words = self._words()
        rows: list[list[Shown]] = []
        for stage, part in self.parts.items():
            if part is None:
                rows.append([stage, None, None, "Nothing is evicted."])
                continue
            name = registry.name_of(part)
            given = ", ".join(f"{key}={_python(value)}" for key, value in given_of(part).items())
            info = registry.methods(stage).get(name)
            named = Strong(name) if stage in words else name
            rows.append([stage, named, given or None, info.summary if info is not None else None])
        note = f"Hash {self.hash}; the plan as TOML: plan.to_toml()."
        return html_block(str(self), html_table(rows, ["stage", "method", "arguments", "what it does"]), notes=[note])

    @property
    def _settings(self) -> dict[str, Any]:
        """The budgets and the slack that were given."""
        return {name: getattr(self, name) for name in SETTINGS if getattr(self, name) is not None}

    @property
    def _drops(self) -> str:
        """How tokens are dropped, in words; empty where none are."""
        if self.score is None:
            return ""
        names = [word.name for stage, word in self._words().items() if stage not in ("encode", *_BESIDE)]
        return f"{' + '.join(names)} @ {str(self).rpartition(' @ ')[2]}"

    @property
    def _beside(self) -> str:
        """How tokens are read and where they lie, where that is not as usual, in words."""
        return " or ".join(word.name for stage, word in self._words().items() if stage in _BESIDE)

    def _words(self) -> dict[str, Word]:
        """The word of each stage that is not at its default."""
        found = {}
        for stage, part in self.parts.items():
            if part is None:
                continue
            fits = isinstance(part, registry.contract(stage))
            word = word_of(part) if fits else Word(name=registry.name_of(part), arguments={})
            if word.arguments or word.name != registry.null(stage):
                found[stage] = word
        return found

    def _line_words(self) -> dict[str, Word]:
        """Those of a line: where one is a preset's name too, what that preset would bring is written against it."""
        found = self._words()
        brought = {
            stage
            for word in found.values()
            if (preset := registry.preset_of(word.name)) is not None
            for stage in preset.plan.keys() & registry.null_stages()
        }
        written = {stage: word_of(self.parts[stage]) for stage in brought - found.keys()}
        return {stage: (found | written)[stage] for stage in self.parts if stage in found or stage in written}


def parse(text: str) -> Plan:
    """The plan of one line: `snapkv(window=16) + adakv + kivi(bits=4) @ tokens=1024, slack=64`.

    Raises:
        PlanError: with all faults at once.
    """
    return _made(text, line_parts(text))


def _made(text: str, asked: ParsedPlan) -> Plan:
    if asked.faults:
        raise PlanError(text, asked.faults)
    return Plan(**asked.parts, **asked.settings)


def _is_folder(path: str) -> bool:
    try:
        return Path(path).expanduser().is_dir()
    except (OSError, RuntimeError):  # a line that is too long for a name, or a home that is not there
        return False


def _python(value: object) -> str:
    """The expression that makes a value; of a method, without the arguments at their defaults."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_python, value))}{',' * (len(value) == 1)})"
    if not isinstance(value, Method):
        return repr(value)
    return f"{type(value).__name__}({', '.join(f'{key}={_python(each)}' for key, each in given_of(value).items())})"
