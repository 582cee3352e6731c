// Streaming plots of a run. The kernel sends rows once, in binary; everything else happens here.
//
// Messages (custom): {kind: "append", run, first, count, columns, state} + one Float32 buffer, column by column, "step" first;
// {kind: "snapshot", run, rows, series: [[column, n], ...], state} + one Float32 buffer, for each series n x-values, then n y-values.
// The trait `snapshot` holds the same with its header in front; it is only filled when a page asks for the state.
// Rows have absolute numbers: what overlaps is dropped, a gap asks the kernel for a snapshot.

const STALE_MS = 8000;
const MAX_POINTS = 16000; // per series; beyond, the extremes of each stretch are kept
const LIVE = new Set(["preparing", "running", "pausing", "paused", "stopping"]);

export function toFloats(buffer) {
  // JupyterLab hands over a DataView, Colab a Uint8Array; offsets may be unaligned, so copy.
  const bytes = new Uint8Array(buffer.buffer ?? buffer, buffer.byteOffset ?? 0, buffer.byteLength);
  const copy = bytes.slice(0, bytes.byteLength - (bytes.byteLength % 4));
  return new Float32Array(copy.buffer);
}

export function thin(series, maxPoints) {
  const size = Math.ceil(series.n / (maxPoints / 2));
  let kept = 0;
  for (let start = 0; start < series.n; start += size) {
    let low = start, high = start;
    for (let i = start; i < Math.min(start + size, series.n); i++) {
      if (series.y[i] < series.y[low]) low = i;
      if (series.y[i] > series.y[high]) high = i;
    }
    const pair = low === high ? [low] : low < high ? [low, high] : [high, low];
    const points = pair.map((i) => [series.x[i], series.y[i]]);
    for (const [x, y] of points) { series.x[kept] = x; series.y[kept] = y; kept++; }
  }
  series.n = kept;
}

export class Store {
  constructor() { this.reset(null); this.seen = 0; }
  reset(run) { this.run = run; this.rows = 0; this.series = new Map(); this.asked = -Infinity; }
  push(column, x, y) {
    if (!Number.isFinite(x) || !Number.isFinite(y)) return;
    let s = this.series.get(column);
    if (!s) this.series.set(column, (s = { x: new Float64Array(256), y: new Float64Array(256), n: 0 }));
    if (s.n >= MAX_POINTS) thin(s, MAX_POINTS / 2);
    if (s.n === s.x.length) {
      for (const key of ["x", "y"]) { const bigger = new Float64Array(s.n * 2); bigger.set(s[key]); s[key] = bigger; }
    }
    s.x[s.n] = x; s.y[s.n] = y; s.n++;
  }
  // Returns true when the page must ask for a snapshot.
  append(header, floats) {
    if (header.run !== this.run) { this.reset(header.run); }
    if (header.first > this.rows) {
      if (performance.now() - this.asked < 3000) return false; // asked already; again only if no answer comes
      this.asked = performance.now();
      return true;
    }
    const skip = this.rows - header.first;
    for (let row = skip; row < header.count; row++) {
      const step = floats[row];
      header.columns.forEach((column, c) => { if (c) this.push(column, step, floats[c * header.count + row]); });
    }
    this.rows = Math.max(this.rows, header.first + header.count);
    return false;
  }
  snapshot(header, floats) {
    this.reset(header.run);
    let at = 0;
    for (const [column, n] of header.series) {
      for (let i = 0; i < n; i++) this.push(column, floats[at + i], floats[at + n + i]);
      at += 2 * n;
    }
    this.rows = header.rows;
  }
  packed(bytes) { // the trait: 4 bytes length of the header, header as JSON padded to 4, floats
    if (!bytes || !bytes.byteLength) return null;
    const view = new DataView(bytes.buffer ?? bytes, bytes.byteOffset ?? 0, bytes.byteLength);
    const length = view.getUint32(0, true);
    const all = new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
    const header = JSON.parse(new TextDecoder().decode(all.slice(4, 4 + length)));
    this.snapshot(header, toFloats(all.slice(4 + length)));
    return header;
  }
}

export function nearest(s, x) {
  let low = 0, high = s.n - 1;
  while (low < high) { const middle = (low + high) >> 1; if (s.x[middle] < x) low = middle + 1; else high = middle; }
  return low > 0 && x - s.x[low - 1] < s.x[low] - x ? low - 1 : low;
}

