from __future__ import annotations

import warnings

import pytest
import torch

from workbench.components.catalogue import CatalogueRow, catalogue, config_of, find_row, near_names

# Models of published measurements that estimates are graded on.
MEASURED = (
    "mistralai/Mistral-7B-v0.1",
    "TheBloke/Mistral-7B-v0.1-GPTQ",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
    "NousResearch/Llama-2-7b-hf",
    "NousResearch/Llama-2-13b-hf",
    "meta-llama/Llama-2-7b-hf",
    "meta-llama/Meta-Llama-3-8B",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.2-3B",
    "Qwen/Qwen-1_8B-Chat",
    "Qwen/Qwen-7B-Chat",
    "Qwen/Qwen-14B-Chat-Int4",
    "Qwen/Qwen-72B-Chat",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "HuggingFaceTB/SmolLM2-135M",
    "HuggingFaceTB/SmolLM2-360M",
    "HuggingFaceTB/SmolLM2-1.7B",
    "tiiuae/falcon-7b",
    "google/gemma-7b",
    "google/gemma-2-2b",
    "01-ai/Yi-6B-Chat",
    "01-ai/Yi-34B-Chat",
    "THUDM/chatglm3-6b",
    "baichuan-inc/Baichuan2-7B-Chat",
)


def count_parameters(row: CatalogueRow) -> int:
    """Count on meta with one and two layers; all layers of these models have the same parameters."""
    from transformers import AutoModelForCausalLM

    counts = []
    for layers in (1, 2):
        config = config_of(row)
        name = next(name for name in ("num_hidden_layers", "n_layer", "n_layers") if name in row.config)
        values = {**row.config, name: layers}
        config = type(config).from_dict(values)
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_config(config)
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
    return counts[0] + (row.config[name] - 1) * (counts[1] - counts[0])


def test_parameter_counts_are_the_published_ones() -> None:
    wrong = {
        row.name: (count, row.num_parameters)
        for row in catalogue()
        if abs((count := count_parameters(row)) / row.num_parameters - 1) > 0.01
    }
    assert not wrong


def test_rows_are_complete_and_names_unique() -> None:
    rows = catalogue()
    assert len(rows) >= 25
    names = [name.lower() for row in rows for name in (row.name, row.hub_id, *row.aliases)]
    names_of_row = {row.name: {row.name.lower(), row.hub_id.lower()} for row in rows}
    assert len(set(names)) == len(names) - sum(len(found) == 1 for found in names_of_row.values())
    for row in rows:
        assert row.source.startswith("https://huggingface.co/"), row.name
        assert row.license, row.name
        assert row.config["torch_dtype"] in ("bfloat16", "float16", "float32"), row.name
        assert str(config_of(row).dtype) == f"torch.{row.config['torch_dtype']}", row.name


@pytest.mark.parametrize("name", MEASURED)
def test_models_of_published_measurements_are_there(name: str) -> None:
    assert find_row(name) is not None


def test_names_are_found_in_any_case_and_without_owner() -> None:
    row = find_row("llama-3.1-8b")
    assert row is not None
    assert row.hub_id == "meta-llama/Llama-3.1-8B"
    assert find_row("META-LLAMA/llama-3.1-8b") is row
    assert find_row("Qwen2.5-7B") is find_row("qwen2.5-7b")
    assert find_row("nothing-like-this") is None


def test_near_names_name_each_model_once() -> None:
    near = near_names("llama-3.1-8")
    assert near[0] == "llama-3.1-8b"
    assert len(set(near)) == len(near)


def test_a_config_is_fresh_each_time() -> None:
    row = find_row("gpt2")
    assert row is not None
    config_of(row).n_layer = 1
    assert config_of(row).n_layer == 12


@pytest.mark.parametrize(("name", "expected"), [("gemma-2-2b", "eager"), ("mpt-7b", "eager"), ("llama-3.1-8b", "sdpa")])
def test_models_without_sdpa_are_built_with_eager_attention(name: str, expected: str) -> None:
    from workbench.components.model import attention_implementation
    from workbench.recipe import Recipe

    row = find_row(name)
    assert row is not None
    assert attention_implementation(Recipe(), config_of(row)) == expected
