// What the page of a run does besides the chart: records behind numbers, one plan lit everywhere, and the filter.
'use strict';

{
  document.documentElement.classList.add('scripted');
  const data = JSON.parse(byId('report-data').textContent);
  const plans = data.plans.map(([number, label, name, kind, whole]) => ({number, label, name, kind, whole}));
  const planOf = new Map(plans.map(plan => [plan.number, plan]));

  // ---- the records behind a number
  const records = byId('records'), box = byId('filter');
  const tables = [...records.querySelectorAll('table')], rows = [...records.querySelectorAll('tbody tr')];
  // The lines name plans by number; all that follows looks for their words.
  for (const row of rows) {
    const plan = planOf.get(row.cells[0].textContent);
    row.dataset.n = plan?.number ?? '';
    if (plan) row.cells[0].textContent = plan.label;
  }
  const texts = new Map(rows.map(row => {
    const table = row.closest('table');
    return [row, `${table.caption.textContent} ${row.textContent}`.toLowerCase()];
  }));

  /** The lines that an attribute such as "4-9 12" names. */
  function linesOf(text) {
    return text.split(' ').flatMap(part => {
      const [first, last = first] = part.split('-').map(Number);
      return Array.from({length: last - first + 1}, (_, index) => byId(`r${first + index}`));
    });
  }

  function keep(wanted) {
    let left = 0;
    for (const row of rows) { row.hidden = !wanted(row); left += !row.hidden; }
    for (const table of tables) table.parentElement.hidden = [...table.tBodies[0].rows].every(row => row.hidden);
    byId('shown').textContent = left === rows.length ? `all ${left} records` : `${left} of ${rows.length} records`;
  }

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

  // A hover text is made when it is first needed: a page of many plans has thousands.
  const told = new WeakSet();
  function tell(event) {
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
    if (title) {
      // Lines and bars have the plan's number where the points of a scatter have its words.
      const [first, ...rest] = title.textContent.split('\n');
      title.textContent = [planOf.get(first)?.label ?? first, ...rest, ...words].join('\n');
    }
    else from.title = words.join('\n');
  }
  // What a cell of a map has on hover is its plan's words, and below them what follows from its row and its column.
  function tellCell(event) {
    const cell = event.target.closest?.('.maps svg > g > g');
    if (!cell || told.has(cell)) return;
    told.add(cell);
    const svg = cell.closest('svg'), row = cell.parentElement, parts = {
      row: row.dataset.row, column: svg.dataset.columns?.split('|')[[...row.children].indexOf(cell)],
      text: cell.querySelector('text')?.textContent,
    };
    const title = cell.querySelector('title') ?? document.createElementNS(svg.namespaceURI, 'title');
    const words = svg.dataset.told?.replace(/{(\w+)}/g, (_, name) => parts[name]) ?? title.textContent;
    title.textContent = `${planOf.get(svg.closest('[data-n]').dataset.n).label}\n${words}`;
    cell.prepend(title);
  }

  document.addEventListener('pointerover', tell);
  document.addEventListener('pointerover', tellCell);
  document.addEventListener('focusin', tell);

  // ---- one plan lit in every table and chart
  const lighting = added(document.head, 'style'), bar = Object.assign(document.createElement('div'), {id: 'standing'});
  // Below the contents, so that paper has it at the top; on a screen it stands at the lower edge.
  document.querySelector('.contents').after(bar);
  bar.setAttribute('role', 'status');
  let lit = null, kept = null;

  function light(number) {
    if (number === lit) return;
    lit = number;
    const others = `:not([data-n="${number}"])`;
    lighting.textContent = number === null ? '' :
      `.of-plans tr[data-n="${number}"] > *, .records tr[data-n="${number}"] > *, li[data-n="${number}"] { background: var(--lit); }` +
      `tr[data-n="${number}"] .front-tag { color: var(--ink); }` +
      `.charts svg [data-n]${others}, #chart .point${others} { opacity: .22; }` +
      `figure[data-n="${number}"] > figcaption { background: var(--lit); }`;
  }

  /** Keeps a plan lit until it is chosen again, or Escape is pressed. */
  function pin(number) {
    kept = kept === number ? null : number;
    for (const button of document.querySelectorAll('button.pin')) {
      button.setAttribute('aria-pressed', button.dataset.pin === kept);
    }
    light(kept);
    showBar();
  }

  const numberOf = target => target.closest?.('[data-n]')?.dataset.n || null;
  for (const kind of ['pointerover', 'focusin']) {
    document.addEventListener(kind, event => {
      if (!event.target.closest?.('#chart')) light(numberOf(event.target) ?? kept);
    });
  }
  document.addEventListener('keydown', event => { if (event.key === 'Escape' && kept !== null) pin(kept); });
  document.addEventListener('click', event => {
    const mark = event.target.closest('svg [data-n], button.pin');
    if (mark) pin(mark.dataset.pin ?? mark.dataset.n);
  });
  for (const row of document.querySelectorAll('#table-plans tbody tr')) {
    const cell = row.cells[0], number = row.dataset.n;
    const button = added(cell, 'button', '', {type: 'button', className: 'pin'});
    button.append(...[...cell.childNodes].filter(part => part !== button));
    button.dataset.pin = number;
    button.setAttribute('aria-pressed', false);
    button.setAttribute('aria-label', `plan ${number}: keep it lit in every table and chart`);
  }

  // ---- the filter of plans, and the chart
  const tools = byId('tools');
  if (tools) start();

  function showBar(shown = null) {
    bar.replaceChildren();
    if (kept !== null) {
      added(bar, 'span', `Plan ${kept} is lit: ${planOf.get(kept).label}`);
      added(bar, 'button', 'put it out', {type: 'button', onclick: () => pin(kept)});
    }
    showBar.shown = shown ?? showBar.shown ?? plans.length;
    if (showBar.shown < plans.length) {
      added(bar, 'span', `The filter shows ${showBar.shown} of ${plans.length} plans in tables and charts.`);
      added(bar, 'button', 'show all', {type: 'button', onclick: () => byId('every').click()});
    }
  }

  function start() {
    const find = byId('find'), frontOnly = byId('front-only'), question = byId('question');
    const boxes = [...document.querySelectorAll('input[name=plan]')];
    const hiding = added(document.head, 'style');
    const asked = data.asked.map(each => chartOf(each));
    let current = asked[0] ?? null, choice = null, left = new Set(plans.map(plan => plan.number));

    function chartOf(each) {
      const front = new Set(each.front);
      const points = each.points.map(([number, bytes, bytes_text, share, loss, low, high]) => {
        const plan = planOf.get(number), text = lossWords({loss, low, high});
        const held = `${bytes_text}, ${+(100 * share).toPrecision(3)} % of the uncompressed`;
        return {
          number, plan: number, name: plan.name, label: plan.label, kind: plan.kind, bytes, share, loss, low, high, held, best: front.has(number),
          shape: plan.kind.includes('again') ? 'square' : 'circle',
          lost: `${text} ${each.unit}`,
          described: `${number}: ${plan.label}. ${held}; loss ${text} ${each.unit}`,
        };
      });
      const unit = each.unit.startsWith('points') ? 'points lost' : each.unit.startsWith('of') ? 'score lost' : each.axis;
      return {
        ...each, points, whole: plans.some(plan => plan.whole && front.has(plan.number)), log: 'needed', limit: null, loss_limit: null, plan: null,
        title: `bytes against loss in ${each.name}; arrow keys go from plan to plan`,
        axis: each.axis, axis_short: unit,
      };
    }

    function update() {
      const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
      const wanted = new Set(boxes.filter(each => each.checked).map(each => each.value));
      const front = current && frontOnly.checked ?
        new Set(current.points.filter(point => point.best).map(point => point.number)) : null;
      // 'full' is what all are measured against: words and the front leave it.
      left = new Set(plans.filter(plan => wanted.has(plan.number) && (plan.whole ||
        words.every(word => plan.label.toLowerCase().includes(word)) && (!front || front.has(plan.number)))).map(
        plan => plan.number));
      const gone = plans.filter(plan => !left.has(plan.number)).map(plan => `.of-plans [data-n="${plan.number}"], ` +
        `.charts [data-n="${plan.number}"], .maps [data-n="${plan.number}"]`);
      hiding.textContent = gone.length ? `${gone.join(', ')} { display: none; }` : '';
      byId('count').textContent = `${left.size} of ${plans.length} plans shown`;
      showBar(left.size);
      choice?.choose();
    }

    function say(box, picked, memory) {
      const mine = `${sizeText(memory)} (${(100 * memory / current.full).toPrecision(3)} % of the uncompressed cache` +
        `${current.tokens === null ? '' : ` of ${current.tokens.toLocaleString('en')} tokens`})`;
      if (memory >= current.full) added(box, 'p', `The uncompressed cache itself, ${current.full_text}, fits in ${mine}.`);
      const shown = current.points.filter(point => left.has(point.number));
      if (picked === undefined) {
        const smallest = [...shown].sort((a, b) => a.bytes - b.bytes)[0];
        added(box, 'p', smallest === undefined ? 'No plan is shown: the filter leaves none.' :
          `No plan that is shown fits in ${mine}. The smallest is ${smallest.number}, ${smallest.label}, with ${smallest.held}.`);
        return;
      }
      const line = added(box, 'p', `Of the plans shown the one that loses least in ${mine} is ${picked.number}, `);
      added(line, 'code', picked.label);
      line.append(`: ${picked.held}; it loses ${picked.lost} in ${current.name}, by its mean.`);
    }

    for (const input of [find, frontOnly, ...boxes]) input.addEventListener('input', update);
    tools.addEventListener('submit', event => event.preventDefault());
    byId('every').addEventListener('click', () => {
      find.value = '';
      frontOnly.checked = false;
      for (const each of boxes) each.checked = true;
      update();
    });
    if (current) {
      const page = {
        data: current, say, memory: null,
        shown: () => current.points.filter(point => left.has(point.number)),
        lines: point => [`${point.number}, ${point.name}`, point.held, `loss ${point.lost}`, point.label],
        over: point => light(point?.number ?? kept),
        mark: picked => {
          for (const row of document.querySelectorAll('.of-plans tr[data-n]')) {
            row.classList.toggle('picked', picked !== undefined && row.dataset.n === picked.number);
          }
        },
      };
      const choose = () => {
        const there = new Set(current.points.map(point => point.number));
        const lacking = plans.filter(plan => !plan.whole && !there.has(plan.number)).map(plan => plan.number);
        byId('absent').textContent = lacking.length ?
          `Without bytes or a loss in ${current.name}, so not drawn: ${lacking.join(', ')}.` : '';
      };
      choice = startChoice(page);
      question.addEventListener('input', () => {
        current = page.data = asked[question.value];
        choose();
        choice.again();
        update();
      });
      choose();
    } else byId('front-only').closest('label').hidden = true;
    update();
  }

  function lossWords({loss, low, high}) {
    const text = value => String(+value.toPrecision(3)).replace('-', '−');
    return `${text(loss)} ${low === null ? '(no interval)' : `(${text(low)} to ${text(high)})`}`;
  }
}
