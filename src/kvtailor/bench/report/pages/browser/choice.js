// The chart of bytes against loss as a control: the reader's memory, the best plan that fits it, hover, and keys.
'use strict';

const byId = name => document.getElementById(name);
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

/**
 * Makes the chart and its fields work, and returns what a page calls when its filter or its data changed.
 *
 * @param page
 *   `data`: see `drawChart`; each point has `bytes` too. A page may put another object there before it calls `choose`.
 *   `shown()`: the points that the filter leaves.
 *   `say(box, picked, memory)`: writes what was found for a memory of so many bytes into an empty box.
 *   `mark(picked)`: marks the plan elsewhere on the page; undefined: none fits.
 *   `lines(point)`: what the tip says, a line each; the last one is set as code.
 *   `over(point)`: a point is looked at, or none (undefined).
 *   `memory`: bytes and text that the page begins with, or null.
 */
function startChoice(page) {
  const svg = byId('chart'), tip = byId('tip'), field = byId('memory'), slide = byId('slide');
  const HINT = [...byId('memory-note').childNodes];
  let memory = null, places = [], current = -1, wide = svg.parentElement.clientWidth, looked;

  const most = () => Math.max(page.data.full, ...page.data.points.map(point => point.bytes));
  const least = () => Math.min(...page.data.points.map(point => point.bytes)) * 0.85;
  const toSlide = bytes => Math.round(slide.max * Math.log(bytes / least()) / Math.log(most() / least()));
  const fromSlide = place => least() * (most() / least()) ** (place / slide.max);

  /** The plan of the least loss that fits, of those that are shown; of equal losses the one with fewer bytes. */
  function bestOf() {
    const fitting = page.shown().filter(point => memory !== null && point.bytes <= memory);
    return fitting.sort((a, b) => a.loss - b.loss || a.bytes - b.bytes)[0];
  }

  function choose() {
    const picked = bestOf(), box = byId('pick');
    page.mark(picked);
    box.replaceChildren();
    delete box.dataset.plan;
    if (memory === null) added(box, 'p', 'No memory is set.');
    else {
      if (picked !== undefined) box.dataset.plan = picked.plan;
      page.say(box, picked, memory);
    }
    const focus = document.activeElement?.closest?.('#chart .point')?.dataset.plan;
    hide();
    places = drawChart(svg, page.data, page.shown(), picked, memory).sort((a, b) => a.point.bytes - b.point.bytes);
    current = places.findIndex(place => place.point === picked);
    if (places.length) places[Math.max(0, current)].group.setAttribute('tabindex', 0);
    if (focus !== undefined) places.find(place => place.point.plan === focus)?.group.focus();
  }

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

  field.addEventListener('input', () => { remember(bytesOf(field.value, page.data.full)); choose(); });
  slide.addEventListener('input', () => {
    const text = slide.value === slide.max ? sizeText(most()) : sizeText(fromSlide(slide.value));
    remember(bytesOf(text, page.data.full), {text, moved: true});
    choose();
  });
  byId('tools').addEventListener('submit', event => event.preventDefault());

  function show(index) {
    const place = places[index];
    if (place === undefined) return hide();
    if (looked === place) return;
    hide();
    looked = place;
    current = index;
    const {point, x, y, group} = place, lines = page.lines(point);
    group.classList.add('shown');
    tip.replaceChildren();
    lines.forEach((line, index) => added(tip, index + 1 < lines.length ? 'div' : 'code', line));
    tip.firstChild.style.fontWeight = 600;
    tip.hidden = false;
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    const left = Math.min(Math.max(2, x * scale + 14), box.width - tip.offsetWidth - 2);
    const above = y * scale - tip.offsetHeight - 16, below = y * scale + 18;
    tip.style.left = `${Math.max(2, left)}px`;
    tip.style.top = `${above >= 0 || below + tip.offsetHeight > box.height + 60 ? Math.max(above, -60) : below}px`;
    page.over(point);
  }

  function hide() {
    if (looked === undefined) return;
    looked = undefined;
    tip.hidden = true;
    for (const each of svg.querySelectorAll('.shown')) each.classList.remove('shown');
    page.over(undefined);
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
    if (asked !== null) remember(bytesOf(asked, page.data.full), {text: asked});
    return asked !== null;
  }

  if (!fromAddress() && page.memory !== null) remember(...page.memory);
  addEventListener('hashchange', () => { if (fromAddress()) choose(); });
  new ResizeObserver(() => {
    if (Math.abs(svg.parentElement.clientWidth - wide) < 2) return;
    wide = svg.parentElement.clientWidth;
    choose();
  }).observe(svg.parentElement);
  return {
    choose,
    /** The memory of the field again, after `page.data` has become that of another cache. */
    again() {
      remember(field.value.trim() === '' ? null : bytesOf(field.value, page.data.full));
      choose();
    },
  };
}