export function formatValue(value, unit, scales) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (unit === "bytes" || unit === "rate") {
    const scale = (unit === "bytes" ? scales.bytes : scales.rate).find(([, factor]) => size >= factor);
    if (!scale) return `${Number(value.toPrecision(3))}${unit === "bytes" ? " B" : ""}`;
    const scaled = value / scale[1];
    return `${Math.abs(scaled) >= 100 ? Math.round(scaled) : Number(scaled.toPrecision(3))}${unit === "bytes" ? " " : ""}${scale[0]}`;
  }
  if (value !== 0 && (size < 0.01 || size >= 1e5)) return Number(value.toPrecision(2)).toExponential().replace("e+", "e");
  return size >= 1000 ? String(Math.round(value)) : String(Number(value.toPrecision(3)));
}

export function ticks(low, high, unit, scales, count = 4) {
  if (!(high > low)) { const pad = Math.abs(low) * 0.05 || 1; low -= pad; high += pad; }
  let base = 1;
  if (unit === "bytes") base = (scales.bytes.find(([, factor]) => high >= factor) ?? ["B", 1])[1];
  const rough = (high - low) / base / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough) * power * base;
  const found = [];
  for (let i = Math.floor(low / step); i <= Math.ceil(high / step); i++) found.push(i * step);
  return found;
}

