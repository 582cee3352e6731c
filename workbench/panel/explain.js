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
  const root = el.closest('.wb-explain') ?? document;
  let start = null;
  const down = (event) => {
    start = [event.clientX, event.clientY];
  };
  const up = (event) => {
    const plot = event.target.closest?.('.js-plotly-plot');
    const moved = start && Math.hypot(event.clientX - start[0], event.clientY - start[1]);
    start = null;
    if (!plot || moved === null || moved > MOVED_PX || event.target.closest('.updatemenu-container, .modebar')) return;
    const found = locate(plot, event);
    if (found) model.send(found);
  };
  // Capturing, because plotly keeps these events to itself while it looks out for a drag.
  root.addEventListener('mousedown', down, true);
  document.addEventListener('mouseup', up, true);
  return () => {
    root.removeEventListener('mousedown', down, true);
    document.removeEventListener('mouseup', up, true);
  };
}

export default { render };
