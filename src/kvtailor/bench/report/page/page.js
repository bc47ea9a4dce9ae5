// What a reader can do with the page: sort, look behind numbers, keep a plan lit, filter, say a memory, copy.
'use strict';

const byId = name => document.getElementById(name);
const all = what => [...document.querySelectorAll(what)];
const UNITS = {'': 1, k: 1e3, m: 1e6, g: 1e9, ki: 2 ** 10, mi: 2 ** 20, gi: 2 ** 30};

/** Bytes of a text as `--memory` reads it, a percentage of `full`, or null. */
function bytesOf(text, full) {
  const percent = /^\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*$/.exec(text);
  if (percent) return percent[1] > 0 ? Math.floor(percent[1] / 100 * full) : null;
  const size = /^\s*([0-9]+(?:\.[0-9]+)?)\s*([kmg]i?)?b?\s*$/i.exec(text);
  const bytes = size ? Math.floor(size[1] * UNITS[(size[2] ?? '').toLowerCase()]) : 0;
  return bytes > 0 ? bytes : null;
}

/** A size with three figures, never above what it stands for, in a spelling that `bytesOf` reads. */
function sizeText(bytes) {
  for (const [unit, size] of [['GiB', 2 ** 30], ['MiB', 2 ** 20], ['KiB', 2 ** 10]]) {
    if (bytes < size) continue;
    const step = 10 ** Math.max(-2, Math.floor(Math.log10(bytes / size)) - 2);
    return `${+(Math.floor(bytes / size / step + 1e-9) * step).toPrecision(6)} ${unit}`;
  }
  return String(Math.floor(bytes));
}

/** Adds an element with a text, and returns it. */
function added(parent, kind, text = '', more = {}) {
  const made = Object.assign(document.createElement(kind), {textContent: text}, more);
  parent.append(made);
  return made;
}

document.documentElement.classList.add('scripted');
const data = JSON.parse(byId('page-data').textContent);
const plans = data.plans, planOf = new Map(plans.map(plan => [plan.number, plan]));

// ---- tables: their heads sort their lines, by a cell's own value or else by the text that it shows
function sortKey(cell) {
  if (cell.dataset.value !== undefined) return cell.dataset.value;
  const text = (cell.querySelector('code, a') ?? cell.firstChild ?? cell).textContent.trim();
  return text === '–' ? '' : text.replace(/,(?=\d{3})/g, '');
}

for (const table of all('table.sortable')) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, index) => head.querySelector('button').addEventListener('click', () => {
    const down = head.getAttribute('aria-sort') === 'ascending';
    heads.forEach(other => other.removeAttribute('aria-sort'));
    head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    const rows = [...table.tBodies[0].rows].map(row => [index ? sortKey(row.cells[index]) : row.cells[0].textContent, row]);
    rows.sort(([x], [y]) => {
      if (x === '' || y === '') return (x === '') - (y === '');
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return down ? -order : order;
    });
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }));
}

// ---- the records behind a number
/** The lines that an attribute such as "4-9 12" names. */
function linesOf(text) {
  return text.split(' ').flatMap(part => {
    const [first, last = first] = part.split('-').map(Number);
    return Array.from({length: last - first + 1}, (_, index) => byId(`r${first + index}`));
  });
}

