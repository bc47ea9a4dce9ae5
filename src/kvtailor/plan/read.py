"""From the text of a plan, a line or TOML, to the methods and settings that it names; presets are resolved here."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvtailor.encode.contract import Codec
from kvtailor.errors import ArgumentError, KvtailorError, UnknownName, shown, suggest
from kvtailor.plan import registry
from kvtailor.plan.arguments import Broken, load
from kvtailor.plan.check import BUDGETS, NO_BUDGET, SETTINGS, all_faults
from kvtailor.plan.grammar import MOST_DEEP, Value, Word, as_word, bytes_of, read_line, too_much

__all__ = ["ParsedPlan", "line_parts", "toml_parts"]

_LARGEST = 10**40
_MOST_KEYS = 256


@dataclass(frozen=True, kw_only=True)
class ParsedPlan:
    """What a text names.

    Attributes:
        parts: the method of each stage.
        settings: budgets and slack, as far as given.
        faults: every fault; where there is one, neither parts nor settings are of use.
    """

    parts: Mapping[str, Any]
    settings: Mapping[str, Any]
    faults: Sequence[str]


def line_parts(text: str) -> ParsedPlan:
    """Return what the one-line form names."""
    chosen = _Chosen()
    line = read_line(text, chosen.faults)
    chosen.unsure = bool(chosen.faults)
    for word in line.words:
        if (preset := registry.preset_of(word.name)) is not None:
            chosen.add_preset(preset, word.arguments)
            continue
        try:
            chosen.add(registry.stage_of(word.name), word)
        except KvtailorError as error:
            chosen.faults.append(str(error))
            chosen.unsure = True
    _check_keys(line.settings, SETTINGS, "setting", chosen.faults)
    asked = chosen.asked(line.settings)
    if chosen.unsure and any(f"{name}=" in "".join(text.split()) for name in BUDGETS):
        # There is one, in a piece that has a fault of its own.
        return replace(asked, faults=[each for each in asked.faults if each != NO_BUDGET])
    return asked


def toml_parts(text: str) -> ParsedPlan:
    """Return what the TOML form names."""
    chosen = _Chosen()
    try:
        if (why := too_much(text)) is not None:
            raise ArgumentError(why)
        table = tomllib.loads(text)
    # Beside its own error, a ValueError, tomllib lets through Python's error for a number of thousands of digits.
    except (ValueError, RecursionError) as error:
        why = "it goes too deep" if isinstance(error, RecursionError) else str(error)
        why = "it holds a number of thousands of digits" if "integer string conversion" in why else why
        return ParsedPlan(parts={}, settings={}, faults=[f"this is not TOML: {why}"])
    if why := _unfit(table):
        return ParsedPlan(parts={}, settings={}, faults=[why])
    named = table.pop("preset", [])
    for name in named if isinstance(named, list) else [named]:
        if isinstance(name, str) and (preset := registry.preset_of(name)) is not None:
            chosen.add_preset(preset)
        else:
            chosen.faults.append(str(UnknownName("preset", str(name), registry.presets())))
            chosen.unsure = True
    words, settings = _read_table(table, chosen.faults)
    for stage, word in words.items():
        chosen.add(stage, word)
    return chosen.asked(settings)


@dataclass
class _Chosen:
    """What a text names, gathered stage by stage, and the faults met on the way.

    Attributes:
        faults: the sentences so far.
        unsure: a word could not be understood, so that a stage without a method may be one that it meant.
    """

    faults: list[str] = field(default_factory=list)
    unsure: bool = False
    _written: dict[str, Word] = field(default_factory=dict)
    _inherited: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, stage: str, word: Word) -> None:
        """A method that the text names."""
        if stage in self._written:
            self.faults.append(f"{stage} is named twice, {self._written[stage].name} and {word.name}: keep one")
            load(stage, word.name, word.arguments, self.faults)
        self._written.setdefault(stage, word)

    def add_preset(self, preset: registry.Preset, arguments: Mapping[str, Value] | None = None) -> None:
        """A preset that the text names; the arguments of its word (None: it has none) go to its method of that name."""
        words, settings = _read_table(preset.plan, self.faults)
        own = next((stage for stage, word in words.items() if word.name == preset.name), None)
        if own is not None and arguments is not None:
            word = words.pop(own)
            self.add(own, Word(name=word.name, arguments=dict(word.arguments) | dict(arguments)))
        elif arguments:
            inside = ", ".join(word.name for word in words.values()) or "no method"
            self.faults.append(
                f"the preset {preset.name!r} takes no arguments (it is {inside}): write the method beside it"
            )
        for key, value in {**words, **settings}.items():
            self._inherited.setdefault(key, {})[preset.name] = value

    def asked(self, settings: Mapping[str, Any]) -> ParsedPlan:
        """All of it together: what is written goes before what a preset brings."""
        given = {key: value for key, value in settings.items() if key in SETTINGS}
        for key, by_preset in self._inherited.items():
            taken_over = (
                key in self._written or key in given or (key in BUDGETS and not given.keys().isdisjoint(BUDGETS))
            )
            if taken_over:
                continue
            values = list(by_preset.values())
            if any(value != values[0] for value in values):
                self.faults.append(
                    f"{key} comes from {' and from '.join(by_preset)}: keep one preset, or write your own"
                )
            if key in SETTINGS:
                given[key] = values[0]
            else:
                self._written[key] = values[0]
        if isinstance(given.get("bytes"), str):
            try:
                given["bytes"] = bytes_of(given["bytes"])
            except ValueError as error:
                self.faults.append(f"bytes is not a size: {error}")
                given["bytes"] = 1
        parts = {stage: self._part(stage) for stage in registry.stages()}
        if "slack" in given and "slack" not in settings and _encodes(parts["encode"]):
            # What a preset evicts at each token would be encoded token by token.
            own = getattr(parts["score"], "slack", None)
            if own is not None and own > given["slack"]:
                del given["slack"]
        return ParsedPlan(parts=parts, settings=given, faults=self.faults + all_faults(parts, given))

    def _part(self, stage: str) -> object:
        if stage in self._written:
            word = self._written[stage]
            return load(stage, word.name, word.arguments, self.faults)
        return Broken(named=False) if self.unsure else registry.method_of(stage, registry.null(stage))


def _encodes(codec: object) -> bool:
    """Whether tokens do not stay as they come."""
    return isinstance(codec, Codec) and not (codec.exact and codec.block == 0)


def _read_table(table: Mapping[str, Any], faults: list[str]) -> tuple[dict[str, Word], dict[str, Any]]:
    """The methods and the settings of a TOML table."""
    words = {}
    for key in registry.stages():
        inside = table.get(key)
        word = as_word({"method": inside} if isinstance(inside, str) else inside)
        if isinstance(word, Word):
            words[key] = word
        elif key in table:
            faults.append(f'{key} is {inside!r}: write a method\'s name, or a table with method = "name"')
    _check_keys(table, (*registry.stages(), *SETTINGS, "preset"), "key", faults)
    return words, {key: table[key] for key in SETTINGS if key in table}


def _unfit(value: Any, depth: int = 0) -> str | None:
    """Why a TOML value cannot be part of a plan: how deep it goes, or its numbers; None: it can."""
    if depth > MOST_DEEP:
        return f"its tables are more than {MOST_DEEP} deep"
    if isinstance(value, int) and abs(value) > _LARGEST:
        return f"a number in it is above {_LARGEST:.0e}"
    if isinstance(value, Mapping) and len(value) > _MOST_KEYS:
        return f"a table in it has {len(value)} keys, which no method has"
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return next((why for each in inside if (why := _unfit(each, depth + 1)) is not None), None)


def _check_keys(found: Mapping[str, object], known: Sequence[str], kind: str, faults: list[str]) -> None:
    faults += [f"there is no {kind} named {shown(key)}{suggest(key, known)}" for key in found if key not in known]
