from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workbench.components import tiny_llama
from workbench.components.source import ModelSource, find_source, load_tokenizer, model_names
from workbench.errors import ModelError
from workbench.recipe import Recipe

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}

pytestmark = pytest.mark.usefixtures("own_cache", "silent_hub")


def find(name: str, *, for_training: bool = False, **model: Any) -> ModelSource:
    return find_source(Recipe.from_dict({"model": {"name_or_path": name, **model}}), for_training=for_training)


def write_config(folder: Path, values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


def test_catalogue_names_need_no_hub(silent_hub: list[str]) -> None:
    for name in ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"):
        source = find(name)
        assert (source.kind, source.has_weights, source.path) == ("catalogue", False, None)
        assert source.config.num_hidden_layers == 32
        assert "llama3.1" in source.note
    assert silent_hub == []


def test_training_a_catalogue_model_asks_the_hub_once(silent_hub: list[str]) -> None:
    with pytest.raises(ModelError, match="the hub does not answer"):
        find("llama-3.1-8b", for_training=True)
    assert silent_hub == ["meta-llama/Llama-3.1-8B"]


def test_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(ModelError, match=r"Did you mean .*llama-3.1-8b"):
        find("llama-3.1-8bb")


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "a b c", "../../nowhere", "/nowhere", "x/y/z", "naïve/模型"]
)
def test_odd_names_are_only_text(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        find(name)
    assert repr(name) in str(caught.value)
    assert "no folder on this machine" in str(caught.value)


def test_config_only_folder_is_enough_to_estimate(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m", LLAMA)
    source = find(str(folder))
    assert (source.kind, source.has_weights, source.has_tokenizer) == ("folder", False, False)
    assert source.config.hidden_size == 64
    with pytest.raises(ModelError, match=r"holds no weights.*can only be estimated"):
        find(str(folder), for_training=True)
    with pytest.raises(ModelError, match="without a tokenizer"):
        load_tokenizer(source)


def test_a_config_file_itself_is_accepted(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m", LLAMA)
    assert find(str(folder / "config.json")).config.hidden_size == 64


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{\n"model_type": "llama",\n', "config.json, line 3 is not JSON"),
        ("[]", "holds a list, not a config"),
        ({"hidden_size": 8}, "has no model_type"),
        ({"model_type": "warpdrive"}, "model_type 'warpdrive', which this transformers does not know"),
        ({"model_type": "warpdrive", "auto_map": {"AutoConfig": "x.Y"}}, "needs the model's own Python code.*trust"),
        ({"model_type": "t5"}, "only causal language models"),
        ({"model_type": "bert"}, "describes an encoder"),
        ({**LLAMA, "hidden_size": "wide"}, "cannot be used .*hidden_size"),
        ({**LLAMA, "vocab_size": -5}, "vocab_size=-5; it must be a whole number above 0"),
        ({**LLAMA, "num_attention_heads": 5}, "not a multiple|do not divide"),
        ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads=3 does not divide"),
    ],
)
def test_broken_configs_are_one_sentence(tmp_path: Path, content: Any, expected: str) -> None:
    with pytest.raises(ModelError, match=expected) as caught:
        find(str(write_config(tmp_path / "m", content)))
    assert "\n" not in str(caught.value)


def test_folder_without_config_and_adapter_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config.json"):
        find(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds an adapter: give its base model"):
        find(str(tmp_path))


def test_missing_shards_and_pickles_are_named(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m", LLAMA)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"older .bin format"):
        find(str(folder), for_training=True)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").touch()
    with pytest.raises(ModelError, match=r"names model-2.safetensors, which is not there"):
        find(str(folder), for_training=True)


def test_inline_config(tmp_path: Path) -> None:
    source = find("anything", config=LLAMA)
    assert (source.kind, source.has_weights, source.config.hidden_size) == ("inline", False, 64)
    with pytest.raises(ModelError, match="known by its config only"):
        find("anything", config=LLAMA, for_training=True)
    with pytest.raises(ModelError, match=r"model.config has no model_type"):
        find("anything", config={"hidden_size": 1})


def test_tiny_llama_is_made_once_and_kept(own_cache: Path) -> None:
    before = find("tiny-llama")
    assert (before.kind, before.has_weights) == ("builtin", False)
    source = find("Tiny-Llama", for_training=True)
    assert source.has_weights
    assert source.path is not None
    assert Path(source.path).is_relative_to(own_cache)
    assert source.config.hidden_size == tiny_llama.config().hidden_size == before.config.hidden_size
    assert load_tokenizer(source).eos_token == "<|im_end|>"
    assert find("tiny-llama").path == source.path


@pytest.mark.parametrize("name", ["opt-1.3b", "mpt-7b", "gpt-oss-20b"])
def test_packing_is_refused_where_samples_would_see_each_other(name: str) -> None:
    recipe = Recipe().with_changes({"model.name_or_path": name, "data.packing": True})
    with pytest.raises(ModelError, match=r"packed samples are not known to be kept apart\. Set data\.packing=false"):
        find_source(recipe, for_training=False)
    assert find_source(recipe.with_changes({"model.name_or_path": "llama-3.1-8b"}), for_training=False)


def test_names_start_with_what_can_be_trained() -> None:
    names = model_names()
    assert names[:2] == ["smollm2-135m-instruct", "tiny-llama"]
    assert len(set(names)) == len(names) >= 27


def test_every_name_of_the_list_is_found() -> None:
    for name in model_names():
        assert find(name).config.vocab_size > 0


def test_a_model_of_several_language_models_is_refused_in_one_sentence() -> None:
    with pytest.raises(ModelError, match="musicgen model, which holds several language models"):
        find("music", config={"model_type": "musicgen"})


def test_a_model_that_continues_what_it_reads_is_no_encoder_decoder() -> None:
    assert find("summary", task="seq2seq-lm", config={"model_type": "t5"}).config.is_encoder_decoder
    with pytest.raises(ModelError, match="continues what it reads"):
        find("speech", task="seq2seq-lm", config={"model_type": "qwen2_audio"})
