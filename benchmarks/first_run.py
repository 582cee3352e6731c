"""The main job for real: ``workbench train`` of the chat model on python-docs, three seeds, on this CPU.

Run: ``python -m benchmarks.first_run [--steps 40] [--seeds 1 2 3] [--json]``

Per seed it trains in a subprocess, then, in another fresh process, loads the saved adapter onto the base model with
plain peft, measures the loss on the same 64 held-out rows with the adapter off and on, and prints what the model
answers before and after. Exits 1 when the mean loss falls by less than 3 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REQUIRED_FALL = 0.03
MODEL = "smollm2-135m-instruct"


def train(seed: int, steps: int, folder: Path) -> float:
    """Train one seed through the command line and return the seconds it took."""
    started = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "workbench.cli.main",
        "train",
        "--preset",
        "quick",
        f"--training.max_steps={steps}",
        f"--training.seed={seed}",
        "--evaluation.max_rows=64",
        "--evaluation.eval_steps=0",
        "--hardware.device=cpu",
        "--out",
        str(folder),
        "--json",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def grade(folder: Path) -> dict[str, Any]:
    """Load the adapter without the workbench's training code and compare it with the base model."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from workbench.components.data import build_collator, prepare_data
    from workbench.components.source import find_source, load_tokenizer
    from workbench.recipe import Recipe

    recipe = Recipe.from_yaml(folder / "recipe.yaml")
    source = find_source(recipe, for_training=True)
    tokenizer = load_tokenizer(source)
    rows = prepare_data(recipe, tokenizer).evaluation
    assert rows is not None
    collate = build_collator(recipe, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, str(folder / "adapter")).eval()
    question = [{"role": "user", "content": "What does the Python function os.path.join do?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    def measure() -> tuple[float, str]:
        total, count = 0.0, 0
        for start in range(0, len(rows), 4):
            batch = collate([rows[index] for index in range(start, min(start + 4, len(rows)))])
            supervised = int((batch["labels"][:, 1:] != -100).sum())
            total += float(model(**batch).loss) * supervised
            count += supervised
        answer = model.generate(**prompt, max_new_tokens=40, do_sample=False)
        return total / count, tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)

    with torch.no_grad():
        after, answer_after = measure()
        with model.disable_adapter():
            before, answer_before = measure()
    return {
        "num_rows": len(rows),
        "loss_before": before,
        "loss_after": after,
        "fall_fraction": 1 - after / before,
        "answer_before": answer_before,
        "answer_after": answer_after,
    }


def main() -> int:
    """Train, grade and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--grade", metavar="DIR", help="only grade this run folder")
    options = parser.parse_args()
    if options.grade:
        print(json.dumps(grade(Path(options.grade))))
        return 0
    results = []
    with tempfile.TemporaryDirectory() as root:
        for seed in options.seeds:
            folder = Path(root) / f"seed-{seed}"
            seconds = train(seed, options.steps, folder)
            fresh = [sys.executable, "-m", "benchmarks.first_run", "--grade", str(folder)]
            output = subprocess.run(fresh, check=True, capture_output=True, text=True).stdout
            results.append({"seed": seed, "train_s": seconds, **json.loads(output.splitlines()[-1])})
            if not options.json:
                row = results[-1]
                print(
                    f"seed {seed}: loss on {row['num_rows']} held-out rows {row['loss_before']:.4f} -> "
                    f"{row['loss_after']:.4f} ({-row['fall_fraction']:+.1%}), {seconds:.0f} s\n"
                    f"  before: {row['answer_before']!r}\n  after:  {row['answer_after']!r}",
                    flush=True,
                )
    mean_fall = sum(row["fall_fraction"] for row in results) / len(results)
    if options.json:
        print(json.dumps({"model": MODEL, "runs": results, "mean_fall_fraction": mean_fall}))
    else:
        print(f"mean fall of the loss: {mean_fall:.1%} (required: {REQUIRED_FALL:.0%})")
    return 0 if mean_fall >= REQUIRED_FALL else 1


if __name__ == "__main__":
    sys.exit(main())
