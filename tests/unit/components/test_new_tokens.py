"""New tokens: rows at the mean of the others, which alone train beside LoRA, are saved with it and load again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.components import tiny_llama
from workbench.components.model import build_model
from workbench.components.precision import resolve_precision
from workbench.components.source import find_source, load_tokenizer
from workbench.components.step import micro_step
from workbench.errors import RecipeError
from workbench.estimate import estimate_run
from workbench.export.loading import load_result, own_loading
from workbench.hardware import find_device
from workbench.train.checkpoint import save_weights

from .tiny import CPU, recipe_with

NEW = ("<plan>", "</plan>")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    """Folders of the tiny model with and without a tied head."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prepared = tiny_llama.prepare()
    folders = {}
    for tied in (True, False):
        folder = tmp_path_factory.mktemp(f"tied-{tied}")
        AutoTokenizer.from_pretrained(prepared).save_pretrained(folder)
        config = AutoModelForCausalLM.from_pretrained(prepared).config
        config.tie_word_embeddings = tied
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        folders[tied] = str(folder)
    return folders


def build(path: str, changes: dict[str, Any] | None = None) -> tuple[Any, Any, Any]:
    recipe = recipe_with({"model.name_or_path": path, "model.new_tokens": NEW, "adapter.r": 4, **(changes or {})})
    source = find_source(recipe, for_training=True)
    return recipe, source, build_model(recipe, source, CPU, place="cpu")


def step(recipe: Any, model: Any, tokens: torch.Tensor, rate: float = 0.1) -> None:
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=rate)
    micro_step(recipe, model, {"input_ids": tokens, "labels": tokens}, 4, resolve_precision(recipe, CPU))
    optimizer.step()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("changes", [{}, {"quantization.load_in_4bit": True}])
def test_only_the_new_rows_learn_and_start_at_the_mean(base: dict[bool, str], tied: bool, changes: Any) -> None:
    recipe, source, model = build(base[tied], changes)
    tokenizer = load_tokenizer(source)
    ids = tokenizer.convert_tokens_to_ids(list(NEW))
    assert tokenizer("a<plan>b", add_special_tokens=False)["input_ids"].count(ids[0]) == 1
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    old = embeddings.weight.detach().clone()
    is_old = torch.ones(len(old), dtype=torch.bool)
    is_old[ids] = False
    assert torch.allclose(old[ids[0]], old[is_old].mean(0), atol=1e-6)
    tokens = torch.tensor([[5, ids[0], 9, ids[1]]])
    step(recipe, model, tokens)
    now = embeddings.weight.detach()
    assert torch.equal(now[is_old], old[is_old]) and not torch.equal(now[ids], old[ids])
    assert torch.equal(head.weight.detach(), now) is tied
    own = [name for name, one in model.named_parameters() if one.requires_grad and "lora_" not in name]
    assert len(own) == (1 if tied else 2) and all("trainable_tokens" in name for name in own)


@pytest.mark.parametrize("tied", [True, False])
def test_they_come_back_with_the_adapter_and_into_the_merged_model(
    base: dict[bool, str], tied: bool, tmp_path: Path
) -> None:
    recipe, source, model = build(base[tied])
    ids = load_tokenizer(source).convert_tokens_to_ids(list(NEW))
    tokens = torch.tensor([[5, ids[0], 9, ids[1]]])
    for _ in range(3):
        step(recipe, model, tokens)
    save_weights(model, tmp_path)
    with torch.no_grad():
        expected = model.eval()(input_ids=tokens).logits
        loaded = load_result(recipe, source, tmp_path)
        assert torch.equal(loaded(input_ids=tokens).logits, expected)
        merged = loaded.merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
        again = type(merged).from_pretrained(tmp_path / "merged").eval()
        assert torch.allclose(again(input_ids=tokens).logits, expected, atol=1e-5)


def test_peft_alone_loads_it_as_the_card_says(base: dict[bool, str], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe, source, model = build(base[True])
    load_tokenizer(source).save_pretrained(tmp_path)
    ids = load_tokenizer(source).convert_tokens_to_ids(list(NEW))
    tokens = torch.tensor([[5, ids[0], 9, ids[1]]])
    step(recipe, model, tokens)
    save_weights(model, tmp_path)
    assert "resize_token_embeddings(len(tokenizer))" in own_loading(recipe)
    plain = AutoModelForCausalLM.from_pretrained(base[True])
    plain.resize_token_embeddings(len(AutoTokenizer.from_pretrained(tmp_path)))
    loaded = PeftModel.from_pretrained(plain, str(tmp_path)).eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, model.eval()(input_ids=tokens).logits)


def test_all_weights_learn_them_too(base: dict[bool, str]) -> None:
    recipe, source, model = build(base[True], {"adapter.method": "none", "adapter.r": 16})
    ids = load_tokenizer(source).convert_tokens_to_ids(list(NEW))
    before = model.get_input_embeddings().weight.detach().clone()
    step(recipe, model, torch.tensor([[5, ids[0], 9, ids[1]]]))
    assert not torch.equal(model.get_input_embeddings().weight[ids], before[ids])
    assert model.config.vocab_size == len(before) > max(ids)


def test_a_token_that_exists_is_refused_by_name(base: dict[bool, str]) -> None:
    recipe = recipe_with({"model.name_or_path": base[True]})
    known = load_tokenizer(find_source(recipe, for_training=True)).convert_ids_to_tokens(7)
    recipe = recipe.with_changes({"model.new_tokens": (known, "<new>")})
    with pytest.raises(RecipeError) as caught:
        load_tokenizer(find_source(recipe, for_training=True))
    assert caught.value.problems[0].fix == (("model.new_tokens", ("<new>",)),)


def test_the_estimate_counts_their_rows_and_the_copy_of_the_embeddings_they_cost(base: dict[bool, str]) -> None:
    recipe, _, model = build(base[False])
    plain = estimate_run(recipe.with_changes({"model.new_tokens": ()}), find_device("Tesla T4"))
    more = estimate_run(recipe, find_device("Tesla T4"))
    rows = 2 * len(NEW) * model.config.hidden_size
    assert more.num_trainable_parameters == plain.num_trainable_parameters + rows
    assert more.memory.peak_allocated_bytes > plain.memory.peak_allocated_bytes
