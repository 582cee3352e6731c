"""Packed samples do not see each other: measured on the logits, not only on the masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from workbench.components import tiny_llama
from workbench.components.collator import Collator
from workbench.components.packing import join_samples

GENERATOR = np.random.default_rng(0)
SAMPLES = [GENERATOR.integers(3, 1000, size=size).astype(np.int32) for size in (11, 17, 5, 9)]


@pytest.fixture(params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest) -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    config = tiny_llama.config()
    config._attn_implementation = request.param
    config.use_cache = False
    return LlamaForCausalLM(config).train()


def pack(*samples: np.ndarray) -> dict[str, np.ndarray]:
    ids, labels, positions = join_samples([(sample, sample) for sample in samples])
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def logits(model: Any, *sequences: dict[str, np.ndarray]) -> torch.Tensor:
    batch = Collator(pad_token_id=0)(sequences)
    with torch.no_grad():
        return model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits


def test_changing_a_sample_does_not_move_its_neighbours(model: Any) -> None:
    first, second, third, _ = SAMPLES
    before = logits(model, pack(first, second, third))
    changed = logits(model, pack((first + 1) % 1000, second, third))
    assert torch.equal(before[:, 11:], changed[:, 11:])
    assert not torch.allclose(before[:, :11], changed[:, :11])
    after = logits(model, pack(first, (second + 1) % 1000, third))
    assert torch.equal(before[:, 28:], after[:, 28:])
    assert torch.equal(before[:, :11], after[:, :11])


def test_packed_logits_are_those_of_each_sample_alone(model: Any) -> None:
    """Also in a batch of two sequences of unequal length, where one is padded without a mask."""
    first, second, third, fourth = SAMPLES
    together = logits(model, pack(first, second), pack(third, fourth))
    alone = [logits(model, {"input_ids": s, "labels": s}) for s in (first, second, third, fourth)]
    assert torch.allclose(together[0, :11], alone[0][0], atol=1e-5)
    assert torch.allclose(together[0, 11:28], alone[1][0], atol=1e-5)
    assert torch.allclose(together[1, :5], alone[2][0], atol=1e-5)
    assert torch.allclose(together[1, 5:14], alone[3][0], atol=1e-5)
    assert torch.isfinite(together).all()


def test_packed_loss_and_gradient_are_those_of_the_padded_batch(model: Any) -> None:
    """Sum over tokens divided by their number: 4 padded rows and 2 packed sequences are the same step."""
    samples = [{"input_ids": sample, "labels": sample.copy()} for sample in SAMPLES]
    for sample in samples:
        sample["labels"][0] = -100
    collate = Collator(pad_token_id=0)
    count = sum(len(sample) - 1 for sample in SAMPLES)
    results = []
    for batch in (collate(samples), collate([pack(*SAMPLES[:2]), pack(*SAMPLES[2:])])):
        model.zero_grad()
        loss = model(**batch, num_items_in_batch=count).loss
        loss.backward()
        results.append((loss.item(), model.lm_head.weight.grad.clone()))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-6)


def test_an_attention_mask_would_break_it(model: Any) -> None:
    """Why the Collator leaves the mask out: with one, transformers does not look for borders."""
    first, second, _, _ = SAMPLES
    batch = Collator(pad_token_id=0)([pack(first, second)])
    mask = torch.ones_like(batch["input_ids"])
    with torch.no_grad():
        masked = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], attention_mask=mask).logits
    assert not torch.allclose(masked[:, 11:], logits(model, pack(first, second))[:, 11:], atol=1e-3)
