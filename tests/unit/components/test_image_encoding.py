"""Rows with images: where the images are, what is learned of the expanded text, and what a batch holds."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workbench.components.collator import build_collator
from workbench.components.data import prepare_data, preview_rows
from workbench.components.image_encoding import spread_labels
from workbench.components.loss import compute_loss
from workbench.components.model import build_model
from workbench.components.source import find_source, load_tokenizer
from workbench.errors import DataError
from workbench.recipe import Recipe

from .tiny import CPU
from .tiny_llava import COLOURS, save_llava, save_pictures


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def processor(llava: Path) -> Any:
    return load_tokenizer(find_source(recipe_of(llava, "unused"), for_training=False))


def recipe_of(model: Path, data: Path | str, **changes: Any) -> Recipe:
    return Recipe().with_changes(
        {"model.task": "image-text-to-text", "model.name_or_path": str(model), "data.name_or_path": str(data),
         "evaluation.split": "none", **changes}
    )  # fmt: skip


def chat(answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Which colour?"}, {"role": "assistant", "content": answer}]


def learned(processor: Any, row: Any) -> str:
    return processor.tokenizer.decode([token for token in row["labels"].tolist() if token != -100])


@pytest.mark.parametrize("kind", ["path", "list", "bytes", "data url", "inside the messages"])
def test_images_are_found_wherever_rows_hold_them(llava: Path, processor: Any, write_jsonl: Any, kind: str) -> None:
    path = write_jsonl({"text": "to be replaced"})
    save_pictures(path.parent)
    encoded = base64.b64encode((path.parent / "red.png").read_bytes()).decode()
    parts = [{"type": "image", "path": "red.png"}, {"type": "text", "text": "Which colour?"}]
    row: dict[str, Any] = {
        "path": {"image": "red.png", "messages": chat("red")},
        "list": {"images": ["red.png"], "messages": chat("red")},
        "bytes": {"image": {"path": str(path.parent / "red.png"), "bytes": None}, "messages": chat("red")},
        "data url": {"image": f"data:image/png;base64,{encoded}", "messages": chat("red")},
        "inside the messages": {"messages": [{"role": "user", "content": parts}, chat("red")[1]]},
    }[kind]
    recipe = recipe_of(llava, write_jsonl(row))
    data = prepare_data(recipe, processor)
    (sample,) = [data.train[index] for index in range(len(data.train))]
    assert (sample["input_ids"] == processor.image_token_id).sum() == 4
    assert learned(processor, sample) == "red<|im_end|>"
    batch = build_collator(recipe, processor)([sample])
    assert batch["pixel_values"].shape == (1, 3, 28, 28)
    red, green = batch["pixel_values"][0, 0].mean(), batch["pixel_values"][0, 1].mean()
    assert red > 1 > 0 > green


def test_rows_without_an_image_file_are_named(llava: Path, processor: Any, write_jsonl: Any) -> None:
    path = write_jsonl(
        {"image": "red.png", "messages": chat("red")},
        {"image": "gone.png", "messages": chat("red")},
        {"image": "notes.png", "messages": chat("red")},
        {"images": ["red.png", "red.png"], "messages": [{"role": "user", "content": "<image> or"}, chat("red")[1]]},
    )
    save_pictures(path.parent)
    (path.parent / "notes.png").write_text("no picture", encoding="utf-8")
    data = prepare_data(recipe_of(llava, path, **{"data.image_column": "image"}), processor)
    reasons = {row.line: row.reason for row in data.report.bad_rows}
    assert len(data.train) == 1
    assert "no image file 'gone.png'" in reasons[2] and "no image that can be read" in reasons[3]
    assert "1 places for images and 0 images" in reasons[4]


def test_an_image_is_never_cut(llava: Path, processor: Any, write_jsonl: Any) -> None:
    question = {"role": "user", "content": "Which of these colours is it? <image>"}
    path = write_jsonl({"image": "red.png", "messages": [question, chat("red")[1]]})
    save_pictures(path.parent)
    with pytest.raises(DataError, match="an image cannot be cut"):
        prepare_data(recipe_of(llava, path, **{"data.max_length": 8}), processor)


def test_texts_without_a_template_carry_the_image_in_front(llava: Path, processor: Any, write_jsonl: Any) -> None:
    path = write_jsonl({"image": "red.png", "prompt": "Colour: ", "completion": "red"})
    save_pictures(path.parent)
    data = prepare_data(recipe_of(llava, path), processor)
    sample = data.train[0]
    assert sample["input_ids"][:4].tolist() == [processor.image_token_id] * 4
    assert learned(processor, sample).strip() == "red<|im_end|>"


def test_the_preview_counts_image_tokens_instead_of_listing_them(llava: Path, processor: Any, write_jsonl: Any) -> None:
    path = write_jsonl({"image": "red.png", "messages": chat("red")})
    save_pictures(path.parent)
    row = preview_rows(recipe_of(llava, path), processor, 1)[0]
    assert row.num_images == 1 and ("[image: 4 tokens]", False) in row.tokens
    assert "".join(text for text, is_learned in row.tokens if is_learned) == "red<|im_end|>"


def test_a_batch_trains_and_the_picture_matters(llava: Path, processor: Any, write_jsonl: Any) -> None:
    path = write_jsonl(*[{"image": f"{name}.png", "messages": chat(name)} for name in COLOURS])
    save_pictures(path.parent)
    recipe = recipe_of(llava, path, **{"adapter.method": "none"})
    data = prepare_data(recipe, processor)
    batch = build_collator(recipe, processor)([data.train[index] for index in range(3)])
    model = build_model(recipe, find_source(recipe, for_training=True), CPU, place="cpu")
    loss = compute_loss(recipe, model, batch, None)
    loss.backward()
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0
    assert model.model.multi_modal_projector.linear_1.weight.grad.abs().sum() > 0
    with torch.no_grad():
        other = compute_loss(recipe, model, {**batch, "pixel_values": batch["pixel_values"].flip(0)}, None)
    assert not torch.equal(loss.detach(), other)


def test_labels_are_spread_over_expanded_images() -> None:
    image, fake = 9, 8
    narrow = np.array([1, image, 2, 3, 4, image, 2, 3, 5], dtype=np.int32)
    labels = np.array([-100, -100, -100, 3, 4, -100, -100, 3, 5], dtype=np.int32)
    wide = np.array([1, fake, image, image, fake, 2, 3, 4, fake, image, fake, 2, 3, 5], dtype=np.int32)
    found = spread_labels(narrow, labels, wide, narrow == image)
    assert found is not None
    assert found.tolist() == [-100] * 6 + [3, 4] + [-100] * 4 + [3, 5]
    assert spread_labels(narrow, labels, wide[:-1], narrow == image) is None
