"""How the page looks and what it does: plain CSS and a few lines of script, written into the page itself."""

from __future__ import annotations

__all__ = ["COLOURS", "DARK", "LIGHT", "SCRIPT", "SORTING", "STYLE"]

LIGHT = {
    "ink": "#1c1e21", "paper": "#ffffff", "dim": "#5f6670", "rule": "#e3e6ea", "accent": "#1f6feb", "warm": "#9a4b00",
    "good": "#1a7f37", "soft": "#f6f8fa", "edge": "#c3c9d1", "strong": "#ffffff",
    "p0": "#0072b2", "p1": "#c04d00", "p2": "#00805f", "p3": "#b0457d", "p4": "#7a5ccc", "p5": "#8a6d00",
    "p6": "#2a8fc7", "pf": "#5f6670",
}  # fmt: skip
"""Colours on light paper. The plans' (p0 to p6, pf for 'full') are Okabe and Ito's, darkened until each stands out 3:1
from the paper."""

DARK = {
    "ink": "#e6e8eb", "paper": "#14171b", "dim": "#98a1ad", "rule": "#2c323a", "accent": "#6ea8fe", "warm": "#f0a35e",
    "good": "#56c271", "soft": "#1b1f25", "edge": "#363d47", "strong": "#14171b",
    "p0": "#56a8e6", "p1": "#f08a4b", "p2": "#2fbf95", "p3": "#e58fbf", "p4": "#b39ddb", "p5": "#e0c040",
    "p6": "#8fd3f4", "pf": "#98a1ad",
}  # fmt: skip
COLOURS = 7
"""How many plans have a colour of their own; then they come round, with dashed lines."""


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


_PLANS = "\n".join(f".p{i} {{ color: var(--p{i}); }}" for i in [*range(COLOURS), "f"])