const records = byId('records');
if (records) {
  const box = byId('filter'), tables = [...records.querySelectorAll('table')], rows = [...records.querySelectorAll('tbody tr')];
  // The lines name plans by number; all that follows looks for their words.
  for (const row of rows) {
    const plan = planOf.get(row.cells[0].textContent);
    row.dataset.n = plan?.number ?? '';
    if (plan) row.cells[0].textContent = plan.label;
  }
  const texts = new Map(rows.map(row => [row, `${row.closest('table').caption.textContent} ${row.textContent}`.toLowerCase()]));

  const keep = wanted => {
    let left = 0;
    for (const row of rows) { row.hidden = !wanted(row); left += !row.hidden; }
    for (const table of tables) table.parentElement.hidden = [...table.tBodies[0].rows].every(row => row.hidden);
    byId('shown').textContent = left === rows.length ? `all ${left} records` : `${left} of ${rows.length} records`;
  };
  box.addEventListener('input', () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    keep(row => words.every(word => texts.get(row).includes(word)));
  });
  byId('all').addEventListener('click', () => { box.value = ''; keep(() => true); });
  document.addEventListener('click', event => {
    const link = event.target.closest('td a[href^="#r"]');
    if (!link) return;
    const wanted = new Set(linesOf(link.closest('[data-r]')?.dataset.r ?? link.hash.slice(2)));
    records.open = true;
    box.value = '';
    keep(row => wanted.has(row));
  });

  // What is said of records on hover is put together when it is first needed: a page of many plans has thousands.
  const told = new WeakSet();
  const tell = event => {
    const from = event.target.closest?.('td a[href^="#r"], svg [data-r]');
    if (!from || told.has(from)) return;
    told.add(from);
    const found = linesOf(from.closest('[data-r]')?.dataset.r ?? from.hash.slice(2));
    const words = found.slice(0, 3).map(row => {
      const table = row.closest('table'), heads = [...table.tHead.rows[0].cells].map(head => head.textContent);
      const cells = [...row.cells].map((cell, index) => `${heads[index]} ${cell.textContent}`);
      return [table.caption.textContent, ...cells.slice(1)].join(', ');
    });
    if (found.length > 3) words.push(`and ${found.length - 3} records more`);
    const title = from.querySelector(':scope > title');
    if (title) title.textContent = [title.textContent, ...words].join('\n');
    else from.title = words.join('\n');
  };
  document.addEventListener('pointerover', tell);
  document.addEventListener('focusin', tell);
}

// ---- small charts
const pictures = all('figure.small svg');
const drawPictures = () => pictures.forEach((svg, index) =>
  drawSmall(svg, data.charts[index], number => planOf.get(number).kind, number => planOf.get(number).label));

// ---- one plan lit in every table and chart, until it is chosen again or Escape is pressed
const lighting = added(document.head, 'style'), bar = Object.assign(document.createElement('div'), {id: 'standing'});
// Below the contents, so that paper has it at the top; on a screen it stands at the lower edge.
document.querySelector('.contents').after(bar);
bar.setAttribute('role', 'status');
let lit = null, kept = null, left = new Set(plans.map(plan => plan.number));

function light(number) {
  if (number === lit) return;
  lit = number;
  const others = `:not([data-n="${number}"])`;
  lighting.textContent = number === null ? '' :
    `:is(.of-plans, .records) tr[data-n="${number}"] > *, li[data-n="${number}"] { background: var(--lit); }` +
    `tr[data-n="${number}"] .front-tag { color: var(--ink); }` +
    `.charts svg [data-n]${others}, #chart .point${others} { opacity: .22; }` +
    `figure[data-n="${number}"] > figcaption { background: var(--lit); }`;
}

function pin(number) {
  kept = kept === number ? null : number;
  for (const button of all('button.pin')) button.setAttribute('aria-pressed', button.dataset.pin === kept);
  light(kept);
  showBar();
}

function showBar() {
  bar.replaceChildren();
  if (kept !== null) {
    added(bar, 'span', `Plan ${kept} is lit: ${planOf.get(kept).label}`);
    added(bar, 'button', 'put it out', {type: 'button', onclick: () => pin(kept)});
  }
  if (left.size < plans.length) {
    added(bar, 'span', `The filter shows ${left.size} of ${plans.length} plans in tables and charts.`);
    added(bar, 'button', 'show all', {type: 'button', onclick: () => byId('every').click()});
  }
}

for (const kind of ['pointerover', 'focusin']) {
  document.addEventListener(kind, event => {
    if (!event.target.closest?.('#chart')) light(event.target.closest?.('[data-n]')?.dataset.n || kept);
  });
}
document.addEventListener('keydown', event => { if (event.key === 'Escape' && kept !== null) pin(kept); });
document.addEventListener('click', event => {
  const mark = event.target.closest('.charts [data-n], button.pin');
  if (mark) pin(mark.dataset.pin ?? mark.dataset.n);
});
for (const row of document.querySelector('table.of-plans')?.tBodies[0].rows ?? []) {
  const cell = row.cells[0], number = row.dataset.n;
  if (number === undefined) continue;
  const button = Object.assign(document.createElement('button'), {type: 'button', className: 'pin'});
  button.append(...cell.childNodes);
  cell.append(button);
  button.dataset.pin = number;
  button.setAttribute('aria-pressed', false);
  button.setAttribute('aria-label', `plan ${number}: keep it lit in every table and chart`);
}

