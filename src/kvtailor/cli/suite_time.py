"""How long a suite takes: `kvtailor bench --suite NAME --estimate`, and the line before a suite runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from kvtailor.cli.words.lines import say

if TYPE_CHECKING:
    from rich.console import Console

    from kvtailor.bench.suite.estimate import SuiteEstimate
    from kvtailor.bench.suite.run import Prepared

__all__ = ["MEASURED", "say_estimate", "say_time_of"]

MEASURED = "measured here"
"""What `--estimate` is without rates."""


def say_estimate(options: dict[str, Any]) -> None:
    """Print how long a suite takes on a model of which the configuration alone is read.

    Args:
        options: of `kvtailor bench`.
    """
    import torch

    from kvtailor.bench.subject import Subject
    from kvtailor.bench.suite.estimate import estimate, measured_rates, rates_of_line
    from kvtailor.bench.suite.run import prepare
    from kvtailor.bench.suite.shapes import fit_settings, settings_of_lines
    from kvtailor.bench.suite.suite import read_suite
    from kvtailor.errors import KvtailorError
    from kvtailor.hf.model.loading import check_device, load_bare

    try:
        wanted = getattr(torch, options["dtype"], None) if options["dtype"] else None
        model = load_bare(options["model"], dtype=wanted)
        subject = Subject(name=options["model"], model=model)
        suite, _ = fit_settings(read_suite(options["suite"]), subject, settings_of_lines(options["given"]))
        prepared = prepare(suite, subject, data=options["data"], only=options["tables"])
        rates = (
            measured_rates(check_device(options["device"]), subject.dtype)
            if options["estimate"] == MEASURED
            else rates_of_line(options["estimate"])
        )
        found = estimate(prepared, rates)
    except (KvtailorError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if options["as_json"]:
        click.echo(json.dumps(found.as_dict(), ensure_ascii=False))
        return
    silent = 0
    for part in found.parts:
        if part.seconds is None:
            silent += 1
        else:
            say(f"{_spoken(part.seconds):>12}  {part.plans} plans, {part.prompts} prompts: {part.asked}", hang=14)
    whole = f"at least, for all of suite {prepared.suite.name} on {options['model']}"
    if silent:
        whole += f", but for {silent} of {len(found.parts)} tasks"
    say(f"{_spoken(found.seconds) if silent < len(found.parts) else 'not known':>12}  {whole}", hang=14)
    say(f"Weights {_bytes(found.weights)}, the largest uncompressed cache {_bytes(found.cache)}.")
    for sentence in found.assumed:
        say(sentence)


def say_time_of(prepared: Prepared, console: Console) -> None:
    """Print, before a suite runs, how long it takes at least on this machine; nothing where that is not known."""
    from kvtailor.bench.suite.estimate import estimate, measured_rates
    from kvtailor.errors import KvtailorError

    subject = prepared.subject
    if not hasattr(subject.model, "named_modules"):
        return
    try:
        found: SuiteEstimate = estimate(prepared, measured_rates(subject.device, subject.dtype))
    except KvtailorError:
        return
    device = "processor" if subject.device.type == "cpu" else subject.device.type
    sentence = (
        f"at least {_spoken(found.seconds)} of this {device}, what is there already not taken off; {found.assumed[0]}"
    )
    console.print(sentence, style="dim", markup=False)


def _spoken(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 60:.1f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"


def _bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
