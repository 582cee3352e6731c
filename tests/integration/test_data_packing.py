"""Packed samples do not see each other: measured on the logits, not only on the masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from workbench.components import tiny_llama
from workbench.components.collator import Collator
from workbench.components.packing import ISOLATING_MODEL_TYPES, join_samples

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


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 4,
    "vocab_size": 1000,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "moe_intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_DROPOUT = ("hidden_dropout", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")


@pytest.mark.parametrize("model_type", sorted(ISOLATING_MODEL_TYPES))
def test_every_model_type_of_the_list_keeps_samples_apart(model_type: str) -> None:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    config_class = CONFIG_MAPPING[model_type]
    known = set(vars(config_class())) | {"hidden_size"}
    values = {name: value for name, value in SMALL.items() if name in known} | dict.fromkeys(NO_DROPOUT, 0.0)
    if "head_dim" in known:
        values["head_dim"] = 16
    config = config_class.from_dict(values)
    config.use_cache = False
    implementations = ["eager"]
    if MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_sdpa:
        implementations.append("sdpa")
    for implementation in implementations:
        torch.manual_seed(0)
        small = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).float().train()
        first, second, third, _ = SAMPLES
        packed = logits(small, pack(first, second, third))
        changed = logits(small, pack((first + 1) % 997, second, third))
        # Experts compute tokens of all samples together, in groups whose size changes the rounding.
        assert torch.allclose(packed[:, 11:], changed[:, 11:], atol=1e-5), implementation
        assert not torch.equal(packed[:, :11], changed[:, :11]), implementation
        alone = logits(small, {"input_ids": second, "labels": second})
        assert torch.allclose(packed[0, 11:28], alone[0], atol=1e-4), implementation
