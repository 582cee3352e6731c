"""Both ways to compute the loss are transformers' own loss, in value and gradient."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
)
from transformers.loss.loss_utils import ForCausalLMLoss

from workbench.components import loss as loss_module
from workbench.components.loss import compute_loss, count_items, require_plain_head
from workbench.components.model import build_model
from workbench.errors import ModelError

from .tiny import CPU, batch_of, recipe_with, tiny_config, tiny_source

NLL, CHUNKED = recipe_with({"training.loss_type": "nll"}), recipe_with({"training.loss_type": "chunked_nll"})


def _gradients(recipe, model, batch, num_items):
    model.zero_grad()
    loss = compute_loss(recipe, model, batch, num_items)
    loss.backward()
    assert loss.dtype is torch.float32
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(tie_word_embeddings=True))


@pytest.mark.parametrize("num_items", [None, 7, torch.tensor(7)])
def test_nll_is_the_loss_of_transformers(llama, num_items):
    batch = batch_of()
    logits = llama(input_ids=batch["input_ids"]).logits
    expected = ForCausalLMLoss(logits, batch["labels"], logits.shape[-1], num_items_in_batch=num_items)
    assert torch.equal(compute_loss(NLL, llama, batch, num_items), expected)


@pytest.mark.parametrize("num_items", [None, 7])
@pytest.mark.parametrize("chunk", [3, 256])
def test_chunked_equals_whole_in_value_and_gradient(llama, monkeypatch, num_items, chunk):
    monkeypatch.setattr(loss_module, "CHUNK_TOKENS", chunk)
    batch = batch_of(rows=3)
    whole, whole_gradients = _gradients(NLL, llama, batch, num_items)
    chunked, chunked_gradients = _gradients(CHUNKED, llama, batch, num_items)
    torch.testing.assert_close(whole, chunked)
    assert whole_gradients.keys() == chunked_gradients.keys()
    for name, gradient in whole_gradients.items():
        torch.testing.assert_close(gradient, chunked_gradients[name], msg=name)


def test_chunked_never_holds_all_logits(llama, monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_TOKENS", 4)
    rows = []
    llama.lm_head.register_forward_hook(lambda module, args, out: rows.append(out.numel() // out.shape[-1]))
    batch = batch_of(rows=2, length=12, prompt=4)
    compute_loss(CHUNKED, llama, batch, 16).backward()
    supervised = count_items([batch])
    assert max(rows) == 4
    assert sum(rows) == 2 * supervised  # Each supervised token once in forward, once again in backward; no other one.


def test_chunked_goes_through_adapters_quantization_and_an_adapted_head(tmp_path):
    for changes in ({}, {"quantization.load_in_4bit": True}, {"adapter.target_modules": ("q_proj", "lm_head")}):
        results = []
        for kind in ("nll", "chunked_nll"):
            recipe = recipe_with({**changes, "training.loss_type": kind})
            torch.manual_seed(1)
            model = build_model(recipe, tiny_source(tmp_path), CPU, place="cpu")
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.02)  # Zero at the start: nothing would reach lora_A.
            results.append(_gradients(recipe, model, batch_of(), 5))
        (whole, whole_gradients), (chunked, chunked_gradients) = results
        torch.testing.assert_close(whole, chunked)
        assert whole_gradients
        for name, gradient in whole_gradients.items():
            torch.testing.assert_close(gradient, chunked_gradients[name], msg=name)


_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (Gemma2ForCausalLM, Gemma2Config(**_SMALL, head_dim=16, final_logit_softcapping=0.1, pad_token_id=0)),
        (CohereForCausalLM, CohereConfig(**_SMALL, logit_scale=0.5, pad_token_id=0, bos_token_id=1, eos_token_id=2)),
        (GraniteForCausalLM, GraniteConfig(**_SMALL, logits_scaling=3.0, pad_token_id=0)),
    ],
)
def test_heads_that_change_their_logits_are_followed(model_class, config):
    torch.manual_seed(0)
    model = model_class(config)
    require_plain_head(model)
    batch = {name: value % 64 for name, value in batch_of().items()}
    batch["labels"] = batch["input_ids"].clone()
    whole, whole_gradients = _gradients(NLL, model, batch, None)
    chunked, chunked_gradients = _gradients(CHUNKED, model, batch, None)
    torch.testing.assert_close(whole, chunked)
    for name, gradient in whole_gradients.items():
        torch.testing.assert_close(gradient, chunked_gradients[name], msg=name, rtol=1e-4, atol=1e-6)


def test_an_unknown_head_is_refused_before_the_run(llama):
    original = llama.forward

    def squared(*args, **kwargs):
        outputs = original(*args, **kwargs)
        outputs.logits = outputs.logits.square()
        return outputs

    llama.forward = squared
    with pytest.raises(ModelError, match=r"training\.loss_type=nll"):
        require_plain_head(llama)


def test_no_supervised_token_gives_zero_and_zero_gradients(llama):
    batch = batch_of()
    batch["labels"].fill_(-100)
    for recipe in (NLL, CHUNKED):
        loss, gradients = _gradients(recipe, llama, batch, 1)
        assert float(loss) == 0.0
        assert all(float(gradient.abs().max()) == 0.0 for gradient in gradients.values())


def test_items_are_counted_after_the_shift():
    labels = torch.tensor([[5, -100, 6, 7], [-100, -100, -100, 8]])
    assert count_items([{"labels": labels}, {"labels": labels[:1]}]) == 3 + 2


def test_models_without_loss_arguments_are_normalised_over_the_step(llama):
    class Foreign(LlamaForCausalLM):
        accepts_loss_kwargs = False

    foreign = Foreign(tiny_config(tie_word_embeddings=True))
    foreign.load_state_dict(llama.state_dict())
    batch = batch_of()
    assert torch.equal(compute_loss(NLL, foreign, batch, 9), compute_loss(NLL, llama, batch, 9))


def test_a_model_of_images_learns_from_text_alone():
    from transformers import GitConfig, GitForCausalLM

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = GitForCausalLM(GitConfig(vocab_size=128, **text, vision_config={**vision, "image_size": 32})).eval()
    batch = batch_of()
    expected = ForCausalLMLoss(model(input_ids=batch["input_ids"]).logits, batch["labels"], 128, num_items_in_batch=9)
    assert torch.equal(compute_loss(NLL, model, batch, 9), expected)
