"""Rules across fields: each wrong combination is named with a change that makes it right."""

import pytest

from workbench.errors import RecipeError
from workbench.recipe import Recipe, TargetFacts, find_problems, require_valid

T4 = TargetFacts("Tesla T4", "cuda", bf16_native=False, compute_capability=(7, 5), for_estimate=True)
A100 = TargetFacts("A100", "cuda", bf16_native=True, compute_capability=(8, 0), for_estimate=True)
CPU = TargetFacts("CPU", "cpu", bf16_native=True, for_estimate=True)

WRONG = [
    ({"quantization.load_in_4bit": True, "quantization.load_in_8bit": True}, None, "quantization.load_in_8bit"),
    ({"quantization.load_in_4bit": True, "adapter.method": "none"}, None, "adapter.method"),
    ({"training.mixed_precision": "bf16"}, T4, "training.mixed_precision"),
    ({"training.mixed_precision": "fp16"}, CPU, "training.mixed_precision"),
    ({"model.attn_implementation": "flash_attention_2"}, T4, "model.attn_implementation"),
    ({"model.attn_implementation": "flash_attention_2"}, CPU, "model.attn_implementation"),
    ({"model.attn_implementation": "flex_attention"}, CPU, "model.attn_implementation"),
    ({"data.packing": True, "data.group_by_length": True}, None, "data.group_by_length"),
    ({"data.packing": True, "data.padding": "max_length"}, None, "data.padding"),
    ({"data.packing": True, "data.sampling": "balanced_length"}, None, "data.sampling"),
    ({"data.group_by_length": True, "data.sampling": "balanced_length"}, None, "data.sampling"),
    ({"data.sampling": "balanced_class"}, None, "data.sampling"),
    (
        {"policies.on_spike": "skip", "sharding.num_processes": 2, "sharding.layout": "zero2"},
        None,
        "policies.on_spike",
    ),
    (
        {"evaluation.split": "none", "evaluation.load_best_model_at_end": True},
        None,
        "evaluation.load_best_model_at_end",
    ),
    ({"evaluation.eval_steps": 0, "evaluation.early_stopping_patience": 2}, None, "evaluation.early_stopping_patience"),
    ({"adapter.target_modules": []}, None, "adapter.target_modules"),
    ({"adapter.layers_to_transform": [-1]}, None, "adapter.layers_to_transform"),
    ({"adapter.name_or_path": "x", "adapter.method": "none"}, None, "adapter.name_or_path"),
    ({"adapter.name_or_path": "x", "adapter.trainable_layers": 2}, None, "adapter.trainable_layers"),
    ({"model.new_tokens": ["<a>", "<a>", " "]}, None, "model.new_tokens"),
    ({"model.new_tokens": ["<a>"], "model.task": "image-text-to-text"}, None, "model.new_tokens"),
    ({"model.new_tokens": ["<a>"], "adapter.method": "bottleneck"}, None, "model.new_tokens"),
    (
        {"model.new_tokens": ["<a>"], "adapter.method": "none", "adapter.trainable_layers": 2},
        None,
        "model.new_tokens",
    ),
    (
        {"model.new_tokens": ["<a>"], "sharding.num_processes": 2, "sharding.layout": "fsdp"},
        None,
        "model.new_tokens",
    ),
    ({"evaluation.num_samples": 1, "evaluation.split": "none"}, None, "evaluation.num_samples"),
    ({"evaluation.num_samples": 1, "model.task": "seq2seq-lm"}, None, "evaluation.num_samples"),
    ({"evaluation.sample_prompts": ["a"], "training.torch_compile": True}, None, "evaluation.sample_prompts"),
    ({"evaluation.sample_prompts": ["a"], "sharding.num_processes": 2}, None, "evaluation.sample_prompts"),
    ({"pruning.amount": 0.5}, None, "pruning.amount"),
    ({"pruning.method": "l1_global", "quantization.load_in_8bit": True}, None, "pruning.method"),
    ({"pruning.method": "structured", "model.task": "seq2seq-lm"}, None, "pruning.method"),
    (
        {"pruning.method": "l1_global", "sharding.num_processes": 2, "sharding.layout": "zero2"},
        None,
        "pruning.method",
    ),
    ({"pruning.method": "l1_global", "pruning.step": 9, "training.max_steps": 9}, None, "pruning.step"),
    (
        {"pruning.method": "l1_global", "pruning.step": 2, "phases.steps": [4, 4], "phases.trainable_layers": [1, 2]},
        None,
        "pruning.step",
    ),
    (
        {"pruning.method": "l1_global", "pruning.step": None, "evaluation.load_best_model_at_end": True},
        None,
        "pruning.step",
    ),
    ({"tasks.shared_layers": 2}, None, "tasks.shared_layers"),
    ({"tasks.data": ["a=x.jsonl"]}, None, "tasks.data"),
    ({"tasks.data": ["a=x.jsonl", "shared=y.jsonl"]}, None, "tasks.data"),
    ({"tasks.data": ["a=x.jsonl", "a=y.jsonl"]}, None, "tasks.data"),
    ({"tasks.data": ["a=x.jsonl", "b=y.jsonl"], "adapter.method": "none"}, None, "adapter.method"),
    ({"tasks.data": ["a=x.jsonl", "b=y.jsonl"], "adapter.use_dora": True}, None, "adapter.use_dora"),
    ({"tasks.data": ["a=x.jsonl", "b=y.jsonl"], "data.packing": True}, None, "data.packing"),
    ({"tasks.data": ["a=x.jsonl", "b=y.jsonl"], "training.loss_type": "chunked_nll"}, None, "training.loss_type"),
    ({"adapter.bottleneck_size": 8}, None, "adapter.bottleneck_size"),
    ({"adapter.method": "bottleneck", "adapter.use_dora": True}, None, "adapter.use_dora"),
    ({"adapter.method": "bottleneck", "adapter.target_modules": ["q_proj"]}, None, "adapter.target_modules"),
    ({"adapter.method": "bottleneck", "model.task": "seq2seq-lm"}, None, "adapter.method"),
    ({"adapter.method": "bottleneck", "adapter.trainable_modules": ["mlp"]}, None, "adapter.trainable_modules"),
    (
        {"training.mixed_precision": "fp16", "model.dtype": "float16", "adapter.method": "none"},
        A100,
        "model.dtype",
    ),
]


