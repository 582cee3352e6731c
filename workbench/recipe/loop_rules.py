"""Rules across the fields of the loop: the optimizer, the size of steps, what happens when something goes wrong."""

from __future__ import annotations

from ..errors import Problem
from .recipe import Recipe


def loop_problems(recipe: Recipe) -> list[Problem]:
    """Return what contradicts itself in the settings of the loop."""
    return [*_optimizer(recipe), *_spikes(recipe), *_noise_scale(recipe), *_out_of_memory(recipe), *_samples(recipe)]


def _optimizer(recipe: Recipe) -> list[Problem]:
    training = recipe.training
    if training.optim != "galore_adamw":
        names = ("galore_rank", "galore_update_proj_gap", "galore_scale")
        return _strays(recipe, "training", names, f"training.optim=galore_adamw, not to {training.optim}")
    if recipe.adapter.method == "none":
        return []
    text = "galore_adamw saves state of whole weights; the matrices of an adapter are of low rank already."
    return [Problem("training.optim", text, (("training.optim", "adamw_torch_fused"),))]


def _spikes(recipe: Recipe) -> list[Problem]:
    policy, layout = recipe.policies.on_spike, recipe.sharding.layout
    if policy == "keep" or layout == "ddp" or recipe.sharding.num_processes == 1:
        return []
    message = f"{policy} changes whole gradients before the update, which {layout} cuts over the devices."
    return [Problem("policies.on_spike", message, (("policies.on_spike", "keep"),))]


def _noise_scale(recipe: Recipe) -> list[Problem]:
    policies, training, problems = recipe.policies, recipe.training, []
    if policies.batch == "fixed":
        names = ("min_accumulation", "max_accumulation")
        return _strays(recipe, "policies", names, "policies.batch=noise_scale, not to fixed")
    low, high = policies.min_accumulation, policies.max_accumulation
    if low > high:
        text = f"{low} is above policies.max_accumulation={high}."
        problems.append(Problem("policies.min_accumulation", text, (("policies.min_accumulation", 2),)))
    elif not low <= training.gradient_accumulation_steps <= high:
        text = f"{training.gradient_accumulation_steps} lies outside of {low} to {high}, between which it moves."
        field = "training.gradient_accumulation_steps"
        nearest = min(max(training.gradient_accumulation_steps, low), high)
        problems.append(Problem(field, text, ((field, nearest),)))
    if training.max_steps < 1 and not recipe.phases.steps:
        text = "noise_scale changes how many steps an epoch has; the schedule needs their number."
        problems.append(Problem("training.max_steps", text, (("training.max_steps", 500),)))
    if recipe.sharding.num_processes > 1:
        text = "noise_scale measures the micro-batches of one device; several devices take fixed steps."
        problems.append(Problem("policies.batch", text, (("policies.batch", "fixed"),)))
    return problems


def _out_of_memory(recipe: Recipe) -> list[Problem]:
    policy = recipe.policies.on_oom
    if policy == "stop":
        return []
    fix = (("policies.on_oom", "stop"),)
    if recipe.sharding.num_processes > 1:
        text = f"{policy} repeats a step on one device; the others would wait for it in the middle of theirs."
        return [Problem("policies.on_oom", text, fix)]
    if recipe.model.task == "image-text-to-text":
        text = f"{policy} cuts micro-batches by their rows, and the images of a batch are not one a row."
        return [Problem("policies.on_oom", text, fix)]
    if recipe.training.torch_compile and recipe.training.torch_compile_mode == "reduce-overhead":
        text = f"{policy} changes the shape of batches, and reduce-overhead replays CUDA graphs of one shape."
        return [Problem("policies.on_oom", text, fix)]
    return []


def _strays(recipe: Recipe, part: str, names: tuple[str, ...], owner: str) -> list[Problem]:
    """Return a problem for each field that was set and has no effect: it belongs to ``owner``."""
    problems = []
    for name in names:
        field = f"{part}.{name}"
        plain = Recipe().get(field)
        if recipe.get(field) != plain:
            problems.append(Problem(field, f"belongs to {owner}.", ((field, plain),)))
    return problems


def _samples(recipe: Recipe) -> list[Problem]:
    evaluation, reason = recipe.evaluation, ""
    if recipe.model.task != "causal-lm":
        reason = f"a model for {recipe.model.task} writes no answers."
    elif recipe.sharding.num_processes > 1:
        reason = "several devices do not answer; ask the saved checkpoints with workbench chat."
    elif recipe.training.torch_compile:
        reason = "a compiled model would be compiled again for each length of an answer."
    named = {"num_samples": (evaluation.num_samples > 0, 0), "sample_prompts": (bool(evaluation.sample_prompts), ())}
    wanted = {name: nothing for name, (is_wanted, nothing) in named.items() if is_wanted}
    if reason:
        return [Problem(f"evaluation.{name}", reason, ((f"evaluation.{name}", no),)) for name, no in wanted.items()]
    if evaluation.num_samples and evaluation.split == "none":
        return [Problem("evaluation.num_samples", "needs held-out rows.", (("evaluation.num_samples", 0),))]
    return []
