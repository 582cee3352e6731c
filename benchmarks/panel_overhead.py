"""What the panel and the meters cost a training run: interleaved pairs of the same run with and without them.

Both halves of a pair run in one real Jupyter kernel whose messages a client receives, as a browser would. "With" is
what Start does (recorder, meters, doctors, panel with its streaming plots); "without" is the same trainer with nothing
attached. The ratio compares the median time of a step. Aim: median ratio of at least 5 pairs at most 1.02.

    python benchmarks/panel_overhead.py [--pairs 5] [--steps 40] [--model smollm2-135m-instruct] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from typing import Any

LIMIT = 1.02
WARM_UP_STEPS = 5

SETUP = """
import json, statistics, torch
torch.set_num_threads({threads})
from workbench import Recipe, Workbench
from workbench.train.session import Session
recipe = Recipe().with_changes({{
    "model.name_or_path": {model!r}, "data.max_length": 128, "training.max_steps": {steps},
    "training.gradient_accumulation_steps": 1, "evaluation.split": "none", "training.save_steps": 0,
}})
panel = Workbench(recipe)
panel.wait_for_estimate(600)

class StepTimes:
    def __init__(self): self.values = []
    def on_event(self, event):
        if event.kind == "step": self.values.append(event.data["step_s"])

def without():
    times = StepTimes()
    Session(recipe, observers=[times]).start().wait()
    return times.values

def with_panel():
    panel.start()
    return list(panel.wait().history.column("step_s"))
panel
"""


class Kernel:
    """A kernel with a client that receives its messages while code runs, as a page would."""

    def __init__(self, folder: str) -> None:
        from jupyter_client.manager import start_new_kernel

        self.manager, self.client = start_new_kernel(cwd=folder)
        self.num_messages = 0
        self._texts: list[str] = []

    def run(self, code: str) -> str:
        """Run code; return what it printed."""
        self._texts.clear()
        reply = self.client.execute_interactive(code, allow_stdin=False, timeout=3600, output_hook=self._take)
        if reply["content"]["status"] != "ok":
            raise RuntimeError("\n".join(reply["content"]["traceback"]))
        return "".join(self._texts)

    def stop(self) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def _take(self, message: dict[str, Any]) -> None:
        self.num_messages += 1
        if message["msg_type"] == "stream":
            self._texts.append(message["content"]["text"])


def main() -> int:
    """Measure and print; exit 1 where the aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    kernel = Kernel(tempfile.mkdtemp(prefix="panel-overhead-"))
    pairs = []
    try:
        kernel.run(SETUP.format(model=arguments.model, steps=arguments.steps, threads=arguments.threads))
        for number in range(arguments.pairs):
            order = ("without", "with_panel") if number % 2 == 0 else ("with_panel", "without")
            times = {name: json.loads(kernel.run(f"print(json.dumps({name}()))")) for name in order}
            medians = {name: statistics.median(values[WARM_UP_STEPS:]) for name, values in times.items()}
            pairs.append({**medians, "ratio": medians["with_panel"] / medians["without"]})
    finally:
        kernel.stop()
    ratio = statistics.median(pair["ratio"] for pair in pairs)
    result = {
        "model": arguments.model,
        "pairs": pairs,
        "median_ratio": ratio,
        "limit": LIMIT,
        "messages": kernel.num_messages,
    }
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{'pair':>4} {'without ms':>11} {'with ms':>9} {'ratio':>7}")
        for number, pair in enumerate(pairs, start=1):
            print(f"{number:4} {1e3 * pair['without']:11.1f} {1e3 * pair['with_panel']:9.1f} {pair['ratio']:7.4f}")
        print(f"median ratio {ratio:.4f}, at most {LIMIT} is the aim")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
