"""The option that says whether a prompt goes through the model once for all plans."""

from __future__ import annotations

import click

__all__ = ["share_option"]

share_option = click.option(
    "--share",
    type=click.Choice(["on", "off"]),
    default="on",
    show_default=True,
    help="Prefill a text once for all plans; off: once for each. The numbers are the same.",
)
