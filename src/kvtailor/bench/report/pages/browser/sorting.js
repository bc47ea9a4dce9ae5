// The heads of tables sort their lines.
'use strict';

const SIZES = {
  B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40,
  FLOP: 1, kFLOP: 1e3, MFLOP: 1e6, GFLOP: 1e9, TFLOP: 1e12,
};

/** What a cell is sorted by: its own value, else the text that it shows, without the small print below. */
function sortKey(cell) {
  if (cell.dataset.value !== undefined) return cell.dataset.value;
  const code = cell.querySelector('code');
  if (code) return code.textContent;
  let text = [...cell.childNodes].map(part => part.nodeName === 'SMALL' ? '' : part.textContent).join('').trim();
  if (text === '–') return '';
  text = text.replace(/,(?=\d{3})/g, '');
  const [, number, unit] = /^(-?[\d.]+) (\S+)$/.exec(text) ?? [];
  return unit in SIZES ? number * SIZES[unit] : text;
}

for (const table of document.querySelectorAll('table.sortable')) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, index) => head.querySelector('button').addEventListener('click', () => {
    const down = head.getAttribute('aria-sort') === 'ascending';
    heads.forEach(other => other.removeAttribute('aria-sort'));
    head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    const rows = [...table.tBodies[0].rows].map(row => [sortKey(row.cells[index]), row]);
    rows.sort(([x], [y]) => {
      if (x === '' || y === '') return (x === '') - (y === '');
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return down ? -order : order;
    });
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }));
}
