// What the page of a fit does besides the chart: what it says of a plan, filters over chart and tables, and copies.
'use strict';

{
  const data = JSON.parse(byId('fit-data').textContent);

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

  if (data.points.length) start();

  function start() {
    const find = byId('find'), frontOnly = byId('front-only');
    const boxes = [...document.querySelectorAll('input[name=origin]')];
    const rows = [...document.querySelectorAll('tr[data-plan]')];
    const rowOf = new Map(rows.filter(row => row.dataset.best).map(row => [row.dataset.plan, row]));
    const SHAPES_OF = {layers: 'circle', words: 'diamond', preset: 'triangle'};
    for (const point of data.points) {
      Object.assign(point, {
        share: point.bytes / data.full, kind: `o-${point.origin}`, shape: SHAPES_OF[point.origin],
        described: `${point.number}, ${point.origin_text}: ${point.label}. ${point.bytes_text}, ` +
          `${point.share_text}; loss ${point.loss_text} nats per token (KL, text and answers of the search)`,
      });
    }
    Object.assign(data, {
      whole: false, log: 'always', title: 'bytes against loss; arrow keys go from plan to plan',
      axis: 'KL on text and answers of the search, nats per token', axis_short: 'KL, text + answers, nats/token',
    });
    let shown = data.points;

    const isWanted = (words, origins, row) => words.every(word => row.dataset.find.includes(word)) &&
      origins.has(row.dataset.origin) && (!frontOnly.checked || row.dataset.best !== '0');

    function update() {
      const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
      const known = new Set(boxes.map(box => box.value));
      const origins = new Set(boxes.filter(box => box.checked).map(box => box.value));
      for (const row of rows) {
        // The uncompressed cache is what all are measured against; an origin without a box cannot be unchecked.
        if (!known.has(row.dataset.origin)) origins.add(row.dataset.origin);
        row.hidden = row.dataset.origin !== 'full' && !isWanted(words, origins, row);
      }
      shown = data.points.filter(point => !rowOf.get(point.plan).hidden);
      byId('count').textContent = `${shown.length} of ${data.points.length} plans shown`;
      choice.choose();
    }

    function say(box, picked, memory) {
      const mine = `${sizeText(memory)} (${(100 * memory / data.full).toPrecision(3)} % of the uncompressed cache)`;
      if (memory >= data.full) added(box, 'p', `The uncompressed cache itself, ${data.full_text}, fits in ${mine}.`);
      if (picked === undefined) {
        const smallest = [...shown].sort((a, b) => a.bytes - b.bytes)[0];
        added(box, 'p', smallest === undefined ? 'No plan is shown: the filter leaves none.' :
          `No plan that is shown fits in ${mine}. The smallest is ${smallest.number}, ${smallest.name}, with ` +
          `${smallest.bytes_text}.`);
        return;
      }
      added(box, 'p', `Of the plans shown the one that loses least in ${mine} is ${picked.number}, `)
        .append(Object.assign(document.createElement('b'), {textContent: picked.name}), ` (${picked.origin_text}): ` +
          `${picked.bytes_text}, ${picked.share_text}; it loses ${picked.loss_text} nats per token (KL on text and answers of the search).` +
          (picked.proof_text === null ? ' It was not in the proof.' : ` ${picked.proof_text}`) +
          (picked.plan !== data.plan && data.plan_bytes <= memory ?
            ` The proof, on unseen text, named another plan: ${data.plan_number}.` : ''));
      const line = added(box, 'div', '', {className: 'copied'});
      added(line, 'span', 'Python', {className: 'what'});
      added(line, 'pre', picked.python, {id: 'copy-pick', tabIndex: 0});
      added(line, 'button', 'copy', {type: 'button'}).dataset.copy = 'copy-pick';
    }

    function lines(point) {
      return [
        ...(point.label === point.plan ? [] : [point.label]),
        `${point.number}, ${point.origin_text}${point.plan === data.plan ? ', the plan' : ''}`,
        `${point.bytes_text}, ${point.share_text} of the uncompressed`,
        `loss ${point.loss_text} nats per token (KL, text and answers), on ${point.pieces} pieces of the search`,
        ...(point.proof_text === null ? [] : [point.proof_text]),
        point.plan,
      ];
    }

    const choice = startChoice({
      data, shown: () => shown, say, lines, over: () => {}, memory: [data.memory, {text: data.memory_text}],
      mark: picked => {
        for (const row of rows) row.classList.toggle('picked', picked !== undefined && row.dataset.plan === picked.plan);
      },
    });
    for (const input of [find, frontOnly, ...boxes]) input.addEventListener('input', update);
    byId('every').addEventListener('click', () => {
      find.value = '';
      frontOnly.checked = false;
      for (const box of boxes) box.checked = true;
      update();
    });
    update();
  }
}
