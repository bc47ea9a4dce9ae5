// Every chart of the page, drawn from its numbers for the width that there is, and drawn again when that changes.
'use strict';

const SHAPES = {
  circle: (x, y, r) => `M${x - r},${y}a${r},${r} 0 1 0 ${2 * r},0a${r},${r} 0 1 0 ${-2 * r},0z`,
  diamond: (x, y, r) => `M${x},${y - 1.2 * r}L${x + 1.2 * r},${y}L${x},${y + 1.2 * r}L${x - 1.2 * r},${y}z`,
  triangle: (x, y, r) => `M${x},${y - 1.15 * r}L${x + 1.15 * r},${y + 0.9 * r}H${x - 1.15 * r}z`,
};
const SQUARE = (x, y, r) => `M${x - r},${y - r}h${2 * r}v${2 * r}h${-2 * r}z`;
const LETTERS = document.createElement('canvas').getContext('2d');

function wideOf(text, strong) {
  LETTERS.font = `${strong ? '600 ' : ''}12.5px system-ui, sans-serif`;
  return LETTERS.measureText(text).width + 2;
}

/** Of ticks in the order of their weight those that do not touch a weightier one. */
function apart(ticks, at, wide, gap) {
  const kept = [];
  for (const tick of ticks) {
    const near = other => Math.abs(at(other) - at(tick)) <= (wide(other) + wide(tick)) / 2 + gap;
    if (!kept.some(near)) kept.push(tick);
  }
  return kept;
}

const shareText = share => `${+(100 * share).toPrecision(2)} %`;

/** About so many round numbers from `low` to `high`, the ends covered where `whole` is set. */
function roundTicks(low, high, count, whole = false) {
  const span = high - low || 1, power = 10 ** Math.floor(Math.log10(span / count));
  const step = [1, 2, 2.5, 5, 10].find(each => span / (each * power) <= count * 1.001) * power;
  const first = whole ? Math.floor(low / step + 1e-9) : Math.ceil(low / step - 1e-9);
  const last = whole ? Math.ceil(high / step - 1e-9) : Math.floor(high / step + 1e-9);
  return Array.from({length: Math.max(last, first + whole) - first + 1}, (_, index) => +((first + index) * step).toPrecision(9) || 0);
}

/** A linear scale from one number and place to another. */
const linear = (low, high, from, to) => value => from + (value - low) / (high - low || 1) * (to - from);

/** Shares from 0 on a linear scale. */
function evenScale(most, left, right) {
  const at = linear(0, most, left, right), kept = apart(roundTicks(0, most, 8), at, share => wideOf(shareText(share)), 10);
  return {at, ticks: kept.map(share => ({share, text: shareText(share)}))};
}

/** Shares from 0.01 on a logarithmic scale, with round numbers as ticks that do not touch each other. */
function acrossScale(least, most, left, right) {
  const [low, high] = [Math.log10(least), Math.log10(most)];
  const at = share => left + (Math.log10(share) - low) / (high - low || 1) * (right - left);
  const ticks = [];
  for (let power = Math.floor(low); power <= high; power++) {
    for (const factor of [1, 1.5, 2, 3, 4, 5, 6, 8]) {
      const share = factor * 10 ** power;
      if (share < least * 0.999 || share > most * 1.001) continue;
      ticks.push({share, rank: [1, 5, 2, 3, 1.5, 4, 8, 6].indexOf(factor), text: shareText(share)});
    }
  }
  ticks.sort((a, b) => a.rank - b.rank || b.share - a.share);
  return {at, ticks: apart(ticks, tick => at(tick.share), tick => wideOf(tick.text), 14)};
}

/** Losses on a linear scale, with 0 and round numbers. */
function evenLosses(values, bottom, top) {
  const [low, high] = [Math.min(0, ...values), Math.max(0, ...values)], span = (high - low || 1) * 1.06;
  const floor = low < 0 ? low - 0.03 * span : 0;
  return {at: linear(floor, floor + span, bottom, top), ticks: roundTicks(floor, floor + span, 7), log: false};
}