// ---- copying
document.addEventListener('click', async event => {
  const button = event.target.closest('button[data-copy]');
  if (!button) return;
  const source = byId(button.dataset.copy);
  setTimeout(() => { button.textContent = 'copy'; }, 2500);
  // The old way first: the new one needs a permission that a page from a file may not have, and may wait for it.
  getSelection().selectAllChildren(source);
  button.textContent = document.execCommand('copy') ? 'copied' : 'selected: copy it';
  if (button.textContent === 'copied') return;
  try {
    await navigator.clipboard.writeText(source.textContent);
    button.textContent = 'copied';
  } catch {
    // What was selected stays selected, for the reader's own keys.
  }
});

// ---- the filter of plans
const hiding = added(document.head, 'style'), question = byId('question');
const asked = data.asked.map(each => {
  const front = new Set(each.front);
  const points = each.points.map(([number, bytes, bytes_text, share, loss, low, high]) => {
    const plan = planOf.get(number), lost = `${lossWords(loss, low, high)} ${each.unit}`;
    const held = `${bytes_text}, ${+(100 * share).toPrecision(3)} % of the uncompressed`;
    return {
      ...plan, ...each.plans && {plan: each.plans[number]}, bytes, share, loss, low, high, held, lost, best: front.has(number), name: shortName(plan.label),
      shape: plan.shape ?? (plan.kind.includes('again') ? 'square' : 'circle'),
      described: `${number}: ${plan.label}. ${held}; loss ${lost}`,
    };
  });
  return {...each, points, whole: plans.some(plan => plan.whole && front.has(plan.number)), axis_short: each.axis_short ?? each.axis};
});
let current = asked[0] ?? null, choose = () => {};

/** A plan's methods without their settings, for where there is little space; a preset's name as it is. */
function shortName(label) {
  let bare = label.split(' @ ')[0], inner;
  while ((inner = bare.replace(/\([^()]*\)/g, '')) !== bare) bare = inner;
  return bare.length <= 30 ? bare : `${bare.slice(0, 29).replace(/[ +]+$/, '')}…`;
}

function lossWords(loss, low, high) {
  const text = value => String(+value.toPrecision(3)).replace('-', '−');
  return `${text(loss)} ${low === null ? '(no interval)' : `(${text(low)} to ${text(high)})`}`;
}

const shown = () => current.points.filter(point => left.has(point.number));

function update() {
  const words = byId('find').value.toLowerCase().split(/\s+/).filter(Boolean);
  const off = name => new Set(all(`input[name=${name}]`).filter(each => !each.checked).map(each => each.value));
  const [plansOff, groupsOff] = [off('plan'), off('group')];
  const front = current && byId('front-only').checked ? new Set(current.front) : null;
  // 'full' is what all are measured against: words, groups and the front leave it.
  left = new Set(plans.filter(plan => !plansOff.has(plan.number) && (plan.whole || !groupsOff.has(plan.group) &&
    (!front || front.has(plan.number)) && words.every(word => `${plan.label} ${plan.plan ?? ''} ${plan.group ?? ''}`.toLowerCase().includes(word)))).map(
    plan => plan.number));
  const gone = plans.filter(plan => !left.has(plan.number)).map(plan => `:is(.of-plans, .charts, .maps) [data-n="${plan.number}"]`);
  hiding.textContent = gone.length ? `${gone.join(', ')} { display: none; }` : '';
  byId('count').textContent = `${left.size} of ${plans.length} plans shown`;
  showBar();
  choose();
}

