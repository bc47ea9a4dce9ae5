// The leaderboard: which budget, which task, and which plans are shown.
{
  document.documentElement.classList.add('scripted');
  const byId = name => document.getElementById(name);
  const form = byId('tools'), budget = byId('budget'), task = byId('task'), words = byId('words');
  const tables = [...document.querySelectorAll('table.sortable')];
  const labels = [...task.options].map(option => option.value === '' ? null : option.textContent);

  /** Of a table with plans: hides the columns of all other tasks than the chosen one, and its sorting comes first. */
  function columns(table, chosen) {
    [...table.tHead.rows[0].cells].forEach((head, index) => {
      const hidden = chosen !== null && labels.includes(head.textContent) && head.textContent !== chosen;
      for (const row of table.rows) row.cells[index].hidden = hidden;
    });
  }

  function show() {
    const chosen = labels[task.selectedIndex], wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const part of document.querySelectorAll('[data-budget]')) {
      part.hidden = budget.value !== '' && part.dataset.budget !== budget.value;
    }
    const leaders = document.querySelector('table.leaders');
    [...leaders.tHead.rows[0].cells].forEach((head, index) => {
      const hidden = index > 0 && chosen !== null && head.textContent !== chosen;
      for (const row of leaders.rows) row.cells[index].hidden = hidden;
    });
    let left = 0, all = 0;
    for (const table of tables) {
      columns(table, chosen);
      for (const row of table.tBodies[0].rows) {
        if (row.classList.contains('full')) continue;
        const text = `${row.cells[0].textContent} ${row.cells[1].textContent}`.toLowerCase();
        row.hidden = !wanted.every(word => text.includes(word));
        if (table.closest('[data-budget]').hidden) continue;
        all += 1;
        left += !row.hidden;
      }
    }
    byId('left').textContent = left === all ? `${all} plans` : `${left} of ${all} plans`;
  }

  form.addEventListener('submit', event => event.preventDefault());
  form.addEventListener('input', show);
  show();
}
