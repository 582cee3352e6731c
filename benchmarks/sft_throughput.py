"""A plain LoRA run beside stock trl: the same model, batches in the same order, optimizer and schedule.

``python -m benchmarks.sft_throughput [--model smollm2-135m-instruct] [--pairs 5] [--steps 8] [--json]``

Each pair runs the workbench's Session, with its recorder, meter and doctors, and trl's ``SFTTrainer``, one after the
other in one process; which goes first alternates. Counted are the steps after the first two, from the end of one step
to the end of another, in wall time and in CPU time of the process: on a machine that others use too only the second
says what a program did. A ratio is trl's seconds by the workbench's: above 1 the workbench is faster. The losses of
both are compared, so that both did the same work. Needs ``pip install trl``.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workbench.events import Event
from workbench.recipe import Recipe

# Steps that warm up caches and memory and are not counted.
WARM_STEPS = 2
# trl logs a loss rounded by another order of sums.
LOSS_TOLERANCE = 1e-3
MIN_MEDIAN, MIN_LOWEST = 1.0, 0.98


@dataclass
class Stretch:
    """The counted steps of one run.

    Attributes:
        wall_s, cpu_s: Seconds from the end of the last warm step to the end of the last step.
        losses: Of every step.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0
    losses: list[float] = field(default_factory=list)


class StepTimes:
    """Notes both clocks at the end of each step."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def mark(self) -> None:
        """Note the end of a step."""
        self.marks.append((time.perf_counter(), time.process_time()))

    def stretch(self, losses: list[float]) -> Stretch:
        """Return the seconds of the steps after the warm ones."""
        first, last = self.marks[WARM_STEPS - 1], self.marks[-1]
        return Stretch(last[0] - first[0], last[1] - first[1], losses)


def settings(model: str, num_steps: int, max_length: int) -> Recipe:
    """Return the plain LoRA run that both sides do."""
    return Recipe().with_changes(
        {
            "model.name_or_path": model,
            "model.dtype": "float32",
            "data.max_length": max_length,
            "data.max_rows": 400,
            "training.mixed_precision": "no",
            "training.per_device_train_batch_size": 2,
            "training.gradient_accumulation_steps": 2,
            "training.max_steps": num_steps,
            "training.save_steps": 0,
            "evaluation.split": "none",
            "hardware.device": "cpu",
        }
    )


class _Seen:
    """An Observer that keeps the times and losses of steps."""

    def __init__(self) -> None:
        self.times, self.losses = StepTimes(), list[float]()

    def on_event(self, event: Event) -> None:
        """Take one event."""
        if event.kind == "step":
            self.times.mark()
            self.losses.append(float(event.data["loss"]))


def run_workbench(recipe: Recipe, folder: Path) -> Stretch:
    """Train with the workbench, watched as from the panel."""
    from workbench.pipeline import start_session

    seen = _Seen()
    start_session(recipe, run_dir=folder, observers=[seen]).wait()
    return seen.times.stretch(seen.losses)


def run_trl(recipe: Recipe, folder: Path) -> Stretch:
    """Train with ``SFTTrainer``: its own model, collator, loss, loop and metrics, on rows tokenized before."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback
    from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]  # loaded lazily

    from workbench.components.data import prepare_data
    from workbench.components.source import find_source, load_tokenizer
    from workbench.train.sampler import sampler_of

    training, adapter = recipe.training, recipe.adapter
    source = find_source(recipe, for_training=True)
    tokenizer = load_tokenizer(source)
    rows = prepare_data(recipe, tokenizer).train
    rows = rows.select(list(sampler_of(recipe, rows))).select_columns(["input_ids", "labels"])
    times, losses = StepTimes(), list[float]()

    class Marks(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.mark()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    arguments = SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=training.per_device_train_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        max_steps=training.max_steps,
        learning_rate=training.learning_rate,
        lr_scheduler_type=training.lr_scheduler_type,
        optim=training.optim,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        max_length=recipe.data.max_length,
        seed=training.seed,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        shuffle_dataset=False,
        train_sampling_strategy="sequential",
    )
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(source.path, dtype="float32"),
        args=arguments,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=LoraConfig(
            task_type="CAUSAL_LM",
            r=adapter.r,
            lora_alpha=adapter.lora_alpha,
            lora_dropout=adapter.lora_dropout,
            target_modules=adapter.target_modules,
        ),
        callbacks=[Marks()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return times.stretch(losses)


def play_pair(recipe: Recipe, number: int) -> tuple[Stretch, Stretch]:
    """Run both sides once; returns the workbench's and trl's."""
    sides: list[Callable[[Recipe, Path], Stretch]] = [run_workbench, run_trl]
    results: dict[Any, Stretch] = {}
    with tempfile.TemporaryDirectory() as folder:
        for side in sides if number % 2 == 0 else reversed(sides):
            gc.collect()
            results[side] = side(recipe, Path(folder) / side.__name__)
    return results[run_workbench], results[run_trl]


def same_losses(ours: Stretch, theirs: Stretch) -> bool:
    """Whether both computed the same thing: the adapter's random start is drawn otherwise, its first product is 0."""
    first = (ours.losses[0], theirs.losses[0])
    return len(ours.losses) == len(theirs.losses) and abs(first[0] - first[1]) <= LOSS_TOLERANCE * first[1]


def main(argv: list[str] | None = None) -> int:
    """Print the ratios of each pair, their median and lowest; return 1 where a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if importlib.util.find_spec("trl") is None:
        print("Not measured: trl is not installed. Run pip install trl.", file=sys.stderr)
        return 0
    import torch

    torch.set_num_threads(1)
    recipe = settings(options.model, options.steps, options.max_length)
    pairs = [play_pair(recipe, number) for number in range(options.pairs)]
    ratios = {
        clock: [getattr(theirs, clock) / getattr(ours, clock) for ours, theirs in pairs]
        for clock in ("cpu_s", "wall_s")
    }
    same = all(same_losses(*pair) for pair in pairs)
    report = {
        "model": options.model,
        "counted_steps": options.steps - WARM_STEPS,
        "same_losses": same,
        **{f"{clock}_ratios": values for clock, values in ratios.items()},
        **{f"{clock}_median": statistics.median(values) for clock, values in ratios.items()},
        **{f"{clock}_lowest": min(values) for clock, values in ratios.items()},
    }
    if options.json:
        print(json.dumps({**report, "pairs": [{"workbench": asdict(a), "trl": asdict(b)} for a, b in pairs]}))
    else:
        print(f"{options.model}: {options.steps - WARM_STEPS} steps a run; trl's seconds by the workbench's")
        for clock, values in ratios.items():
            shown = " ".join(f"{value:.3f}" for value in values)
            print(f"{clock:6}  median {statistics.median(values):.3f}  lowest {min(values):.3f}  ({shown})")
        print(f"first losses are {'equal' if same else 'NOT equal'}")
    good = statistics.median(ratios["cpu_s"]) >= MIN_MEDIAN and min(ratios["cpu_s"]) >= MIN_LOWEST
    return 0 if good and same else 1


if __name__ == "__main__":
    sys.exit(main())
