"""Settings of a suite for a model that it names none for: from the model's shapes, and from what a user sets.

    [shapes]
    plugin_rank = { of = "head_size", from = 128 }    # 96 of 128 channels become 48 of 64; of lists, each number
    contexts = { most = "positions", less = 512 }     # no larger than the positions, less the tokens that are generated
    gen_lens = { most = "positions", times = 0.25 }   # no larger than a quarter of the positions
    tier = { cpu = "disk" }                           # on such a device another value

What comes out stands in the suite's file beside the records, below `[given.MODEL]`, so that pages are made from it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvtailor.bench.subject import Subject
from kvtailor.bench.suite.suite import DEFAULT, Suite, SuiteError
from kvtailor.errors import KvtailorError, suggest
from kvtailor.hf.model.geometry import Geometry

__all__ = ["fit_settings", "settings_of_lines"]


def settings_of_lines(lines: Sequence[str]) -> dict[str, Any]:
    """The settings of lines such as "contexts=[512, 1024]" or "kinds=[needle, passkey]".

    A value, or one of a list, that is not TOML's is text.

    Raises:
        KvtailorError: a line is none.
    """
    found: dict[str, Any] = {}
    for line in lines:
        name, equals, value = (part.strip() for part in line.partition("="))
        if not equals or not name or not value:
            raise KvtailorError(f"asked to set {line!r}: write NAME=VALUE, such as contexts=[512,1024] or keep=0.5")
        found[name] = _value_of(value)
    return found


def _value_of(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if text.startswith("[") and text.endswith("]"):
            return [_value_of(each.strip()) for each in text[1:-1].split(",") if each.strip()]
        return text


def fit_settings(suite: Suite, subject: Subject, asked: Mapping[str, Any] | None = None) -> tuple[Suite, list[str]]:
    """Return the suite with settings for this model, and a sentence for each that differs from the default.

    Args:
        suite: from `read_suite`.
        subject: the model.
        asked: what a user sets; it goes before all else.

    Raises:
        SuiteError: a setting that is asked for is not the suite's, or is a list where it has one value, or the reverse.
    """
    asked = dict(asked or {})
    default = suite.settings[DEFAULT]
    faults = [
        f"there is no setting {name!r}, it has {', '.join(default)}{suggest(name, default)}"
        for name in asked
        if name not in default
    ]
    faults += [
        f"asked for {name}={_short(value)}, where {_short(default[name])} stands: give "
        f"{'a list' if isinstance(default[name], list) else 'one value'}, such as {name}={_short(default[name])}"
        for name, value in asked.items()
        if name in default and isinstance(value, list) != isinstance(default[name], list)
    ]
    if faults:
        raise SuiteError(suite.name, faults)
    found = {} if suite.has_settings_of(subject.name) else _from_shapes(suite, subject)
    told = [
        f"{name}={_short(value)} in place of {_short(default[name])}, {why}"
        for each, why in ((found, "from the model's shapes"), (asked, "as asked"))
        for name, value in each.items()
        if value != default[name] and (each is asked or name not in asked)
    ]
    # Of another run into the same folder nothing stays.
    given = {name: each for name, each in suite.given.items() if name != subject.name}
    own = {name: value for name, value in {**found, **asked}.items() if value != default[name] or name in asked}
    return replace(suite, given={**given, **({subject.name: own} if own else {})}), told


def _from_shapes(suite: Suite, subject: Subject) -> dict[str, Any]:
    shapes = _shapes(subject)
    found: dict[str, Any] = {}
    for name, rule in suite.shapes.items():
        value: Any = suite.settings[DEFAULT][name]
        if "of" in rule and (size := shapes.get(rule["of"])):
            value = _each(value, lambda x, size=size, rule=rule: max(min(x, 1), round(x * size / rule["from"])))
        if "most" in rule and (size := shapes.get(rule["most"])):
            # Where nothing is left, the default stays, and the task is named as one that does not fit.
            most = int(size * rule.get("times", 1)) - rule.get("less", 0)
            value = _each(value, lambda x, most=most: min(x, most)) if most > 0 else value
        found[name] = rule.get(subject.device.type, value)
    return found


def _shapes(subject: Subject) -> dict[str, int]:
    """The numbers of a model that rules name, see `suite.SHAPES`; those that are not known are not there."""
    config = getattr(subject.model, "config", None)
    try:
        cached = [each for each in Geometry.of(config).shapes if each.kv_heads]
    except (KvtailorError, AttributeError):
        cached = []
    known = {"positions": subject.positions}
    if cached:
        known |= {
            "head_size": min(each.key_size for each in cached),
            "layers": len(cached),
            "kv_heads": min(each.kv_heads for each in cached),
        }
    return {name: size for name, size in known.items() if size}


def _each(value: Any, change: Any) -> Any:
    """A number changed, or each of a list, equal ones once."""
    if isinstance(value, list):
        return list(dict.fromkeys(_each(x, change) for x in value))
    return change(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _short(value: Any) -> str:
    return str(value).replace("'", "")