/** What was found for the reader's memory, into an empty box. */
function say(box, picked, memory) {
  const mine = `${sizeText(memory)} (${(100 * memory / current.full).toPrecision(3)} % of the uncompressed cache` +
    `${current.tokens == null ? '' : ` of ${current.tokens.toLocaleString('en')} tokens`})`;
  if (memory >= current.full) added(box, 'p', `The uncompressed cache itself, ${current.full_text}, fits in ${mine}.`);
  if (picked === undefined) {
    const smallest = shown().sort((a, b) => a.bytes - b.bytes)[0];
    added(box, 'p', smallest === undefined ? 'No plan is shown: the filter leaves none.' :
      `No plan that is shown fits in ${mine}. The smallest is ${smallest.number}, ${smallest.label}, with ${smallest.held}.`);
    return;
  }
  const line = added(box, 'p', `Of the plans shown the one that loses least in ${mine} is ${picked.number}, `);
  added(line, 'code', picked.label);
  line.append([`: ${picked.held}; it loses ${picked.lost} in ${current.name}, by its mean.`, ...picked.told ?? []].join(' '));
  const named = current.points.find(point => point.number === current.plan);
  if (named && named !== picked && named.bytes <= memory) line.append(` The proof, on unseen text, named another plan: ${named.number}.`);
  const copied = added(box, 'div', '', {className: 'copied'});
  added(copied, 'span', 'Python', {className: 'what'});
  added(copied, 'pre', `cache = kvtailor.cache_for(model, "${picked.plan ?? picked.label}")`, {id: 'copy-pick', tabIndex: 0});
  added(copied, 'button', 'copy', {type: 'button'}).dataset.copy = 'copy-pick';
}

/** What the tip says of a point, a line each; the last one is set as code. */
function linesAbout(point) {
  const words = point.number === current.plan ? ', the plan' : '';
  return [`${point.number}, ${point.name}${words}`, point.held, `loss ${point.lost}`, ...point.told ?? [], point.plan ?? point.label];
}