/**
 * Losses: logarithmic beyond `turn` on both sides, linear from there to 0, so that 0 and gains have a place.
 *
 * @param decades how many powers of ten below the largest may have a place of their own.
 */
function bentLosses(values, bottom, top, decades) {
  const sizes = values.map(Math.abs).filter(value => value > 0), most = sizes.length ? Math.max(...sizes) : 1;
  let turn = 10 ** Math.floor(Math.log10(sizes.length ? Math.min(...sizes) : 0.1));
  turn = Math.max(turn, decades < 6 ? 10 ** (Math.floor(Math.log10(most)) - decades) : most / 1e6);
  const LINEAR = 0.3;
  const bent = value => Math.sign(value) * (Math.abs(value) >= turn ? LINEAR + Math.log10(Math.abs(value) / turn) :
    LINEAR * Math.abs(value) / turn);
  const above = Math.max(0, ...values), below = Math.min(0, ...values);
  const low = bent(below * 1.15), high = bent((above || turn) * 1.15);
  const at = value => bottom - (bent(value) - low) / (high - low) * (bottom - top);
  const ticks = [0], fine = Math.log10(most / turn) < 2.2 ? [1, 2, 5] : [1];
  for (const [side, end] of [[1, above], [-1, -below]]) {
    for (let value = turn; value <= end * 1.15; value *= 10) {
      for (const factor of fine) if (factor * value <= end * 1.15) ticks.push(side * factor * value);
    }
  }
  return {at, ticks: apart(ticks, at, () => 17, 0), log: true};
}

/** A linear scale where it shows the losses, a bent one where most would lie on the line of 0. */
function upScale(losses, values, bottom, top, log) {
  if (log === 'always') return bentLosses(values, bottom, top, 6);
  const sizes = losses.map(Math.abs).filter(value => value > 0).sort((a, b) => a - b);
  const middle = sizes[Math.floor((sizes.length - 1) / 2)] ?? 1;
  return sizes.length && sizes.at(-1) > 8 * middle ? bentLosses(values, bottom, top, 3) : evenLosses(values, bottom, top);
}

function lossText(value) {
  if (value === 0) return '0';
  const size = Math.abs(value), text = size >= 1e-4 ? String(+size.toPrecision(3)) : size.toExponential(0);
  return value < 0 ? `−${text}` : text;
}

const meet = (a, b) => Math.max(0, Math.min(a[2], b[2]) - Math.max(a[0], b[0])) *
  Math.max(0, Math.min(a[3], b[3]) - Math.max(a[1], b[1]));

/** Where a text beside a point covers no other text and no point; null: nowhere. Lines are covered where they must. */
function placed(text, x, y, frame, solid, thin, strong) {
  const wide = wideOf(text, strong), high = 14;
  let best = null;
  for (const far of [10, 18, 30, 44]) {
    for (const [dx, dy] of [[1, -0.8], [-1, -0.8], [0, -1.1], [1, 0.9], [0, 1.2], [-1, 0.9], [1, 0], [-1, 0]]) {
      const left = x + dx * far + (dx > 0 ? 0 : dx < 0 ? -wide : -wide / 2);
      const middle = y + dy * far + (dy < 0 ? -high / 4 : dy > 0 ? high / 4 : 0);
      const box = [left, middle - high / 2, left + wide, middle + high / 2];
      if (box[0] < frame[0] || box[2] > frame[2] || box[1] < frame[1] || box[3] > frame[3]) continue;
      if (solid.some(other => meet(box, other) > 0)) continue;
      const cost = far + thin.reduce((sum, other) => sum + (meet(box, other) > 0 ? 12 : 0), 0);
      if (best === null || cost < best.cost) best = {cost, box, far, left, base: middle + 4.5, text, strong};
    }
  }
  return best;
}

