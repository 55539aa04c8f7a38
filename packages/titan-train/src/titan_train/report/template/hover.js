// Values under the pointer. Without scripts the page loses only this.
for (const plot of document.querySelectorAll(".plot")) {
  const chart = JSON.parse(plot.dataset.chart);
  const canvas = plot.querySelector(".canvas"), cursor = plot.querySelector(".cursor"), tip = plot.querySelector(".tip");
  const place = (x) => chart.log
    ? Math.log(x / chart.x[0]) / Math.log(chart.x[1] / chart.x[0])
    : (x - chart.x[0]) / (chart.x[1] - chart.x[0]);
  const nearest = (xs, at) => {
    let low = 0, high = xs.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (place(xs[middle]) < at) low = middle + 1; else high = middle;
    }
    return low > 0 && at - place(xs[low - 1]) < place(xs[low]) - at ? low - 1 : low;
  };
  const show = (event) => {
    const box = canvas.getBoundingClientRect();
    const at = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const first = chart.lines[0], step = first.x[nearest(first.x, at)];
    const rows = chart.lines.flatMap((line) => {
      const i = nearest(line.x, place(step));
      if (Math.abs(place(line.x[i]) - place(step)) > 0.04) return [];
      const row = document.createElement("div"), key = document.createElement("i");
      key.className = "key " + line.role;
      const text = line.y[i] === null ? "not finite" : String(line.y[i]);
      row.append(key, line.name + " ", Object.assign(document.createElement("b"), { textContent: text }));
      if (line.x[i] !== step) row.append(" at step " + line.x[i]);
      return row;
    });
    tip.replaceChildren(Object.assign(document.createElement("div"), { textContent: "step " + step }), ...rows);
    tip.hidden = cursor.hidden = false;
    const left = place(step) * box.width;
    cursor.style.left = left + "px";
    tip.style.left = Math.max(0, left > box.width / 2 ? left - tip.offsetWidth - 12 : left + 12) + "px";
  };
  canvas.addEventListener("pointermove", show);
  canvas.addEventListener("pointerdown", show);
  canvas.addEventListener("pointerleave", () => { tip.hidden = cursor.hidden = true; });
}