// ---- the large chart as a control: the reader's memory, the best plan that fits it, hover, and keys
function startChart() {
  const svg = byId('chart'), tip = byId('tip'), field = byId('memory'), slide = byId('slide');
  const HINT = [...byId('memory-note').childNodes];
  let memory = null, places = [], at = -1, looked;

  const most = () => Math.max(current.full, ...current.points.map(point => point.bytes));
  const least = () => Math.min(...current.points.map(point => point.bytes)) * 0.85;
  const toSlide = bytes => Math.round(slide.max * Math.log(bytes / least()) / Math.log(most() / least()));
  const fromSlide = place => least() * (most() / least()) ** (place / slide.max);

  choose = () => {
    // The plan of the least loss that fits, of those that are shown; of equal losses the one with fewer bytes.
    const fitting = shown().filter(point => memory !== null && point.bytes <= memory);
    const picked = fitting.sort((a, b) => a.loss - b.loss || a.bytes - b.bytes)[0], box = byId('pick');
    for (const row of all('.of-plans tr[data-n]')) row.classList.toggle('picked', row.dataset.n === picked?.number);
    box.replaceChildren();
    delete box.dataset.plan;
    if (memory === null) added(box, 'p', 'No memory is set.');
    else {
      if (picked !== undefined) box.dataset.plan = picked.number;
      say(box, picked, memory);
    }
    const focus = document.activeElement?.closest?.('#chart .point')?.dataset.n;
    hide();
    places = drawChart(svg, current, shown(), picked, memory).sort((a, b) => a.point.bytes - b.point.bytes);
    at = places.findIndex(place => place.point === picked);
    if (places.length) places[Math.max(0, at)].group.setAttribute('tabindex', 0);
    if (focus !== undefined) places.find(place => place.point.number === focus)?.group.focus();
    const there = new Set(current.points.map(point => point.number));
    const lacking = plans.filter(plan => !plan.whole && !there.has(plan.number)).map(plan => plan.number);
    byId('absent').textContent = lacking.length ? `Without bytes or a loss in ${current.name}, so not drawn: ${lacking.join(', ')}.` : '';
  };

  function remember(bytes, {text = null, moved = false} = {}) {
    if (text !== null) field.value = text;
    const wrong = bytes === null && field.value.trim() !== '', note = byId('memory-note');
    memory = bytes;
    field.setAttribute('aria-invalid', wrong);
    note.classList.toggle('wrong', wrong);
    if (wrong) note.textContent = 'That is no size above 0: write for example 300KiB, 1.5MiB, 2GiB or 25%.';
    else note.replaceChildren(...HINT);
    if (bytes !== null && !moved) slide.value = toSlide(bytes);
    slide.setAttribute('aria-valuetext', bytes === null ? 'not set' : sizeText(bytes));
  }

  const again = () => remember(field.value.trim() === '' ? null : bytesOf(field.value, current.full));
  field.addEventListener('input', () => { again(); choose(); });
  slide.addEventListener('input', () => {
    const text = slide.value === slide.max ? sizeText(most()) : sizeText(fromSlide(slide.value));
    remember(bytesOf(text, current.full), {text, moved: true});
    choose();
  });
  question.addEventListener('input', () => { current = asked[question.value]; again(); update(); });

  function show(index) {
    const place = places[index];
    if (place === undefined) return hide();
    if (looked === place) return;
    hide();
    looked = place;
    at = index;
    const {point, x, y, group} = place, lines = linesAbout(point);
    group.classList.add('shown');
    tip.replaceChildren();
    lines.forEach((line, index) => added(tip, index + 1 < lines.length ? 'div' : 'code', line));
    tip.firstChild.style.fontWeight = 600;
    tip.hidden = false;
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    const above = y * scale - tip.offsetHeight - 16, below = y * scale + 18;
    tip.style.left = `${Math.max(2, Math.min(Math.max(2, x * scale + 14), box.width - tip.offsetWidth - 2))}px`;
    tip.style.top = `${above >= 0 || below + tip.offsetHeight > box.height + 60 ? Math.max(above, -60) : below}px`;
    light(point.number);
  }

  function hide() {
    if (looked === undefined) return;
    looked = undefined;
    tip.hidden = true;
    for (const each of svg.querySelectorAll('.shown')) each.classList.remove('shown');
    light(kept);
  }

  /** The point that is nearest to the pointer, if it is near. */
  function under(event) {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const [x, y] = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
    let near = -1, least = event.pointerType === 'touch' ? 34 : 22;
    places.forEach((place, index) => {
      const far = Math.hypot(place.x - x, place.y - y);
      if (far < least) [near, least] = [index, far];
    });
    return near;
  }

  svg.addEventListener('pointermove', event => show(under(event)));
  svg.addEventListener('pointerdown', event => show(under(event)));
  svg.addEventListener('pointerleave', event => { if (event.pointerType !== 'touch') hide(); });
  document.addEventListener('pointerdown', event => { if (!event.target.closest('.canvas')) hide(); });
  svg.addEventListener('focusin', event => {
    const group = event.target.closest('.point');
    show(places.findIndex(place => place.group === group));
  });
  svg.addEventListener('focusout', hide);
  svg.addEventListener('keydown', event => {
    const step = {ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1}[event.key];
    if (event.key === 'Escape') hide();
    if (event.key === 'Enter' && places[at]) {
      remember(places[at].point.bytes, {text: String(places[at].point.bytes)});
      choose();
    }
    if (event.key === 'Home') go(0);
    else if (event.key === 'End') go(places.length - 1);
    else if (step) go(Math.min(places.length - 1, Math.max(0, at + step)));
    else return;
    event.preventDefault();
  });

  function go(index) {
    for (const place of places) place.group.setAttribute('tabindex', -1);
    places[index].group.setAttribute('tabindex', 0);
    places[index].group.focus();
  }

  function fromAddress() {
    const memory = new URLSearchParams(location.hash.slice(1)).get('memory') ?? new URLSearchParams(location.search).get('memory');
    if (memory !== null) remember(bytesOf(memory, current.full), {text: memory});
    return memory !== null;
  }

  if (!fromAddress() && data.memory !== null) remember(data.memory[0], {text: data.memory[1]});
  addEventListener('hashchange', () => { if (fromAddress()) choose(); });
}

if (byId('tools')) {
  if (current) startChart();
  for (const input of [byId('find'), byId('front-only'), ...all('input[name=plan], input[name=group]')]) input?.addEventListener('input', update);
  byId('tools').addEventListener('submit', event => event.preventDefault());
  byId('every').addEventListener('click', () => {
    byId('find').value = '';
    for (const each of all('input[name=plan], input[name=group]')) each.checked = true;
    if (byId('front-only')) byId('front-only').checked = false;
    update();
  });
  update();
}
drawPictures();
let wide = document.body.clientWidth;
new ResizeObserver(() => {
  if (Math.abs(document.body.clientWidth - wide) < 2) return;
  wide = document.body.clientWidth;
  drawPictures();
  choose();
}).observe(document.body);