/**
 * Draws the points into an svg, and returns where each is.
 *
 * A point has `number`, `name`, `plan`, `kind` (class of its colour), `shape`, `share` (of the uncompressed bytes),
 * `loss`, `low`, `high` (null without an interval), `best` (it is on the front of all plans: Python says so) and
 * `described` (all of it in words).
 *
 * @param svg an element that is as wide as the page lets it be; what is in it is replaced.
 * @param data `points`: all that a filter may leave; `full`, `full_text`: bytes of the uncompressed cache; `whole`:
 *   whether that one is on the front too; `axis`, `axis_short`: what the loss is; `log`:
 *   'always', or undefined for logarithmic axes only where a linear one would not show the points; `limit`,
 *   `limit_text`, `loss_limit`: bounds to draw, null without; `plan`: the plan that is ringed, null for none.
 * @param points those that are shown.
 * @param picked the point of the memory, or undefined.
 * @param memory bytes that the reader has, or null.
 */
function drawChart(svg, data, points, picked, memory) {
  const width = Math.max(260, Math.round(svg.parentElement.clientWidth));
  const height = Math.round(Math.min(600, Math.max(420, 0.5 * width)));
  const wideScreen = width >= 640;
  const make = emptied(svg, width, height);
  // Its points are where a keyboard stops, one at a time; the picture as a whole is no stop.
  svg.setAttribute('tabindex', -1);
  svg.setAttribute('aria-label', `bytes against loss in ${data.name}; arrow keys go from plan to plan`);
  const share = bytes => bytes / data.full, limit = data.limit ?? null, lossLimit = data.loss_limit ?? null;
  // The scales are those of all points, so that a filter does not move the others.
  const shares = data.points.map(point => point.share);
  const values = data.points.flatMap(point => [point.loss, point.high ?? point.loss, point.low ?? point.loss]);
  if (limit !== null) shares.push(share(limit));
  if (lossLimit !== null) values.push(lossLimit);
  const [top, bottom] = [limit === null ? 26 : 44, height - 46];
  const up = upScale(data.points.map(point => point.loss), values, bottom, top, data.log);
  const left = 26 + Math.max(...up.ticks.map(value => wideOf(lossText(value)))) + 8, right = width - 16;
  const least = Math.min(...shares), most = Math.max(1, ...shares) * 1.08, bent = data.log === 'always' || least < 0.12;
  const across = bent ? acrossScale(least * 0.85, most, left + 6, right - 6) : evenScale(most, left + 6, right - 6);
  const frame = [left + 2, 2, width - 2, bottom - 1];

  for (const value of up.ticks) {
    const y = up.at(value);
    make('line', {class: value === 0 ? 'zero' : 'grid', x1: left, x2: right, y1: y, y2: y});
    make('text', {class: 'tick', x: left - 8, y: y + 4.5, 'text-anchor': 'end'}, svg, lossText(value));
  }
  for (const tick of across.ticks) {
    const x = across.at(tick.share);
    make('line', {class: 'grid', x1: x, x2: x, y1: bottom, y2: bottom + 5});
    make('text', {class: 'tick', x, y: bottom + 19, 'text-anchor': 'middle'}, svg, tick.text);
  }
  make('text', {class: 'axis', x: (left + right) / 2, y: height - 6, 'text-anchor': 'middle'}, svg,
    wideScreen ? `bytes held, share of the uncompressed ${data.full_text}${bent ? ' (logarithmic)' : ''}` :
      `bytes, share of ${data.full_text}${bent ? ' (log)' : ''}`);
  make('text', {class: 'axis', 'text-anchor': 'middle', transform: `translate(14 ${(top + bottom) / 2}) rotate(-90)`},
    svg, wideScreen ? data.axis + (up.log ? ' (logarithmic, linear near 0)' : '') : data.axis_short + (up.log ? ' (log)' : ''));

  const solid = [], thin = [];
  const upright = (bytes, kind, text, row) => {
    const asked = across.at(share(bytes)), x = Math.min(right, Math.max(left, asked));
    if (asked < left) text = `← ${text}`;
    else if (asked > right) text = `${text} →`;
    else make('line', {class: kind, x1: x, x2: x, y1: row + 4, y2: bottom});
    const wide = wideOf(text, true), begin = x + 5 + wide > right + 10 ? x - 5 - wide : x + 5;
    make('text', {class: `name strong ${kind}-text`, x: begin, y: row + 12}, svg, text);
    solid.push([begin, row, begin + wide, row + 16]);
    thin.push([x - 1.5, row, x + 1.5, bottom]);
  };
  if (limit !== null) upright(limit, 'limit', `limit ${data.limit_text}`, 2);
  if (memory !== null) upright(memory, 'memory', 'my memory', limit === null ? 2 : 20);
  if (lossLimit !== null) {
    const y = up.at(lossLimit), text = `limit ${lossText(lossLimit)}`;
    make('line', {class: 'limit', x1: left, x2: right, y1: y, y2: y});
    make('text', {class: 'name strong', x: left + 4, y: y - 5}, svg, text);
    solid.push([left + 4, y - 18, left + 4 + wideOf(text, true), y - 3]);
    thin.push([left, y - 1.5, right, y + 1.5]);
  }

  const end = {share: 1, loss: 0, best: data.whole};
  const front = [...points, end].filter(point => point.best).sort((a, b) => a.share - b.share || a.loss - b.loss);
  if (front.length) {
    let path = `M${across.at(front[0].share)},${up.at(front[0].loss)}`;
    front.forEach((point, index) => {
      const y = up.at(point.loss), from = across.at(point.share);
      const to = index + 1 < front.length ? across.at(front[index + 1].share) : Math.max(from, across.at(1));
      path += `H${to}` + (index + 1 < front.length ? `V${up.at(front[index + 1].loss)}` : '');
      thin.push([from, y - 1.5, to, y + 1.5]);
      if (index + 1 < front.length) thin.push([to - 1.5, y, to + 1.5, up.at(front[index + 1].loss)]);
    });
    make('path', {class: 'step', d: path});
  }

  const whole = {x: across.at(1), y: up.at(0)};
  make('path', {class: 'full-mark', d: `M${whole.x - 5},${whole.y - 5}l10,10m0,-10l-10,10`});
  solid.push([whole.x - 7, whole.y - 7, whole.x + 7, whole.y + 7]);

  const places = points.map(point => ({point, x: across.at(point.share), y: up.at(point.loss)}));
  const isBest = new Set(front);
  // Those of the front last, so that they lie above the others.
  for (const place of [...places].sort((a, b) => isBest.has(a.point) - isBest.has(b.point))) {
    const {point, x, y} = place, best = isBest.has(point), radius = best ? 6 : 4.5;
    const group = make('g', {class: `point ${point.kind}${best ? ' best' : ''}`, role: 'img', tabindex: -1,
      'data-n': point.number, 'aria-label': point.described});
    if (point.low !== null && point.high !== null) {
      const [y1, y2] = [up.at(point.high), up.at(point.low)];
      make('path', {class: 'bar', d: `M${x},${y1}V${y2}M${x - 3.5},${y1}h7M${x - 3.5},${y2}h7`}, group);
      if (best) thin.push([x - 2, y1, x + 2, y2]);
    }
    make('path', {class: 'shape', d: (SHAPES[point.shape] ?? SQUARE)(x, y, radius)}, group);
    make('circle', {class: 'halo', cx: x, cy: y, r: radius + 5}, group);
    if (point.number === data.plan) make('circle', {class: 'ring plan', cx: x, cy: y, r: radius + 8.5}, group);
    if (point === picked) make('circle', {class: 'ring', cx: x, cy: y, r: radius + 5}, group);
    solid.push([x - radius - 1, y - radius - 1, x + radius + 1, y + radius + 1]);
    place.group = group;
  }

  const label = (x, y, texts, strong) => {
    for (const text of texts) {
      const spot = placed(text, x, y, frame, solid, thin, strong);
      if (spot === null) continue;
      if (spot.far > 18) {
        const edge = [Math.min(spot.box[2], Math.max(spot.box[0], x)), Math.min(spot.box[3], Math.max(spot.box[1], y))];
        make('line', {class: 'leader', x1: x, y1: y, x2: edge[0], y2: edge[1]});
      }
      make('text', {class: `name${strong ? ' strong' : ''}`, x: spot.left, y: spot.base}, svg, text);
      solid.push(spot.box);
      return;
    }
  };
  const first = place => (place.point === picked ? 2 : 0) + (place.point.number === data.plan ? 1 : 0);
  const named = places.filter(place => isBest.has(place.point) || first(place)).sort((a, b) => first(b) - first(a));
  for (const place of named.filter(first)) {
    const {number, name} = place.point, tail = number === data.plan ? ' (the plan)' : '';
    label(place.x, place.y, [`${number} ${name}${tail}`, `${number}${tail}`, `${number}`], true);
  }
  label(whole.x, whole.y, ['full'], false);
  // Numbers before names: a name must not take the space of another's number.
  const others = named.filter(place => !first(place));
  const roomy = wideScreen && others.length <= width / 55;
  for (const {x, y, point} of others) label(x, y, roomy ? [`${point.number} ${point.name}`, `${point.number}`] : [`${point.number}`], false);
  return places;
}

