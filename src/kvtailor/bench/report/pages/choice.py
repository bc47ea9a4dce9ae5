"""The large chart of a run: which text or task it is of, the reader's memory, the filter of plans, and the legend."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kvtailor.bench.report.charts.charts import Drawn
from kvtailor.bench.report.charts.losses import Losses, picture
from kvtailor.bench.report.pages.browser.pareto import canvas, filter_fields, form, memory_fields
from kvtailor.bench.report.pages.html import quoted

__all__ = ["choice", "filter_alone"]

_NOTE = (
    "Each point is a plan: the share of the uncompressed bytes that it holds, and what it lost to 'full' there, with "
    "the 95 % interval. The line joins the front: no other plan has fewer bytes and loses less by its mean. A plan "
    "that leads by its mean alone may have had luck; the verdict above is the test."
)
_SIZE = (
    "Of the whole cache, as long as it was here: such as 300KiB, 2GiB or 25%. Longer contexts take more; "
    "<code>kvtailor fit</code> answers for yours."
)
_MANY_PLANS = 12
_WORDS = "snapkv kivi"


def choice(drawn: Drawn, asked: Sequence[Losses]) -> str:
    """Return the chart of bytes against loss with its fields, as HTML.

    Without scripts it is a picture of the first question, and the legend of all charts.

    Args:
        drawn: the plans.
        asked: from `losses`, at least one.
    """
    options = "".join(f'<option value="{number}">{escape(each.name)}</option>' for number, each in enumerate(asked))
    question = (
        '<div class="mine question"><label for="question">Loss in</label>'
        f'<select id="question">{options}</select></div>'
    )
    lacking = [
        row.label
        for row in drawn.plans
        if not row.is_full and row.plan_hash not in {each.row.plan_hash for each in asked[0].found}
    ]
    absent = f" Without bytes or a loss there, so not drawn: {', '.join(lacking)}." if lacking else ""
    still = f"Without scripts this is the loss in {escape(asked[0].name)}.{escape(absent)}"
    return (
        f'<p class="dim">{escape(_NOTE)}</p>{form(question, memory_fields(_SIZE), filter_fields(_WORDS))}'
        f"{canvas('bytes against loss', drawn=picture(drawn, asked[0]), otherwise=still)}"
        f'<p id="absent" class="dim"></p>{_legend(drawn)}'
    )


def filter_alone(drawn: Drawn) -> str:
    """Return the filter of plans and the legend, for a run without a loss to draw."""
    return form(filter_fields(_WORDS)) + _legend(drawn)


def _legend(drawn: Drawn) -> str:
    """The plans by number and colour; each can be left out of charts and tables."""
    entries = "".join(
        f'<li data-n="{quoted(number)}"><label><input type="checkbox" name="plan" value="{quoted(number)}" '
        f'form="tools" checked><span class="swatch {quoted(drawn.kinds[row.plan_hash])}"></span>'
        f"{escape(number)} <code>{escape(row.label)}</code></label></li>"
        for row in drawn.plans
        for number in [drawn.numbers[row.plan_hash]]
    )
    shown = f'<ul class="legend" aria-label="the plans by number and colour">{entries}</ul>'
    if len(drawn.plans) <= _MANY_PLANS:
        return shown
    return (
        f"<details><summary>The {len(drawn.plans)} plans by number and colour; choose which are shown</summary>"
        f"{shown}</details>"
    )