class Chart {
  constructor(spec, owner) {
    this.spec = spec; this.owner = owner; this.labelled = 0;
    this.root = document.createElement("figure");
    this.root.className = "wb-chart";
    const head = this.root.appendChild(document.createElement("figcaption"));
    this.title = head.appendChild(document.createElement("span"));
    this.title.className = "wb-chart-title"; this.title.textContent = spec.title;
    this.legend = head.appendChild(document.createElement("span"));
    this.legend.className = "wb-chart-legend";
    this.items = new Map();
    for (const line of [...spec.series, ...(spec.lines ?? []).map((one) => ({ ...one, column: null }))]) this.addItem(line);
    this.canvas = this.root.appendChild(document.createElement("canvas"));
    this.canvas.setAttribute("role", "img");
    this.canvas.addEventListener("pointermove", (event) => owner.hover(this.stepAt(event)));
    this.canvas.addEventListener("pointerleave", () => owner.hover(null));
  }
  addItem(line) {
    const item = this.legend.appendChild(document.createElement("span"));
    const swatch = item.appendChild(document.createElement("i"));
    swatch.className = `wb-swatch wb-swatch-${line.style ?? "line"} wb-colour-${line.colour ?? 0}`;
    item.appendChild(document.createTextNode(` ${line.label} `));
    const value = item.appendChild(document.createElement("b"));
    this.items.set(line.column ?? `line:${line.label}`, { item, value });
  }
  stepAt(event) {
    const box = this.canvas.getBoundingClientRect(), a = this.area;
    if (!a) return null;
    return a.x0 + ((event.clientX - box.left - a.left) / Math.max(a.right - a.left, 1)) * (a.x1 - a.x0);
  }
  draw(colours, step) {
    const ratio = window.devicePixelRatio || 1, width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    if (!width || !height) return;
    if (this.canvas.width !== Math.round(width * ratio)) this.canvas.width = Math.round(width * ratio);
    if (this.canvas.height !== Math.round(height * ratio)) this.canvas.height = Math.round(height * ratio);
    const g = this.canvas.getContext("2d"), { store, scales } = this.owner, unit = this.spec.unit;
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, width, height);
    g.font = `10.5px ${colours.font}`;
    const shown = this.spec.series.map((line) => [line, store.series.get(line.column)]).filter(([, s]) => s && s.n);
    const lines = this.spec.lines.filter((line) => Number.isFinite(line.value));
    let x0 = Infinity, x1 = -Infinity, low = Infinity, high = -Infinity;
    for (const [, s] of shown) {
      x0 = Math.min(x0, s.x[0]); x1 = Math.max(x1, s.x[s.n - 1]);
      for (let i = 0; i < s.n; i++) { if (s.y[i] < low) low = s.y[i]; if (s.y[i] > high) high = s.y[i]; }
    }
    this.label(shown, lines, step);
    if (!shown.length) {
      g.fillStyle = colours.faint; g.textAlign = "center";
      g.fillText(this.owner.emptyText(), width / 2, height / 2);
      this.area = null;
      return;
    }
    for (const line of lines) { low = Math.min(low, line.value); high = Math.max(high, line.value); }
    if (this.spec.zero) low = Math.min(low, 0);
    const marks = ticks(low, high, unit, scales), y0 = marks[0], y1 = marks[marks.length - 1];
    const texts = marks.map((mark) => formatValue(mark, unit, scales));
    const left = Math.max(...texts.map((text) => g.measureText(text).width)) + 10, right = width - 8, top = 8, bottom = height - 18;
    const span = x1 - x0 || 1, px = (x) => left + ((x - x0) / span) * (right - left), py = (y) => bottom - ((y - y0) / (y1 - y0)) * (bottom - top);
    this.area = { x0, x1: x0 + span, left, right };
    g.textBaseline = "middle"; g.textAlign = "right"; g.fillStyle = colours.faint; g.strokeStyle = colours.rule; g.lineWidth = 1;
    marks.forEach((mark, i) => {
      const y = Math.round(py(mark)) + 0.5;
      g.beginPath(); g.moveTo(left, y); g.lineTo(right, y); g.stroke();
      g.fillText(texts[i], left - 5, y);
    });
    g.textBaseline = "alphabetic"; g.textAlign = "left"; g.fillText(`step ${Math.round(x0)}`, left, height - 4);
    g.textAlign = "right"; if (x1 > x0) g.fillText(String(Math.round(x1)), right, height - 4);
    for (const line of lines) {
      g.strokeStyle = colours.text; g.setLineDash([5, 3]); g.beginPath(); g.moveTo(left, py(line.value)); g.lineTo(right, py(line.value)); g.stroke();
      g.setLineDash([]);
    }
    for (const [line, s] of shown) this.stroke(g, line, s, px, py, colours);
    if (step !== null && step >= x0 && step <= x0 + span) {
      g.globalAlpha = 0.6; g.lineWidth = 1; g.strokeStyle = colours.faint;
      g.beginPath(); g.moveTo(px(step), top); g.lineTo(px(step), bottom); g.stroke(); g.globalAlpha = 1;
    }
  }
  stroke(g, line, s, px, py, colours) {
    g.strokeStyle = g.fillStyle = colours.series[line.colour ?? 0];
    if (line.style === "dots" || s.n === 1) {
      for (let i = 0; i < s.n; i++) { g.beginPath(); g.arc(px(s.x[i]), py(s.y[i]), 2.6, 0, 7); g.fill(); }
      return;
    }
    g.globalAlpha = line.style === "faint" ? 0.38 : 1;
    g.lineWidth = line.style === "faint" ? 1 : 1.7;
    g.setLineDash(line.style === "dashed" ? [4, 3] : []);
    g.lineJoin = "round"; g.beginPath();
    // Per pixel column only the way in, the extremes and the way out matter.
    let column = null, low = 0, high = 0, last = 0;
    for (let i = 0; i < s.n; i++) {
      const x = Math.round(px(s.x[i]) * 2) / 2, y = py(s.y[i]);
      if (x !== column) {
        if (column !== null) { g.lineTo(column, low); g.lineTo(column, high); g.lineTo(column, last); }
        g[column === null ? "moveTo" : "lineTo"](x, y);
        column = x; low = high = y;
      }
      low = Math.min(low, y); high = Math.max(high, y); last = y;
    }
    g.lineTo(column, low); g.lineTo(column, high); g.lineTo(column, last);
    g.stroke(); g.setLineDash([]); g.globalAlpha = 1;
  }
  label(shown, lines, step) {
    const words = [], { scales } = this.owner, columns = new Map(shown.map(([line, s]) => [line.column, s]));
    for (const line of this.spec.series) {
      const { item, value } = this.items.get(line.column), s = columns.get(line.column);
      item.style.display = s ? "" : "none";
      if (!s) continue;
      const text = formatValue(s.y[step === null ? s.n - 1 : nearest(s, step)], this.spec.unit, scales);
      if (value.textContent !== text) value.textContent = text;
      words.push(`${line.label} ${text}`);
    }
    for (const line of this.spec.lines) {
      const { item, value } = this.items.get(`line:${line.label}`), known = lines.includes(line);
      item.style.display = known ? "" : "none";
      if (known) { value.textContent = formatValue(line.value, this.spec.unit, scales); words.push(`${line.label} ${value.textContent}`); }
    }
    if (performance.now() - this.labelled > 2000 || !this.labelled) {
      this.labelled = performance.now();
      this.canvas.setAttribute("aria-label", `${this.spec.title}: ${words.join(", ") || "no values yet"}`);
    }
  }
}