/** Empties a picture, and returns what makes an element in it. */
function emptied(svg, width, height) {
  svg.replaceChildren();
  svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
  svg.setAttribute('width', width);
  svg.setAttribute('height', height);
  return (kind, attributes, parent = svg, text) => {
    const made = document.createElementNS(svg.namespaceURI, kind);
    for (const [name, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(name, value);
    if (kind === 'text' && !attributes['text-anchor']) made.setAttribute('text-anchor', 'start');
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  };
}

/** Heights from top to bottom, moved as little as it takes to be readable and inside of the picture. */
function spread(heights, top, bottom) {
  const least = Math.min(13, (bottom - top) / Math.max(1, heights.length - 1)), found = [];
  for (const height of heights) found.push(found.length ? Math.max(height, found.at(-1) + least) : height);
  for (let index = found.length - 1, over = bottom; index >= 0; index--) over = (found[index] = Math.min(found[index], over)) - least;
  return found;
}

/**
 * Draws a small chart; `charts.py` says what one is.
 *
 * @param kindOf the class of a plan's colour, by its number.
 * @param labelOf its words.
 */
function drawSmall(svg, chart, kindOf, labelOf) {
  const isBars = chart.kind === 'bars', width = Math.max(240, Math.round(svg.parentElement.clientWidth));
  const height = isBars ? 46 + 22 * chart.marks.length : Math.round(Math.min(330, Math.max(240, 0.69 * width)));
  const make = emptied(svg, width, height), [top, bottom] = isBars ? [6, height - 40] : [14, height - 46];
  const text = (x, y, words, kind, anchor, of) =>
    make('text', {class: kind, x, y, 'text-anchor': anchor, 'data-n': of}, svg, words);
  const group = (number, words, records) => {
    const made = make('g', {class: `mark ${kindOf(number)}`, 'data-n': number, 'data-r': records || undefined});
    make('title', {}, made, `${number} ${labelOf(number)}\n${words}`);
    return made;
  };
  const ends = chart.marks.flatMap(([, first, second, third, goal]) => isBars ? [first, second, third, goal] : [second]);
  const known = ends.filter(each => each !== null);
  const values = roundTicks(Math.min(...known, ...chart.zero ? [0] : []), Math.max(...known, ...chart.zero ? [0] : []), isBars ? 4 : 5, true);
  const plain = value => String(+value.toPrecision(6)).replace('-', '−');

  if (isBars) {
    const left = 30, right = width - 12 - Math.max(...chart.marks.map(mark => wideOf(mark[5])));
    const at = linear(values[0], values.at(-1), left, right);
    for (const value of values) {
      make('line', {class: value === 0 ? 'zero' : 'grid', x1: at(value), x2: at(value), y1: top, y2: bottom});
      text(at(value), bottom + 16, plain(value), 'tick', 'middle');
    }
    text((left + right) / 2, height - 5, chart.x, 'axis', 'middle');
    chart.marks.forEach(([number, value, low, high, goal, shown, words, records], index) => {
      const y = top + 22 * index, from = Math.min(at(0), at(value)), made = group(number, words, records);
      make('rect', {x: from, y: y + 3, width: Math.max(1, Math.abs(at(value) - at(0))), height: 16}, made);
      if (low !== null && high !== null) make('path', {class: 'whisker', d: `M${at(low)} ${y + 7}v8m0,-4H${at(high)}m0,-4v8`}, made);
      if (goal !== null) make('path', {class: 'goal', d: `M${at(goal)} ${y + 1}v20`}, made);
      text(left - 8, y + 15.5, number, 'tick', 'end', number);
      text(Math.max(at(0), at(value), at(high ?? value)) + 6, y + 15.5, shown, 'name', 'start', number);
    });
    if (chart.mark !== null) make('line', {class: 'front', x1: at(chart.mark), x2: at(chart.mark), y1: top, y2: bottom});
    return;
  }

  const left = 34 + Math.max(...values.map(value => wideOf(plain(value)))), right = width - 26;
  const across = chart.marks.map(mark => mark[1]), least = chart.whole ? Math.min(...across) : 0, most = Math.max(...across, least + 1e-9);
  const columns = chart.whole ? roundTicks(least, most, 8).filter(Number.isInteger) : roundTicks(0, most, 5, true);
  const x = linear(chart.whole ? least : columns[0], chart.whole ? most : columns.at(-1), left, right);
  const y = linear(values[0], values.at(-1), bottom, top);
  for (const value of values) {
    make('line', {class: value === 0 ? 'zero' : 'grid', x1: left, x2: right, y1: y(value), y2: y(value)});
    text(left - 8, y(value) + 4.5, plain(value), 'tick', 'end');
  }
  for (const value of columns) text(x(value), bottom + 18, plain(value), 'tick', 'middle');
  text((left + right) / 2, height - 6, chart.x, 'axis', 'middle');
  make('text', {class: 'axis', 'text-anchor': 'middle', transform: `translate(14 ${(top + bottom) / 2}) rotate(-90)`}, svg, chart.y);

  const made = new Map();
  for (const [number, a, b, words, records] of chart.marks) {
    const known = made.get(number) ?? {group: group(number, words, records), points: []};
    if (made.has(number)) known.group.querySelector('title').textContent += `\n${words}`;
    made.set(number, known);
    known.points.push([a, b]);
    make('circle', {cx: x(a), cy: y(b), r: 4}, known.group);
  }
  const last = new Map();
  for (const [number, {group, points}] of made) {
    make('polyline', {points: points.map(([a, b]) => `${x(a)},${y(b)}`).join(' ')}, group);
    const [a, b] = points.at(-1), near = [...last.keys()].find(each => Math.abs(each - x(a)) < 24) ?? x(a);
    last.set(near, [...last.get(near) ?? [], [y(b), x(a), number]]);
  }
  for (const ends of last.values()) {
    ends.sort(([one], [two]) => one - two);
    const heights = spread(ends.map(([height]) => height), top, bottom - 2);
    ends.forEach(([, at, number], index) => text(at + 7, heights[index] + 4.5, number, 'name', 'start', number));
  }
}
