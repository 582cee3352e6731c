"""The streaming script alone, in a bare page with a fake model: no kernel, no JupyterLab."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.panel.stream import COLUMNS, PLOTS, SCALES, pack_rows, pack_snapshot, thin

SCRIPT = Path(__file__).parents[2] / "workbench" / "panel" / "stream.js"
HARNESS = """
async ({ script, plots, scales }) => {
  const url = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
  const esm = await import(url);
  const listeners = {}, sent = [];
  const traits = { snapshot: null, plots, scales, lines: {}, state: "running" };
  const model = {
    get: (key) => traits[key], send: (content) => sent.push(content),
    on: (name, f) => (listeners[name] ??= []).push(f), off: () => {},
    set: (key, value) => { traits[key] = value; (listeners[`change:${key}`] ?? []).forEach((f) => f()); },
  };
  const widget = esm.default();
  widget.initialize({ model });
  const el = document.body.appendChild(document.createElement("div"));
  el.style.width = "1000px";
  widget.render({ model, el });
  window.esm = esm; window.sent = sent; window.model = model;
  window.deliver = (content, bytes, kind = "dataview") => {
    const padded = new Uint8Array(bytes.length + 3); padded.set(bytes, 3);  // unaligned on purpose, as in Colab
    const buffer = kind === "dataview" ? new DataView(padded.buffer, 3) : padded.subarray(3);
    (listeners["msg:custom"] ?? []).forEach((f) => f(content, [buffer]));
  };
}
"""


class FakeHistory:
    """Rows in memory with the interface of a history."""

    def __init__(self, rows: int) -> None:
        steps = np.arange(1, rows + 1, dtype=float)
        self.columns = {name: np.full(rows, np.nan) for name in COLUMNS}
        self.columns["step"] = steps
        self.columns["loss"] = 2.0 + 1.0 / steps
        self.columns["allocated_bytes"] = np.full(rows, 3.0 * 2**30)

    def __len__(self) -> int:
        return len(self.columns["step"])

    def column(self, name: str) -> np.ndarray:
        return self.columns[name]


@pytest.fixture
def bare(page: Any) -> Any:
    style = (SCRIPT.with_name("panel.css")).read_text()
    page.route("http://esm.test/*", lambda route: route.fulfill(body="<body></body>", content_type="text/html"))
    page.goto("http://esm.test/")
    page.add_style_tag(content=style)
    plots = json.loads(json.dumps(PLOTS))
    page.evaluate(HARNESS, {"script": SCRIPT.read_text(), "plots": plots, "scales": SCALES})
    return page


def deliver(page: Any, packed: tuple[dict[str, Any], bytes], kind: str = "dataview") -> None:
    header, data = packed
    page.evaluate("([h, d, k]) => window.deliver(h, Uint8Array.from(d), k)", [header, list(data), kind])


def legend(page: Any, plot: str) -> str:
    page.wait_for_timeout(100)
    return page.locator(".wb-chart", has_text=plot).locator(".wb-chart-legend").inner_text()


@pytest.mark.parametrize("kind", ["dataview", "uint8array"])
def test_append_shows_the_newest_values(bare: Any, kind: str) -> None:
    deliver(bare, pack_rows(FakeHistory(4), "run", 0, 4), kind)
    assert "2.25" in legend(bare, "Loss")
    assert "3 GiB" in legend(bare, "Memory")
    label = bare.locator("canvas").first.get_attribute("aria-label")
    assert label.startswith("Loss:")
    assert bare.locator("canvas").first.get_attribute("role") == "img"


def test_overlap_is_dropped_and_a_gap_asks_for_a_snapshot(bare: Any) -> None:
    history = FakeHistory(30)
    bare.evaluate("() => { window.store = new window.esm.Store(); }")

    def append(first: int, count: int) -> bool:
        header, data = pack_rows(history, "run", first, count)
        script = "([h, d]) => window.store.append(h, window.esm.toFloats(Uint8Array.from(d)))"
        return bool(bare.evaluate(script, [header, list(data)]))

    rows = "() => [window.store.rows, window.store.series.get('loss').n]"
    assert append(0, 10) is False
    assert append(5, 10) is False
    assert bare.evaluate(rows) == [15, 15]
    assert append(20, 5) is True, "rows 15 to 19 are missing"
    assert bare.evaluate(rows) == [15, 15], "nothing is drawn across a gap"
    header, data = pack_snapshot(history, "run")
    bare.evaluate("([h, d]) => window.store.snapshot(h, window.esm.toFloats(Uint8Array.from(d)))", [header, list(data)])
    assert bare.evaluate(rows) == [30, 30]
    assert append(25, 5) is False
    assert bare.evaluate(rows) == [30, 30]


def test_a_gap_sends_one_resync_to_the_kernel(bare: Any) -> None:
    history = FakeHistory(30)
    deliver(bare, pack_rows(history, "run", 0, 5))
    deliver(bare, pack_rows(history, "run", 10, 5))
    deliver(bare, pack_rows(history, "run", 15, 5))
    assert bare.evaluate("() => window.sent") == [{"kind": "resync", "run": "run", "rows": 5}]


def test_a_new_run_starts_from_nothing(bare: Any) -> None:
    deliver(bare, pack_rows(FakeHistory(30), "first", 0, 30))
    deliver(bare, pack_rows(FakeHistory(2), "second", 0, 2))
    assert "2.5" in legend(bare, "Loss")


def test_long_runs_stay_small_in_message_and_memory(bare: Any) -> None:
    rows = 100_000
    history = FakeHistory(rows)
    sizes = [len(pack_rows(history, "run", first, 10)[1]) for first in (0, rows - 10)]
    assert sizes[0] == sizes[1] == 10 * 4 * len(COLUMNS)
    header, data = pack_snapshot(history, "run")
    # Two lines have values here, plus the smoothed loss; each at most 4,000 points of two floats.
    assert len(data) <= 3 * 4000 * 2 * 4
    assert header["rows"] == rows
    bare.evaluate(
        """(rows) => {
          const store = new window.esm.Store();
          for (let i = 0; i < rows; i++) store.push("loss", i, i === 77777 ? 1e6 : Math.sin(i));
          const s = store.series.get("loss");
          window.points = [s.n, Math.max(...s.y.slice(0, s.n))];
        }""",
        rows,
    )
    count, highest = bare.evaluate("() => window.points")
    assert count <= 16_000
    assert highest == 1e6, "a single spike must survive thinning"


def test_thinning_in_the_kernel_keeps_extremes() -> None:
    x = np.arange(100_000.0)
    y = np.zeros(100_000)
    y[4711], y[4712] = 5.0, -5.0
    kept_x, kept_y = thin(x, y, 4000)
    assert len(kept_x) <= 4000
    assert kept_y.max() == 5.0
    assert kept_y.min() == -5.0
    assert (np.diff(kept_x) > 0).all()


def test_stale_sign_appears_when_the_kernel_is_silent(bare: Any) -> None:
    deliver(bare, pack_rows(FakeHistory(3), "run", 0, 3))
    note = bare.locator(".wb-stale-note")
    assert note.is_hidden()
    note.wait_for(state="visible", timeout=12_000)
    assert "No update for 8 s" in note.inner_text()
    deliver(bare, pack_rows(FakeHistory(4), "run", 3, 1))
    note.wait_for(state="hidden", timeout=3_000)


def test_hover_reads_values_of_a_step(bare: Any) -> None:
    deliver(bare, pack_rows(FakeHistory(50), "run", 0, 50))
    bare.wait_for_timeout(150)
    box = bare.locator("canvas").first.bounding_box()
    bare.mouse.move(box["x"] + box["width"] - 9, box["y"] + 40)
    assert "2.02" in legend(bare, "Loss")
    bare.mouse.move(box["x"] + 40, box["y"] + 40)
    assert float(legend(bare, "Loss").split("each step")[1].split()[0]) > 2.2
