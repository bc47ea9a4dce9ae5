"""What can be wrong with a plan: parts that do not go together, budgets and slack."""

from __future__ import annotations

import typing
from collections.abc import Mapping

import torch

from kvtailor.plan import registry
from kvtailor.plan.arguments import Broken, type_faults, with_nested

__all__ = ["BUDGETS", "NO_BUDGET", "SETTINGS", "all_faults", "wrong_kinds"]

BUDGETS = ("tokens", "keep", "bytes")
_MOST = 1 << 48
SETTINGS = (*BUDGETS, "slack")
NO_BUDGET = "a scorer needs a budget, and there is none: add tokens=1024, keep=0.25 or bytes=64MiB"


def all_faults(parts: Mapping[str, object], settings: Mapping[str, object]) -> list[str]:
    """Every fault of parts that do not go together, of budgets and of slack.

    Args:
        parts: a method, None or `Broken` for each stage.
        settings: the given ones among `SETTINGS`.
    """
    score = parts["score"]
    evicts = score.named or None if isinstance(score, Broken) else score is not None
    attend = parts["attend"]
    splits = isinstance(attend, registry.Attention) and attend.held_tokens(torch.ones(1, dtype=torch.int64)) is not None
    faults = _parts_faults(parts) + _group_faults(parts, settings)
    return faults + _settings_faults(settings, evicts, splits)


def _settings_faults(settings: Mapping[str, object], evicts: bool | None, splits: bool) -> list[str]:
    """`evicts`: whether a scorer is there, None where that is not known; `splits`: the attention brings a budget."""
    faults = []
    tokens, keep, size, slack = (settings.get(name) for name in SETTINGS)
    if tokens is not None and not (_whole(tokens) and tokens >= 1):
        faults.append(f"tokens is {tokens!r}: give a whole number of tokens from 1 up, per kv head on average")
    if keep is not None and not (isinstance(keep, float | int) and not isinstance(keep, bool) and 0 < keep <= 1):
        faults.append(f"keep is {keep!r}: give the fraction of tokens to keep, above 0 and at most 1, such as 0.25")
    if size is not None and not (_whole(size) and size >= 1):
        faults.append(f"bytes is {size!r}: give a whole number of bytes from 1 up, or text such as 64MiB")
    if slack is not None and slack != "never" and not (_whole(slack) and slack >= 0):
        faults.append(f"slack is {slack!r}: give a whole number of tokens from 0 up, or never")
    # Counts of all layers and heads are 64-bit integers.
    faults += [
        f"{name} is {value}: give at most {_MOST}"
        for name, value in settings.items()
        if name in ("tokens", "bytes", "slack") and _whole(value) and value > _MOST
    ]
    asked = [name for name in BUDGETS if settings.get(name) is not None]
    if len(asked) > 1:
        faults.append(f"there are {len(asked)} budgets, {' and '.join(asked)}: keep one")
    if evicts and not asked and not splits:
        faults.append(NO_BUDGET)
    if evicts is False and asked:
        faults.append(
            f"there is a budget ({', '.join(asked)}) but no scorer, so nothing would be evicted: add a scorer such as "
            "snapkv, or leave the budget out"
        )
    if evicts is False and slack is not None:
        faults.append("there is slack but no scorer, so nothing would be evicted: add a scorer, or leave slack out")
    return faults


def _parts_faults(parts: Mapping[str, object]) -> list[str]:
    faults = []
    score, merge, encode, attend = parts["score"], parts["merge"], parts["encode"], parts["attend"]
    if score is None:
        for stage, work in (("allocate", "on scores"), ("select", "on scores"), ("merge", "on what is not kept")):
            if not isinstance(parts[stage], Broken) and registry.name_of(parts[stage]) != registry.null(stage):
                faults.append(
                    f"{registry.name_of(parts[stage])} works {work}, but there is no scorer, so nothing would be "
                    "evicted: add a scorer such as snapkv, or leave it out"
                )
    select, allocate = parts["select"], parts["allocate"]
    uneven = isinstance(allocate, registry.Allocator) and not allocate.even_heads
    if isinstance(select, registry.Selector) and select.same_in_heads and uneven:
        faults.append(
            f"{registry.name_of(select)} keeps the same tokens in all kv heads of a layer, and "
            f"{registry.name_of(allocate)} gives each its own budget: let each head choose, or take an allocator over "
            "layers such as pyramid"
        )
    if isinstance(attend, registry.Attention):
        name, wanted = registry.name_of(attend), attend.needs_codec
        if wanted is not None and isinstance(encode, registry.Codec) and registry.name_of(encode) != wanted:
            faults.append(
                f"{name} reads what the codec {wanted!r} stores, but the codec is {registry.name_of(encode)!r}: "
                f"name {wanted} as the codec, or another attention"
            )
        if isinstance(encode, registry.Codec) and encode.weighs_tokens and not attend.weighs_tokens:
            faults.append(
                f"{registry.name_of(encode)} stores slots that stand for several tokens, which {name} would count as "
                f"one: leave {name} out, or take a codec that merges nothing"
            )
        if isinstance(merge, registry.Merger) and merge.weighted and not attend.weighs_tokens:
            faults.append(
                f"{registry.name_of(merge)} lets a token stand for several, which {name} would count as one: leave "
                f"{name} out, or take a merger without weights such as d2o"
            )
        if isinstance(score, registry.Scorer) and score.needs.mass and not attend.gives_mass:
            faults.append(
                f"{registry.name_of(score)} needs the attention mass of every held token, which {name} does not give: "
                f"leave {name} out, or take a scorer without mass such as snapkv"
            )
    return faults