STYLE = f"""
:root {{ color-scheme: light dark; {_variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}
{_PLANS}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 90rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }}
h1 {{ font-size: 1.35rem; line-height: 1.35; margin: 0 0 .4rem; max-width: 60rem; }}
h2 {{ font-size: 1.1rem; margin: 2.6rem 0 .5rem; }} h3 {{ font-size: 1rem; margin: 1.4rem 0 .4rem; }}
p {{ margin: .3rem 0; max-width: 60rem; }} .dim {{ color: var(--dim); }} a {{ color: inherit; }}
.wide {{ overflow-x: auto; margin-bottom: .8rem; background:
  linear-gradient(to right, var(--paper) 40%, transparent) left / 2.5rem 100% no-repeat local,
  linear-gradient(to left, var(--paper) 40%, transparent) right / 2.5rem 100% no-repeat local,
  linear-gradient(to right, var(--edge), transparent) left / .9rem 100% no-repeat scroll,
  linear-gradient(to left, var(--edge), transparent) right / .9rem 100% no-repeat scroll; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: 100%; }}
th, td {{ padding: .32rem .5rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap;
  font-size: .93rem; }}
th {{ color: var(--dim); font-weight: 500; vertical-align: bottom; white-space: normal; line-height: 1.25;
  font-size: .87rem; }}
th button {{ all: unset; cursor: pointer; }} button:focus-visible, a:focus-visible, summary:focus-visible {{
  outline: 2px solid var(--accent); outline-offset: 2px; }}
th[aria-sort=ascending] button::after {{ content: " ↑"; }} th[aria-sort=descending] button::after {{ content: " ↓"; }}
th.name, td.name {{ text-align: left; }} td.name {{ white-space: normal; min-width: 13rem; }}
.records td.name {{ white-space: nowrap; min-width: 0; }}
td a {{ text-decoration: none; }} td a:hover, td a:focus-visible {{ text-decoration: underline dotted; }}
td small {{ color: var(--dim); display: block; font-size: .78rem; }} tr.full td {{ font-weight: 600; }}
tr.full td small {{ font-weight: 400; }}
.front-tag {{ color: var(--good); font-size: .78rem; white-space: nowrap; margin-left: .4rem; }}
tr:target td, tr.asked td {{ background: var(--soft); }}
.swatch {{ display: inline-block; width: .65em; height: .65em; border-radius: 50%; background: currentColor;
  margin-right: .4em; }} .swatch.again {{ border-radius: 0; }}
.legend {{ list-style: none; margin: .4rem 0 1rem; padding: 0; display: flex; flex-wrap: wrap; gap: .15rem 1.2rem; }}
.legend span:last-child {{ color: var(--ink); }}
.missing {{ border: 1px solid var(--warm); border-left-width: 5px; background: var(--soft); padding: .5rem 1rem;
  margin: 1rem 0; max-width: 60rem; }} .missing ul {{ margin: .3rem 0; padding-left: 1.2rem; }}
.missing strong {{ color: var(--warm); }}
code {{ font: .9em ui-monospace, monospace; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr));
  gap: 1.4rem 1.8rem; align-items: start; }}
.maps {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 15rem), 1fr)); gap: 1rem 1.5rem; }}
figure {{ margin: 0; min-width: 0; break-inside: avoid; }}
figcaption {{ font-size: .92rem; margin-bottom: .3rem; line-height: 1.35; }}
figcaption small {{ color: var(--dim); display: block; font-size: .82rem; }}
svg {{ display: block; max-width: 100%; height: auto; font: 13px system-ui, sans-serif; }}
.charts svg {{ width: 100%; max-width: 34rem; }}
svg text {{ fill: var(--ink); }} svg .value {{ pointer-events: none; }}
svg .value, svg .mark text {{ paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }}
svg .mark text {{ stroke-linejoin: round; }} svg .tick, svg .axis {{ fill: var(--dim); }}
svg .grid {{ stroke: var(--rule); }} svg .zero {{ stroke: var(--dim); }}
svg .mark circle, svg .bar rect {{ fill: currentColor; }} svg .mark line {{ stroke: currentColor; stroke-width: 1.5; }}
svg .line {{ fill: none; stroke: currentColor; stroke-width: 1.8; }} svg .line.again {{ stroke-dasharray: 6 3; }}
svg .bar rect {{ fill-opacity: .8; }} svg .mark:hover circle, svg .bar:hover rect {{ fill: var(--warm); }}
svg .whisker {{ fill: none; stroke: var(--ink); stroke-width: 1.4; }}
svg .goal {{ stroke: var(--ink); stroke-width: 2.5; }}
svg .front {{ fill: none; stroke: var(--good); stroke-dasharray: 4 4; }}
svg .cell {{ fill: var(--accent); }} svg .on-low {{ fill: var(--ink); }} svg .on-middle {{ fill: #14171b; }}
svg .on-high {{ fill: var(--strong); }}
details {{ margin: .6rem 0; }} summary {{ cursor: pointer; }}
.filter {{ display: flex; flex-wrap: wrap; gap: .6rem; align-items: center; margin: .5rem 0; }}
.filter input {{ font: inherit; padding: .25rem .5rem; border: 1px solid var(--dim); border-radius: 4px; width: 20rem;
  max-width: 100%; background: var(--paper); color: var(--ink); }}
.filter button {{ font: inherit; padding: .2rem .6rem; }}
@media (max-width: 40rem) {{ body {{ padding: 1.2rem .9rem 3rem; }} h1 {{ font-size: 1.15rem; }}
  td.name {{ min-width: 9rem; font-size: .87rem; }} th, td {{ padding: .3rem .45rem; }} }}
@media print {{ body {{ max-width: none; padding: 0; font-size: 10px; }} .wide {{ overflow: visible; }}
  .filter {{ display: none; }} td.name {{ min-width: 0; }} h2, h3 {{ break-after: avoid; }}
  tr {{ break-inside: avoid; }} }}
"""

SORTING = """
for (const table of document.querySelectorAll('table.sortable')) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, index) => head.querySelector('button').addEventListener('click', () => {
    const down = head.getAttribute('aria-sort') === 'ascending';
    heads.forEach(other => other.removeAttribute('aria-sort'));
    head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    const key = row => row.cells[index].dataset.value;
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === '' || y === '') return (x === '') - (y === '');
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return down ? -order : order;
    });
    table.tBodies[0].append(...rows);
  }));
}
"""
"""The heads of tables sort their lines."""

SCRIPT = (
    SORTING
    + """const records = document.getElementById('records');
const box = document.getElementById('filter');
const count = document.getElementById('shown');
const rows = [...records.querySelectorAll('tbody tr')];
function keep(wanted) {
  let left = 0;
  for (const row of rows) { row.hidden = !wanted(row); left += !row.hidden; }
  count.textContent = left === rows.length ? `all ${left} records` : `${left} of ${rows.length} records`;
}
box.addEventListener('input', () => {
  const words = box.value.toLowerCase().split(/\\s+/).filter(Boolean);
  keep(row => words.every(word => row.textContent.toLowerCase().includes(word)));
});
document.getElementById('all').addEventListener('click', () => { box.value = ''; keep(() => true); });
document.addEventListener('click', event => {
  const link = event.target.closest('a[data-keys]');
  if (!link) return;
  const keys = new Set(link.dataset.keys.split(' '));
  records.open = true;
  box.value = '';
  keep(row => keys.has(row.dataset.key));
});
"""
)
