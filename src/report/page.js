// Shows what the pointer is over: marks carry their text, heat maps have it in a list beside them.
(() => {
  const tip = document.createElement('div');
  tip.id = 'tip';
  tip.hidden = true;
  document.body.append(tip);
  const maps = {};
  const cell = (target, event) => {
    const id = target.dataset.map;
    const map = (maps[id] ??= JSON.parse(document.getElementById(id).textContent));
    const box = target.getBoundingClientRect();
    const at = (share, n) => Math.min(n - 1, Math.max(0, Math.floor(share * n)));
    const column = at((event.clientX - box.left) / box.width, map.columns.length);
    const row = at((event.clientY - box.top) / box.height, map.rows.length);
    const i = row * map.columns.length + column;
    const lines = [`${map.y} ${map.rows[row]}, ${map.x} ${map.columns[column]}`, `${map.value}: ${map.cells[i] || '-'}`];
    if (map.details[i]) lines.push(map.details[i]);
    return lines.join('\n');
  };
  const show = (event) => {
    const data = event.target.dataset ?? {};
    const text = data.tip ?? (data.map && cell(event.target, event));
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const width = document.documentElement.clientWidth;
    const x = Math.max(8, Math.min(event.clientX + 14, width - tip.offsetWidth - 8));
    const above = event.clientY + 18 + tip.offsetHeight > window.innerHeight;
    const y = above ? event.clientY - 12 - tip.offsetHeight : event.clientY + 18;
    tip.style.left = `${x + window.scrollX}px`;
    tip.style.top = `${y + window.scrollY}px`;
  };
  document.addEventListener('pointermove', show);
  document.addEventListener('pointerdown', show);
})();
