"""Encoder-decoders of two families: a few real steps teach them, the result loads again, the loss is transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.components import tiny_llama
from workbench.components.collator import build_collator
from workbench.components.data import prepare_data
from workbench.components.loss import compute_loss
from workbench.components.model import build_model
from workbench.components.source import find_source, load_tokenizer
from workbench.estimate import estimate_run
from workbench.hardware import find_device, read_device
from workbench.observe.recorder import Recorder
from workbench.recipe import Recipe
from workbench.train.session import Session

COLOURS = ("red", "green", "blue")


def _t5(tokenizer: Any) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=len(tokenizer), d_model=32, d_kv=16, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=2,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
            decoder_start_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip


def _bart(tokenizer: Any) -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=len(tokenizer), d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=128,
            pad_token_id=tokenizer.pad_token_id, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
            decoder_start_token_id=tokenizer.eos_token_id, forced_eos_token_id=None,
        )
    )  # fmt: skip


@pytest.fixture(params=[_t5, _bart], ids=["t5", "bart"])
def recipe(request: pytest.FixtureRequest, tmp_path: Path) -> Recipe:
    """Return a run of a saved model on pairs of different lengths."""
    tokenizer = tiny_llama.build_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        request.param(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [
        {"prompt": f"say {colour} {'now ' * (index % 3)}{index}", "completion": " ".join([colour] * (1 + index % 3))}
        for index in range(30)
        for colour in COLOURS
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return Recipe().with_changes(
        {
            "model.name_or_path": str(tmp_path / "model"),
            "model.task": "seq2seq-lm",
            "data.name_or_path": str(tmp_path / "rows.jsonl"),
            "data.max_length": 32,
            "training.max_steps": 12,
            "training.learning_rate": 2e-2,
            "training.per_device_train_batch_size": 8,
            "training.gradient_accumulation_steps": 1,
        }
    )


def _base(recipe: Recipe) -> Any:
    from transformers import AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM.from_pretrained(recipe.model.name_or_path).eval()


def _batch(recipe: Recipe) -> dict[str, torch.Tensor]:
    tokenizer = load_tokenizer(find_source(recipe, for_training=True))
    data = prepare_data(recipe, tokenizer)
    return build_collator(recipe, tokenizer)([data.train[index] for index in range(8)])


def _loss(recipe: Recipe, model: Any, batch: dict[str, torch.Tensor]) -> float:
    with torch.no_grad():
        return float(compute_loss(recipe, model, batch, None))


def test_the_loss_is_that_of_transformers(recipe: Recipe) -> None:
    model, batch = _base(recipe), _batch(recipe)
    assert (batch["labels"] == -100).any() and batch["labels"].shape != batch["input_ids"].shape
    with torch.no_grad():
        expected = float(model(**batch).loss)
    assert _loss(recipe, model, batch) == pytest.approx(expected, rel=1e-5)


# An adapter of rank 16 moves a random model less than all its weights do in as many steps.
@pytest.mark.parametrize(("method", "least_fall"), [("lora", 0.2), ("none", 2.0)])
def test_a_few_steps_teach_it_and_the_result_loads_again(
    recipe: Recipe, tmp_path: Path, method: str, least_fall: float
) -> None:
    recipe = recipe.with_changes({"adapter.method": method})
    session, recorder = Session(recipe, run_dir=tmp_path / "run"), Recorder(tmp_path / "run")
    session.add_observer(recorder)
    session.start().wait(120)
    assert session.state == "done" and session.result_dir is not None
    losses = [float(value) for value in recorder.history.column("loss")]
    assert len(losses) == 12 and losses[0] - sum(losses[-3:]) / 3 > least_fall
    if method == "lora":
        from peft import PeftModel

        assert json.loads((session.result_dir / "adapter_config.json").read_text())["task_type"] == "SEQ_2_SEQ_LM"
        trained: Any = PeftModel.from_pretrained(_base(recipe), session.result_dir).eval()
    else:
        trained = _base(recipe.with_changes({"model.name_or_path": str(session.result_dir)}))
    batch = _batch(recipe)
    assert _loss(recipe, _base(recipe), batch) - _loss(recipe, trained, batch) > least_fall


def test_an_estimate_is_made_of_the_model_that_trains(recipe: Recipe) -> None:
    estimate = estimate_run(recipe, find_device("Tesla T4"))
    model = build_model(recipe, find_source(recipe, for_training=True), read_device("cpu"), place="cpu")
    assert estimate.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert estimate.num_trainable_parameters == trainable > 0
    longer = estimate_run(recipe.with_changes({"data.max_length": 96}), find_device("Tesla T4"))
    assert longer.memory.peak_allocated_bytes > estimate.memory.peak_allocated_bytes