@pytest.mark.parametrize(("changes", "target", "field"), WRONG, ids=lambda value: str(value)[:60])
def test_a_wrong_combination_is_named_and_its_fix_works(changes: dict, target: TargetFacts | None, field: str) -> None:
    recipe = Recipe().with_changes(changes)
    problems = find_problems(recipe, target)
    assert [problem.field for problem in problems] == [field]
    assert problems[0].fix, "a fix that works must be offered"
    assert find_problems(recipe.with_changes(dict(problems[0].fix)), target) == []


def test_the_default_is_right_everywhere() -> None:
    for target in (None, T4, A100, CPU):
        assert find_problems(Recipe(), target) == []


def test_all_problems_come_at_once() -> None:
    recipe = Recipe().with_changes(
        {"quantization.load_in_4bit": True, "adapter.method": "none", "training.mixed_precision": "bf16"}
    )
    with pytest.raises(RecipeError) as caught:
        require_valid(recipe, T4)
    assert {problem.field for problem in caught.value.problems} == {"adapter.method", "training.mixed_precision"}
    assert "Set training.mixed_precision=fp16." in str(caught.value)


def test_four_bits_without_bitsandbytes_is_refused_for_a_run_but_can_be_estimated(monkeypatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else found(name))
    recipe = Recipe().with_changes({"quantization.load_in_4bit": True})
    assert find_problems(recipe, A100) == []
    (problem,) = find_problems(recipe, TargetFacts("A100", "cuda", bf16_native=True, compute_capability=(8, 0)))
    assert problem.field == "quantization.load_in_4bit"
    assert "pip install 'workbench[quantization]'" in problem.message
