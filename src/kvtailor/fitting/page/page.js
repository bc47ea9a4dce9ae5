// What the page does: the memory and its best plan, filters over chart and tables, hover, keys, and copies.
'use strict';

{
  const byId = name => document.getElementById(name);
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

  const UNITS = {'': 1, k: 1e3, m: 1e6, g: 1e9, ki: 2 ** 10, mi: 2 ** 20, gi: 2 ** 30};

  /** Bytes of a text as `--memory` reads it, or null. */
  function bytesOf(text) {
    const percent = /^\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*$/.exec(text);
    if (percent) return percent[1] > 0 ? Math.floor(percent[1] / 100 * data.full) : null;
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

  if (data.points.length) start();

  function start() {
    const svg = byId('chart'), tip = byId('tip'), field = byId('memory'), slide = byId('slide'), find = byId('find');
    const frontOnly = byId('front-only'), boxes = [...document.querySelectorAll('input[name=origin]')];
    const rows = [...document.querySelectorAll('tr[data-plan]')];
    const rowOf = new Map(rows.filter(row => row.dataset.best).map(row => [row.dataset.plan, row]));
    const least = Math.min(...data.points.map(point => point.bytes)) * 0.85;
    const most = Math.max(data.full, ...data.points.map(point => point.bytes));
    let memory = data.memory, shown = data.points, places = [], current = -1, wide = 0;

    const isWanted = (words, origins, row) => words.every(word => row.dataset.find.includes(word)) &&
      origins.has(row.dataset.origin) && (!frontOnly.checked || row.dataset.best !== '0');

    /** The plan of the least loss that fits, of those that are shown; of equal losses the one with fewer bytes. */
    function bestOf() {
      const fitting = shown.filter(point => memory !== null && point.bytes <= memory);
      return fitting.sort((a, b) => a.loss - b.loss || a.bytes - b.bytes)[0];
    }

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
      choose();
    }

    function choose() {
      const picked = bestOf();
      for (const row of rows) row.classList.toggle('picked', picked !== undefined && row.dataset.plan === picked.plan);
      say(picked);
      const focus = document.activeElement?.closest?.('#chart .point')?.dataset.plan;
      hide();
      places = drawChart(svg, data, shown, picked, memory).sort((a, b) => a.point.bytes - b.point.bytes);
      current = places.findIndex(place => place.point === picked);
      if (places.length) places[Math.max(0, current)].group.setAttribute('tabindex', 0);
      if (focus !== undefined) places.find(place => place.point.plan === focus)?.group.focus();
    }

    function say(picked) {
      const box = byId('pick'), add = (kind, text, parent = box) => {
        const made = document.createElement(kind);
        made.textContent = text;
        parent.append(made);
        return made;
      };
      box.replaceChildren();
      delete box.dataset.plan;
      if (memory === null) {
        add('p', 'No memory is set.');
        return;
      }
      const mine = `${sizeText(memory)} (${(100 * memory / data.full).toPrecision(3)} % of the uncompressed cache)`;
      if (memory >= data.full) add('p', `The uncompressed cache itself, ${data.full_text}, fits in ${mine}.`);
      if (picked === undefined) {
        const smallest = [...shown].sort((a, b) => a.bytes - b.bytes)[0];
        add('p', smallest === undefined ? 'No plan is shown: the filter leaves none.' :
          `No plan that is shown fits in ${mine}. The smallest is ${smallest.number}, ${smallest.name}, with ` +
          `${smallest.bytes_text}.`);
        return;
      }
      box.dataset.plan = picked.plan;
      add('p', `Of the plans shown the one that loses least in ${mine} is ${picked.number}, `)
        .append(Object.assign(document.createElement('b'), {textContent: picked.name}), ` (${picked.origin_text}): ` +
          `${picked.bytes_text}, ${picked.share_text}; it loses ${picked.loss_text} nats per token (KL on text and answers of the search).` +
          (picked.proof_text === null ? ' It was not in the proof.' : ` ${picked.proof_text}`) +
          (picked.plan !== data.plan && data.plan_bytes <= memory ?
            ` The proof, on unseen text, named another plan: ${data.plan_number}.` : ''));
      const line = add('div', '');
      line.className = 'copied';
      add('span', 'Python', line).className = 'what';
      Object.assign(add('pre', picked.python, line), {id: 'copy-pick', tabIndex: 0});
      const button = add('button', 'copy', line);
      button.type = 'button';
      button.dataset.copy = 'copy-pick';
    }

    const toSlide = bytes => Math.round(slide.max * Math.log(bytes / least) / Math.log(most / least));
    const fromSlide = place => least * (most / least) ** (place / slide.max);
    const HINT = byId('memory-note').textContent;

    function remember(bytes, {text = null, moved = false} = {}) {
      memory = bytes;
      const note = byId('memory-note');
      field.setAttribute('aria-invalid', bytes === null);
      note.classList.toggle('wrong', bytes === null);
      note.textContent = bytes === null ? 'That is no size above 0: write for example 300KiB, 1.5MiB, 2GiB or 25%.' : HINT;
      if (text !== null) field.value = text;
      if (bytes !== null && !moved) slide.value = toSlide(bytes);
      slide.setAttribute('aria-valuetext', bytes === null ? 'not set' : sizeText(bytes));
    }

    field.addEventListener('input', () => { remember(bytesOf(field.value)); choose(); });
    slide.addEventListener('input', () => {
      const text = slide.value === slide.max ? sizeText(most) : sizeText(fromSlide(slide.value));
      remember(bytesOf(text), {text, moved: true});
      choose();
    });
    byId('tools').addEventListener('submit', event => event.preventDefault());
    for (const input of [find, frontOnly, ...boxes]) input.addEventListener('input', update);
    byId('every').addEventListener('click', () => {
      find.value = '';
      frontOnly.checked = false;
      for (const box of boxes) box.checked = true;
      update();
    });

    function show(index) {
      hide();
      const place = places[index];
      if (place === undefined) return;
      current = index;
      const {point, x, y, group} = place;
      group.classList.add('shown');
      tip.replaceChildren();
      const lines = [
        `${point.number}, ${point.origin_text}${point.plan === data.plan ? ', the plan' : ''}`,
        `${point.bytes_text}, ${point.share_text} of the uncompressed`,
        `loss ${point.loss_text} nats per token (KL, text and answers), on ${point.pieces} pieces of the search`,
        ...(point.proof_text === null ? [] : [point.proof_text]),
      ];
      if (point.label !== point.plan) lines.unshift(point.label);
      for (const line of lines) tip.append(Object.assign(document.createElement('div'), {textContent: line}));
      tip.firstChild.style.fontWeight = 600;
      tip.append(Object.assign(document.createElement('code'), {textContent: point.plan}));
      tip.hidden = false;
      const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
      const left = Math.min(Math.max(2, x * scale + 14), box.width - tip.offsetWidth - 2);
      const above = y * scale - tip.offsetHeight - 16, below = y * scale + 18;
      tip.style.left = `${Math.max(2, left)}px`;
      tip.style.top = `${above >= 0 || below + tip.offsetHeight > box.height + 60 ? Math.max(above, -60) : below}px`;
    }

    function hide() {
      tip.hidden = true;
      for (const each of svg.querySelectorAll('.shown')) each.classList.remove('shown');
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

    svg.addEventListener('pointermove', event => { const near = under(event); near < 0 ? hide() : show(near); });
    svg.addEventListener('pointerdown', event => { const near = under(event); near < 0 ? hide() : show(near); });
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
      if (event.key === 'Enter' && places[current]) {
        remember(places[current].point.bytes, {text: String(places[current].point.bytes)});
        choose();
      }
      if (event.key === 'Home') go(0);
      else if (event.key === 'End') go(places.length - 1);
      else if (step) go(Math.min(places.length - 1, Math.max(0, current + step)));
      else return;
      event.preventDefault();
    });

    function go(index) {
      for (const place of places) place.group.setAttribute('tabindex', -1);
      places[index].group.setAttribute('tabindex', 0);
      places[index].group.focus();
    }

    function fromAddress() {
      const asked = new URLSearchParams(location.hash.slice(1)).get('memory') ??
        new URLSearchParams(location.search).get('memory');
      if (asked !== null) remember(bytesOf(asked), {text: asked});
      return asked !== null;
    }

    if (!fromAddress()) remember(data.memory, {text: data.memory_text});
    addEventListener('hashchange', () => { if (fromAddress()) choose(); });
    new ResizeObserver(() => {
      if (Math.abs(svg.parentElement.clientWidth - wide) < 2) return;
      wide = svg.parentElement.clientWidth;
      choose();
    }).observe(svg.parentElement);
    wide = svg.parentElement.clientWidth;
    update();
  }
}
