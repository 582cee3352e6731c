// Tells the kernel which band of the plotly picture beside this view was clicked, and at which instant.
// Plotly's own click event needs a point under the pointer; a band is picked anywhere inside it.
const MOVED_PX = 4;

function bandAt(plot, point, height) {
  let below = 0;
  for (const trace of plot.data) {
    if (!trace.meta) continue;
    below += trace.y[point] ?? 0;
    if (height <= below) return trace.meta;
  }
  return null;
}

export function locate(plot, event) {
  const { xaxis, yaxis } = plot._fullLayout ?? {};
  if (!xaxis || !yaxis || !plot.data.length) return null;
  const box = plot.getBoundingClientRect();
  const left = event.clientX - box.left - xaxis._offset;
  const top = event.clientY - box.top - yaxis._offset;
  if (left < 0 || top < 0 || left > xaxis._length || top > yaxis._length) return null;
  const last = plot.data[0].x.length - 1;
  const point = Math.min(last, Math.max(0, Math.floor(xaxis.p2d(left))));
  return { kind: 'pick', point, band: bandAt(plot, point, yaxis.p2d(top)) };
}

function render({ model, el }) {
  let start = null;
  // While a button is down plotly covers the page, so that the plot is only known from where the button went down.
  const down = (event) => {
    const plot = event.target.closest?.('.js-plotly-plot');
    const isOurs = plot && el.closest('.wb-explain')?.contains(plot);
    const isControl = event.target.closest?.('.updatemenu-container, .modebar');
    start = isOurs && !isControl ? { plot, x: event.clientX, y: event.clientY } : null;
  };
  const up = (event) => {
    const from = start;
    start = null;
    if (!from || Math.hypot(event.clientX - from.x, event.clientY - from.y) > MOVED_PX) return;
    const found = locate(from.plot, event);
    if (found) model.send(found);
  };
  // Capturing, because plotly keeps these events to itself while it looks out for a drag.
  document.addEventListener('mousedown', down, true);
  document.addEventListener('mouseup', up, true);
  return () => {
    document.removeEventListener('mousedown', down, true);
    document.removeEventListener('mouseup', up, true);
  };
}

export default { render };
