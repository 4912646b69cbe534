"use strict";
(async function () {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)"), narrow = () => innerWidth < 620;
  const charts = new Map();
  let figures = {}, details = {}, selected = null;

  // Data and library are compressed in the page: a third of the size.
  async function inflate(id) {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  // Figures name colours by the custom properties of the style sheet, so that they follow the theme.
  function coloured(value, style) {
    if (typeof value === "string") return value.startsWith("--") ? style.getPropertyValue(value).trim() : value;
    if (Array.isArray(value)) return value.map((v) => coloured(v, style));
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, coloured(v, style)]));
    return value;
  }

  function figure(name) {
    const style = getComputedStyle(root), f = coloured(figures[name], style);
    const colour = (n) => style.getPropertyValue(n).trim();
    const layout = f.layout;
    for (const key of Object.keys(layout).filter((k) => /^[xy]axis\d*$/.test(k))) {
      layout[key] = { gridcolor: colour("--line"), zeroline: false, linecolor: colour("--line"), automargin: true, ...layout[key] };
      if (layout[key].title) layout[key].title.standoff = 8; // without it a title is at the edge of the frame, or over long tick labels
    }
    const base = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("--fg"), size: 12, family: "system-ui, DejaVu Sans, sans-serif" },
      margin: { l: 50, r: 16, t: 16, b: 56 }, dragmode: false, hovermode: "closest", hoverlabel: { bgcolor: colour("--fg"), font: { color: colour("--bg") }, align: "left" },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    };
    return { data: f.data, layout: { ...base, ...layout, margin: { ...base.margin, ...layout.margin } } };
  }

  async function draw(name) {
    const element = charts.get(name).element, f = figure(name);
    await Plotly.react(element, f.data, f.layout, { responsive: true, displaylogo: false, displayModeBar: false });
    if (selected !== null) mark(name);
  }

  // Points of a chart in the order of the arrow keys: from left to right, or from top to bottom where the y axis is reversed.
  function points(element) {
    const list = [], down = element.layout.yaxis && element.layout.yaxis.range && element.layout.yaxis.range[0] > element.layout.yaxis.range[1];
    element.data.forEach((trace, curve) => {
      if (trace.hoverinfo === "skip" || trace.visible === "legendonly") return;
      const n = (trace.customdata || trace.x || trace.values || []).length;
      for (let k = 0; k < n; k++) list.push({ curve: curve, point: k, key: trace.customdata && trace.customdata[k], at: down ? trace.y[k] : trace.x[k] });
    });
    return down || list.every((p) => typeof p.at === "number") ? list.sort((a, b) => a.at - b.at) : list;
  }

  function words(element, p) {
    const trace = element.data[p.curve], text = trace.hovertext || trace.text;
    const html = String(Array.isArray(text) ? text[p.point] : text || "").replace(/<br>/g, ", ");
    return new DOMParser().parseFromString(html, "text/html").body.textContent;
  }

  function go(name, step) {
    const chart = charts.get(name), list = points(chart.element);
    if (!list.length) return;
    chart.position = Math.min(Math.max((chart.position ?? (step > 0 ? -1 : list.length)) + step, 0), list.length - 1);
    const p = list[chart.position];
    chart.element.dataset.point = words(chart.element, p);
    document.getElementById("spoken").textContent = chart.element.dataset.point;
    try { Plotly.Fx.hover(chart.element, [{ curveNumber: p.curve, pointNumber: p.point }]); } catch (e) { /* a point outside the visible range has no label */ }
    chart.key = p.key;
  }

  function mark(name) {
    const element = charts.get(name).element, colour = getComputedStyle(root).getPropertyValue("--fg").trim();
    element.data.forEach((trace, curve) => {
      if (!trace.customdata || trace.meta === "unmarked") return;
      const at = trace.customdata.flatMap((key, k) => (key === selected ? [k] : []));
      if (charts.get(name).marked || at.length) Plotly.restyle(element, { selectedpoints: [at.length ? at : null], "selected.marker.color": colour, "unselected.marker.opacity": 0.8 }, [curve]);
    });
    charts.get(name).marked = true;
  }

  function select(key, focus) {
    if (key === undefined || key === null || !(key in details)) return;
    selected = key;
    document.querySelectorAll("tr[data-key]").forEach((row) => {
      const chosen = row.dataset.key === key;
      row.setAttribute("aria-selected", chosen);
      row.tabIndex = chosen ? 0 : -1;
      if (chosen && focus) row.focus();
    });
    const box = document.getElementById("detail");
    if (box) { box.innerHTML = details[key]; box.scrollTop = 0; }
    charts.forEach((_, name) => mark(name));
  }

  function theme(name) {
    root.dataset.theme = name;
    charts.forEach((_, n) => draw(n));
  }
  root.dataset.theme = dark.matches ? "dark" : "light";
  dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => theme(root.dataset.theme === "dark" ? "light" : "dark"));

  const rows = Array.from(document.querySelectorAll("tr[data-key]"));
  rows.forEach((row, k) => {
    row.tabIndex = k ? -1 : 0;
    row.addEventListener("click", () => select(row.dataset.key));
    row.addEventListener("keydown", (e) => {
      const visible = rows.filter((r) => r.style.display !== "none"), at = visible.indexOf(row);
      const next = { ArrowDown: visible[at + 1], ArrowUp: visible[at - 1], Home: visible[0], End: visible[visible.length - 1] }[e.key];
      if (next) { e.preventDefault(); select(next.dataset.key, true); }
      if (e.key === "Enter" || e.key === " ") { e.preventDefault(); select(row.dataset.key); }
    });
  });

  const filter = document.getElementById("filter");
  if (filter) filter.addEventListener("input", () => {
    const wanted = filter.value.toLowerCase();
    document.querySelectorAll("#" + filter.dataset.table + " tbody tr").forEach((row) => { row.style.display = row.textContent.toLowerCase().includes(wanted) ? "" : "none"; });
  });
  document.addEventListener("keydown", (e) => {
    if (/INPUT|TEXTAREA/.test(e.target.tagName) || e.ctrlKey || e.metaKey || e.altKey) return;
    if (e.key === "t") document.getElementById("theme").click();
    if (e.key === "/" && filter) { e.preventDefault(); filter.focus(); }
  });

  ({ figures, details } = JSON.parse(await inflate("data")));
  if (Object.keys(figures).length) {
    const library = document.createElement("script");
    library.textContent = await inflate("library");
    document.head.append(library);
  }
  for (const name of Object.keys(figures)) {
    const element = document.getElementById(name);
    charts.set(name, { element: element });
    element.tabIndex = 0;
    await draw(name);
    element.on("plotly_click", (e) => select((e.points.find((p) => p.customdata !== undefined) || {}).customdata));
    element.addEventListener("keydown", (e) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -1e9, End: 1e9 }[e.key];
      if (step) { e.preventDefault(); go(name, step); }
      if (e.key === "Enter") select(charts.get(name).key);
      if (e.key === "Escape") Plotly.Fx.unhover(element);
    });
  }
  if (rows.length && Object.keys(details).length) select((document.querySelector("tr.start[data-key]") || rows[0]).dataset.key);
  root.dataset.ready = "yes";
})();
