// Values under the pointer, and zoom: drag over a chart, and all charts show those steps. Without scripts the page loses only this.
const plots = [...document.querySelectorAll(".plot")].map((plot) => {
  const chart = JSON.parse(plot.dataset.chart);
  const find = (name) => plot.querySelector(name);
  return { plot, chart, range: chart.x, canvas: find(".canvas"), cursor: find(".cursor"), tip: find(".tip"), brush: find(".brush"),
    main: find(".canvas svg"), grid: find(".grid"), strips: plot.querySelectorAll(".strip svg"), xAxis: find(".x-axis"), yAxis: find(".y-axis"),
    whole: { x: find(".x-axis").innerHTML, y: find(".y-axis").innerHTML, grid: find(".grid").getAttribute("d") } };
});
const reset = Object.assign(document.createElement("button"), { className: "reset", type: "button", hidden: true });
document.body.append(reset);

// Where step x is in [0, 1] of a range of steps, and the step at such a place.
const place = (chart, range, x) => chart.log ? Math.log(x / range[0]) / Math.log(range[1] / range[0]) : (x - range[0]) / (range[1] - range[0]);
const stepAt = (chart, range, at) => chart.log ? range[0] * (range[1] / range[0]) ** at : range[0] + at * (range[1] - range[0]);
const niceStep = (span) => {
  const rough = span / 6, power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
};
const multiples = (low, high, step) => {
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= high / step + 1e-9; i++) found.push(i * step);
  return found;
};
const label = (value, step) => {
  const size = Math.max(Math.abs(value), step);
  for (const [unit, name] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return Number((value / unit).toPrecision(6)) + name;
  }
  return step < 1e-4 ? value.toExponential(1) : value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
};
const ticks = (axis, side, places) => {
  axis.replaceChildren(...places.map(([at, text]) => {
    const span = Object.assign(document.createElement("span"), { textContent: text });
    span.style[side] = (100 * at).toFixed(2) + "%";
    return span;
  }));
};

const draw = (p) => {
  const { chart, range, main, whole } = p;
  const all = range === chart.x;
  main.style.overflow = all ? "" : "hidden";
  if (all) {
    for (const svg of [main, ...p.strips]) svg.setAttribute("viewBox", svg === main ? "0 0 1000 1000" : "0 0 1000 100");
    p.xAxis.innerHTML = whole.x;
    p.yAxis.innerHTML = whole.y;
    p.grid.setAttribute("d", whole.grid);
    return;
  }
  const left = 1000 * place(chart, chart.x, range[0]), width = 1000 * place(chart, chart.x, range[1]) - left;
  const inside = chart.stacked ? [] : chart.lines.flatMap((line) => line.y.filter((y, i) => y !== null && line.x[i] >= range[0] && line.x[i] <= range[1]));
  let [low, high] = chart.y;
  if (inside.length) {
    low = Math.min(...inside);
    high = Math.max(...inside);
    const room = 0.06 * (high - low) || 0.03 * (chart.y[1] - chart.y[0]);
    low -= room;
    high += room;
  }
  const down = (y) => 1000 * (chart.y[1] - y) / (chart.y[1] - chart.y[0]);
  main.setAttribute("viewBox", `${left} ${down(high)} ${width} ${down(low) - down(high)}`);
  for (const strip of p.strips) strip.setAttribute("viewBox", `${left} 0 ${width} 100`);
  const yStep = niceStep(high - low), ys = multiples(low, high, yStep);
  ticks(p.yAxis, "top", ys.map((y) => [(high - y) / (high - low), label(y, yStep)]));
  p.grid.setAttribute("d", ys.map((y) => `M0 ${down(y)}h1000`).join(""));
  const xStep = Math.max(1, niceStep(range[1] - range[0]));
  ticks(p.xAxis, "left", multiples(range[0], range[1], xStep).map((x) => [place(chart, range, x), label(x, xStep)]));
};
// All charts show the same steps; one that has none of them shows all of its own.
const zoom = (low, high) => {
  for (const p of plots) {
    const range = [Math.max(low, p.chart.x[0]), Math.min(high, p.chart.x[1])];
    p.range = range[1] > range[0] ? range : p.chart.x;
    draw(p);
  }
  reset.textContent = `steps ${Math.round(low)}–${Math.round(high)} · show all`;
  reset.hidden = false;
};
const showAll = () => {
  for (const p of plots) {
    p.range = p.chart.x;
    draw(p);
  }
  reset.hidden = true;
};
reset.addEventListener("click", showAll);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") showAll(); });

for (const p of plots) {
  const { chart, canvas, cursor, tip, brush } = p;
  let from = null;
  const nearest = (xs, at) => {
    let low = 0, high = xs.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (place(chart, p.range, xs[middle]) < at) low = middle + 1; else high = middle;
    }
    return low > 0 && at - place(chart, p.range, xs[low - 1]) < place(chart, p.range, xs[low]) - at ? low - 1 : low;
  };
  const fraction = (event) => {
    const box = canvas.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  };
  const show = (event) => {
    const width = canvas.getBoundingClientRect().width, at = fraction(event);
    if (from !== null) {
      brush.hidden = Math.abs(at - from) * width < 8;
      brush.style.left = 100 * Math.min(at, from) + "%";
      brush.style.width = 100 * Math.abs(at - from) + "%";
    }
    const first = chart.lines[0], step = first.x[nearest(first.x, at)];
    const there = place(chart, p.range, step);
    const rows = chart.lines.flatMap((line) => {
      const i = nearest(line.x, there);
      if (Math.abs(place(chart, p.range, line.x[i]) - there) > 0.04) return [];
      const row = document.createElement("div"), key = document.createElement("i");
      key.className = "key " + line.role;
      const text = line.y[i] === null ? "not finite" : String(line.y[i]);
      row.append(key, line.name + " ", Object.assign(document.createElement("b"), { textContent: text }));
      if (line.x[i] !== step) row.append(" at step " + line.x[i]);
      return row;
    });
    tip.replaceChildren(Object.assign(document.createElement("div"), { textContent: "step " + step }), ...rows);
    tip.hidden = cursor.hidden = there < 0 || there > 1;
    cursor.style.left = there * width + "px";
    tip.style.left = Math.max(0, there > 0.5 ? there * width - tip.offsetWidth - 12 : there * width + 12) + "px";
  };
  const stop = () => {
    from = null;
    brush.hidden = true;
  };
  canvas.addEventListener("pointermove", show);
  canvas.addEventListener("pointerdown", (event) => {
    from = event.button === 0 ? fraction(event) : null;
    show(event);
  });
  canvas.addEventListener("pointerup", (event) => {
    const to = fraction(event), start = from;
    const dragged = start !== null && Math.abs(to - start) * canvas.getBoundingClientRect().width >= 8;
    stop();
    if (dragged) zoom(stepAt(chart, p.range, Math.min(to, start)), stepAt(chart, p.range, Math.max(to, start)));
  });
  canvas.addEventListener("pointercancel", stop);
  canvas.addEventListener("pointerleave", () => {
    stop();
    tip.hidden = cursor.hidden = true;
  });
  canvas.addEventListener("dblclick", showAll);
}
