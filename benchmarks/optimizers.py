"""State and peak of every optimizer, predicted and measured: ``python -m benchmarks.optimizers [--json]``.

One model trains all its weights (GaLore saves nothing else) for two steps on an emulated card without a limit, each
optimizer by the code path it takes on a GPU. The state is the storages that the optimizer holds after those steps; the
peak is that of the emulated caching allocator. Beside both stands what the estimate says of the same settings. The
pages of ``paged_adamw_8bit`` lie where the driver puts them and count as host memory; a CPU has no such memory, so that
its measured state is the whole of it, held against device and host bytes of the estimate together.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
from typing import Any

from benchmarks.emulation import card
from benchmarks.steps import Configuration
from workbench.recipe.parts import OPTIMIZERS

# Llama in small. Weights of the layers are larger than the 4,096 elements from which 8-bit optimizers quantize.
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "dtype": "float32",
}
NUM_STEPS = 2
# Share by which a predicted peak may miss the measured one.
PEAK_TOLERANCE = 0.03


@dataclasses.dataclass(frozen=True)
class Row:
    """One optimizer.

    Attributes:
        optim: Its name in the Recipe.
        state_bytes, estimated_state_bytes: Of its state, host memory included.
        host_bytes: What of the estimated state lies in host memory.
        peak_bytes, estimated_peak_bytes: Highest allocated bytes of the run; measured None where the CPU cannot do as
            the GPU would (paged memory).
        bytes_per_parameter: Measured state by trained parameters.
    """

    optim: str
    state_bytes: int
    estimated_state_bytes: int
    host_bytes: int
    peak_bytes: int | None
    estimated_peak_bytes: int
    bytes_per_parameter: float

    @property
    def is_good(self) -> bool:
        """Whether the state is predicted to the byte and the peak within PEAK_TOLERANCE."""
        near = self.peak_bytes is None or abs(self.estimated_peak_bytes / self.peak_bytes - 1) <= PEAK_TOLERANCE
        return self.state_bytes == self.estimated_state_bytes and near


def configuration(optim: str, num_steps: int = NUM_STEPS) -> Configuration:
    """Return the run of an optimizer."""
    changes = {"adapter.method": "none", "training.optim": optim, "training.max_steps": num_steps}
    if optim == "galore_adamw":
        changes["training.galore_rank"] = 32
    return Configuration(optim, MODEL, changes, batch_size=2, length=64)


def measure(item: Configuration, *, on_cuda: bool) -> tuple[int, int, int]:
    """Train on an emulated card; returns bytes of state, highest allocated bytes, and trained parameters."""
    from benchmarks.steps import Steps
    from workbench.components.optimizer import build_optimizer
    from workbench.hardware import read_device
    from workbench.observe.emulated import EmulatedDevice

    recipe = item.recipe()
    emulated = EmulatedDevice(card(2**40))
    try:
        with emulated:
            steps = Steps(recipe, read_device("cpu"), "cpu")
            steps.optimizer = build_optimizer(recipe, steps.model, for_cuda=on_cuda)
            emulated.adopt([*steps.model.parameters(), *steps.model.buffers()])
            steps.run(NUM_STEPS)
        num_bytes = state_bytes(steps.optimizer)
        count = sum(parameter.numel() for parameter in steps.model.parameters() if parameter.requires_grad)
    finally:
        emulated.is_on = False
        emulated.close()
        gc.collect()
    return num_bytes, emulated.stats().peak_allocated, count


def state_bytes(optimizer: Any) -> int:
    """Return the bytes of an optimizer's state on the device, each storage once (bitsandbytes' tables are shared).

    Step counters lie in host memory, but for the fused AdamW, whose kernel reads them.
    """
    import torch

    on_host = () if optimizer.param_groups[0].get("fused") else ("step",)
    found: dict[int, int] = {}
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name not in on_host:
                storage = value.untyped_storage()
                found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def estimated(item: Configuration) -> tuple[int, int, int]:
    """Return predicted bytes of state on the device and on the host, and the peak of allocated bytes."""
    from workbench.estimate import estimate_run

    memory = estimate_run(item.recipe(), card(2**40), shape=item.shape()).memory
    states = memory.timeline.bytes_by_category.get("optimizer_state", ())
    return int(max(states, default=0)), memory.host_bytes, memory.peak_allocated_bytes


def play(optim: str) -> Row:
    """Return the row of an optimizer."""
    item = configuration(optim)
    is_paged = optim.startswith("paged")
    measured, peak, count = measure(item, on_cuda=not is_paged)
    state, host, expected = estimated(item)
    return Row(optim, measured, state + host, host, None if is_paged else peak, expected, measured / count)


def main(argv: list[str] | None = None) -> int:
    """Print the table; return 1 where a prediction is off."""
    parser = argparse.ArgumentParser(prog="benchmarks.optimizers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    import torch

    torch.set_num_threads(1)
    rows = [play(optim) for optim in OPTIMIZERS]
    if options.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows]))
        return 0 if all(row.is_good for row in rows) else 1
    mib = 2**20
    print(f"{'optimizer':18} state MiB  estimated  of it host  bytes/weight  peak MiB  estimated")
    for row in rows:
        peak = "        -" if row.peak_bytes is None else f"{row.peak_bytes / mib:9.2f}"
        print(
            f"{row.optim:18} {row.state_bytes / mib:9.2f}  {row.estimated_state_bytes / mib:9.2f}  "
            f"{row.host_bytes / mib:10.2f}  {row.bytes_per_parameter:12.2f} {peak}  "
            f"{row.estimated_peak_bytes / mib:9.2f}{'' if row.is_good else '  off'}"
        )
    return 0 if all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