def _group_faults(parts: Mapping[str, object], settings: Mapping[str, object]) -> list[str]:
    """Faults of a codec that encodes several layers at once or each in its own way, or that holds such a one."""
    encode, score, allocate = parts["encode"], parts["score"], parts["allocate"]
    if not isinstance(encode, registry.Codec):
        return []
    faults, name = _nested_faults(encode), registry.name_of(encode)
    moves = isinstance(allocate, registry.Allocator) and not allocate.even_layers
    if encode.kinds_by_layer and isinstance(score, registry.Scorer) and moves and settings.get("bytes") is not None:
        faults.append(
            f"bytes= buys tokens at the mean price of the layers, and {registry.name_of(allocate)} gives layers other "
            f"numbers of tokens, which do not cost the same in each under {name}: give the budget as tokens= or keep=, "
            "or take an allocator that gives every layer the same, such as uniform or adakv"
        )
    if not (encode.across and isinstance(score, registry.Scorer)) or isinstance(allocate, Broken):
        return faults
    apart = [] if score.same_on_layers else [f"{registry.name_of(score)} keeps other tokens in each"]
    if registry.name_of(allocate) != registry.null("allocate"):
        apart.append(f"{registry.name_of(allocate)} gives each its own budget")
    if isinstance(parts["merge"], registry.Merger) and parts["merge"].weighted:
        apart.append(f"{registry.name_of(parts['merge'])} merges other tokens in each")
    for budget in ("keep", "bytes"):
        if settings.get(budget) is not None:
            apart.append(f"{budget}= may leave one of them a token more")
    return faults + [
        f"{name} stores two layers' tokens together, and {reason}: leave one of the two out, or evict by position, as "
        "in streaming @ tokens=1024"
        for reason in apart
    ]


def _nested_faults(encode: registry.Codec) -> list[str]:
    """Faults of a codec that holds one which must stand outside of it."""
    faults, name = [], registry.name_of(encode)
    for each in list(with_nested(encode))[1:]:
        if isinstance(each, registry.Codec) and each.across:
            inner = registry.name_of(each)
            outside = "leave it out" if encode.kinds_by_layer else f"write {inner} outside, as in {inner}(of={name})"
            faults.append(
                f"{inner} stores two layers' tokens together, and {name} encodes one layer at a time: {outside}"
            )
        if isinstance(each, registry.Codec) and each.kinds_by_layer:
            inner = registry.name_of(each)
            outside = f"write {inner} outside, as in {inner}(of=[{name}(...), ...])"
            faults.append(
                f"{inner} gives each layer a codec of its own, and {name} around it would be one for all layers: "
                f"{'leave one of the two out' if encode.across else outside}"
            )
        if isinstance(each, registry.Codec) and each.ages and not encode.kinds_by_layer:
            inner = registry.name_of(each)
            faults.append(
                f"{inner} encodes segments anew as they grow old, and {name} around it would hide them: write {inner} "
                f"outside, as in {inner}(of=[{name}(...), ...])"
            )
        if isinstance(each, registry.Codec) and each.needs.window:
            inner = registry.name_of(each)
            faults.append(
                f"{inner} ranks what it stores by the queries, and inside {name} it would not get them: name {inner} "
                "as the codec itself"
            )
    return faults


def wrong_kinds(parts: Mapping[str, object]) -> list[str]:
    """Faults of a plan written in Python: stages that hold no method of theirs, arguments of a wrong type."""
    faults: list[str] = []
    for stage, part in parts.items():
        wanted = registry.contract(stage)
        if not isinstance(part, wanted) and not (part is None and registry.null(stage) is None):
            faults.append(
                f"{stage} is {part!r}, a {type(part).__name__}: give a {wanted.__name__}, or write the plan as text "
                "for Plan.parse"
            )
        elif part is not None:
            faults += type_faults(part)
    return faults


def _whole(value: object) -> typing.TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