class View {
  constructor(model, store, el) {
    this.model = model; this.store = store; this.scales = model.get("scales"); this.step = null; this.queued = false;
    this.root = el.appendChild(document.createElement("div"));
    this.root.className = "wb-stream";
    this.stale = this.root.appendChild(document.createElement("div"));
    this.stale.className = "wb-stale-note"; this.stale.setAttribute("role", "status"); this.stale.hidden = true;
    this.grid = this.root.appendChild(document.createElement("div"));
    this.grid.className = "wb-charts";
    this.build();
    this.observer = new ResizeObserver(() => this.ask());
    this.observer.observe(this.grid);
    this.theme = new MutationObserver(() => { this.colours = null; this.ask(); });
    this.theme.observe(document.body, { attributes: true });
    this.timer = setInterval(() => this.check(), 1000);
  }
  build() {
    const lines = this.model.get("lines") ?? {};
    this.charts = this.model.get("plots").map((spec) => new Chart({ ...spec, lines: lines[spec.id] ?? [] }, this));
    this.grid.replaceChildren(...this.charts.map((chart) => chart.root));
    this.ask();
  }
  ask() {
    if (this.queued) return;
    this.queued = true;
    requestAnimationFrame(() => { this.queued = false; this.draw(); });
  }
  draw() {
    this.colours ??= this.readColours();
    for (const chart of this.charts) chart.draw(this.colours, this.step);
    this.check();
  }
  readColours() {
    const css = getComputedStyle(this.root), get = (name, or) => css.getPropertyValue(name).trim() || or;
    return {
      text: get("--jp-ui-font-color1", "#333"), faint: get("--jp-ui-font-color2", "#666"), rule: get("--jp-border-color2", "#ddd"),
      font: get("--jp-ui-font-family", "system-ui, sans-serif"),
      series: [0, 1, 2, 3].map((i) => get(`--wb-series-${i}`, ["#3a7cbf", "#d1802b", "#7a8794", "#8f6bb5"][i])),
    };
  }
  hover(step) { this.step = step === null ? null : Math.round(step); this.ask(); }
  emptyText() { return LIVE.has(this.model.get("state")) ? "waiting for the first step" : "no steps"; }
  check() {
    const live = LIVE.has(this.model.get("state")), since = performance.now() - this.store.seen;
    const stale = live && since > STALE_MS;
    if (stale === !this.stale.hidden) return;
    this.stale.hidden = !stale;
    this.stale.textContent = stale ? "No update for 8 s: the kernel is busy, restarting or gone. What was saved is safe." : "";
  }
  close() { clearInterval(this.timer); this.observer.disconnect(); this.theme.disconnect(); }
}

export default () => {
  const store = new Store(), views = new Set();
  return {
    initialize({ model }) {
      store.packed(model.get("snapshot"));
      store.seen = performance.now();
      const receive = (content, buffers) => {
        store.seen = performance.now();
        if (content.kind === "snapshot") store.snapshot(content, toFloats(buffers[0]));
        else if (content.kind === "append") {
          const floats = buffers?.length ? toFloats(buffers[0]) : new Float32Array();
          if (store.append(content, floats)) model.send({ kind: "resync", run: content.run, rows: store.rows });
        } else return;
        for (const view of views) view.ask();
      };
      const rebuild = () => { for (const view of views) view.build(); };
      model.on("msg:custom", receive);
      const redraw = () => { for (const view of views) view.ask(); };
      model.on("change:lines", rebuild);
      model.on("change:state", redraw);
      return () => { model.off("msg:custom", receive); model.off("change:lines", rebuild); model.off("change:state", redraw); };
    },
    render({ model, el }) {
      const view = new View(model, store, el);
      views.add(view);
      return () => { views.delete(view); view.close(); };
    },
  };
};
