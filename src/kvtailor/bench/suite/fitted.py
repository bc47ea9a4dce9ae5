"""Plans whose budget is a share of bytes, each with the largest `keep=` whose cache fits it on the model at hand.

A share of the bytes is not one of the tokens: a token carries its column, heads that share a budget lie in pages, and
some scores keep the queries that they looked at. So the size is forecast (`hf.sizes`), and what a run writes beside its
records is the suite with these budgets: pages are made from that, without a model.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtailor.bench.subject import Subject
from kvtailor.bench.suite.suite import Suite, SuiteError
from kvtailor.errors import ArgumentError, KvtailorError, PlanError
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.sizes.segments import SegmentBytes
from kvtailor.hf.sizes.size import forecast_size, largest_tokens
from kvtailor.ops.files import read_toml
from kvtailor.plan import Plan

__all__ = ["fit_shares", "known_before", "written"]

_SHARE = re.compile(r"\bshare=([0-9.]+)")
_STEPS = 10_000
"""Between 0 and 1, of a `keep=` as it is written."""


def fit_shares(suite: Suite, subject: Subject, known: Mapping[str, str] | None = None) -> Suite:
    """Return the suite with a budget for each plan that has a share, for this model.

    Args:
        suite: from `read_suite`.
        subject: the model.
        known: budgets of an earlier run into the same folder, which stay what they are, so that its records count.

    Raises:
        SuiteError: a share that is no number, or a suite with shares and without the setting `context`.
        KvtailorError: the model's cache has no size that is known.
    """
    shares = suite.shares_of(subject.name)
    if not shares:
        return suite
    context = suite.settings_of(subject.name).get("context")
    if not isinstance(context, int) or context < 1:
        raise SuiteError(suite.name, [f"share= needs the setting `context` in tokens, found {context!r}: give it"])
    geometry, size = Geometry.of(subject.model.config), subject.cache_dtype.itemsize
    full = forecast_size(Plan.parse("full"), geometry, context=context, element_size=size).full
    found = dict(known or {})
    stored: dict[Any, SegmentBytes] = {}
    for text in shares:
        if text in found:
            continue
        share = _SHARE.search(text)
        if share is None:
            raise SuiteError(suite.name, [f"the plan {text!r}: give share= a number, such as share=0.25"])
        keep = _keep(_SHARE.sub(f"keep={share[1]}", text), float(share[1]) * full, geometry, context, size, stored)
        if keep is not None:
            found[text] = _SHARE.sub(f"keep={keep:g}", text)
    return replace(suite, fitted={**suite.fitted, subject.name: found})


def _keep(
    text: str, memory: float, geometry: Geometry, context: int, size: int, known: dict[Any, SegmentBytes]
) -> float | None:
    """The largest `keep=`, rounded down; None where the plan is not there, or nothing fits."""
    try:
        plan = Plan.parse(text)
        tokens = largest_tokens(plan, geometry, memory=int(memory), context=context, element_size=size, known=known)
    except PlanError:
        # What this kvtailor or this model does not have is said where the plan is measured.
        return None
    if tokens is None:
        return None
    return max(1, tokens * _STEPS // context) / _STEPS


def known_before(path: Path, model: str) -> dict[str, str]:
    """The budgets of a model that an earlier run wrote into a suite's file; none where it is not there."""
    return _told_in(path, "fitted").get(model, {})


def written(suite: Suite, text: str, path: Path) -> str:
    """Return the file of a suite with its budgets below it, those of other models that stand in `path` too.

    Args:
        suite: from `fit_shares`.
        text: the suite's file.
        path: where it is going to be written.
    """
    every = {**_told_in(path, "fitted"), **suite.fitted}
    # A file that an earlier run wrote has them already.
    lines = [re.split(r"\n\[(?:fitted|given)\.", text, maxsplit=1)[0].rstrip("\n")]
    for model, own in {**_told_in(path, "given"), **suite.given}.items():
        if own:
            lines += ["", f"[given.{json.dumps(model)}]", *(f"{a} = {json.dumps(b)}" for a, b in own.items())]
    for model, plans in every.items():
        # JSON's strings are TOML's.
        lines += [
            "",
            f"[fitted.{json.dumps(model)}]",
            *(f"{json.dumps(a)} = {json.dumps(b)}" for a, b in plans.items()),
        ]
    return "\n".join(lines) + "\n"


def _told_in(path: Path, key: str) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        return {}
    try:
        found = tomllib.loads(read_toml(path)).get(key, {})
        if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
            raise ArgumentError(f"[{key}] holds no tables")
    except (OSError, ValueError, RecursionError) as error:
        raise KvtailorError(
            f"the suite beside the records, {path}, cannot be read ({error}): take it away, or give another --out"
        ) from error
    return {str(model): dict(plans) for model, plans in found.items()}
