"""Audits that compare two ways to the same values, each on a fault made on purpose and on its healthy twin."""

from __future__ import annotations

import types

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.diagnose.audit import Subject
from workbench.diagnose.audit.equivalence import (
    accumulation_adds_up,
    adapter_reads_back,
    checkpointing_is_transparent,
    one_scaler,
)


def tiny_model(seed: int = 0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, use_cache=False, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def rows(*lengths: int):
    made = []
    for number, length in enumerate(lengths):
        ids = [(number + 3 * place) % 63 + 1 for place in range(length)]
        made.append({"input_ids": ids, "labels": list(ids), "attention_mask": [1] * length})
    return made


def adapted():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def test_sound_checkpointing_is_silent_and_a_broken_one_is_found():
    model = tiny_model()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    subject = Subject(model=model, dataset=rows(9, 12))
    assert checkpointing_is_transparent(subject) is None
    layer = model.model.layers[1].mlp
    plain, calls = layer.forward, [0]

    def drifts(hidden):
        """What a layer with a state of its own does: the second time is not the first."""
        calls[0] += 1
        return plain(hidden * (1.0 if calls[0] % 2 else 3.0))

    layer.forward = drifts
    found = checkpointing_is_transparent(subject)
    assert found is not None and found.cause == "training.checkpointing_differs"
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("by_tokens", [True, False])
def test_accumulation_is_compared_in_gradients(by_tokens):
    model = tiny_model()

    def loss(batch, count):
        return model(**batch, **({"num_items_in_batch": count} if by_tokens else {})).loss

    found = accumulation_adds_up(Subject(model=model, dataset=rows(4, 40), loss=loss, accumulation=4))
    assert (found is None) == by_tokens
    if found is not None:
        assert found.cause == "training.accumulation" and found.evidence["supervised_tokens"] == (3, 39)
    one = Subject(model=model, dataset=rows(4, 40), loss=loss, accumulation=1)
    assert accumulation_adds_up(one) is None


def test_an_adapter_is_read_back_by_value(tmp_path):
    model = adapted()
    assert adapter_reads_back(Subject(model=model)) is None
    model.save_pretrained(tmp_path)
    assert adapter_reads_back(Subject(model=model, saved_folder=tmp_path)) is None
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    save_file({**tensors, name: tensors[name] + 1.0}, path)
    found = adapter_reads_back(Subject(model=model, saved_folder=tmp_path))
    assert found is not None and found.cause == "save.read_back"
    assert found.where["parameter"] == name and found.evidence["num_wrong"] == 1


def test_saving_that_writes_other_values_is_found_before_the_run():
    """As a state_dict that is overridden for another purpose does."""
    model = adapted()
    plain = model.save_pretrained

    def rounds(folder, **options):
        plain(folder, **options)
        path = f"{folder}/adapter_model.safetensors"
        save_file({key: value.half().float() for key, value in load_file(path).items()}, path)

    model.save_pretrained = rounds
    found = adapter_reads_back(Subject(model=model))
    assert found is not None and found.cause == "save.read_back"


def test_two_scalers_are_one_too_many():
    scaler = torch.amp.GradScaler("cpu")
    half = types.SimpleNamespace(fp16=True)
    assert one_scaler(Subject(args=half, scaler=scaler)).cause == "training.double_scaler"
    assert one_scaler(Subject(args=types.SimpleNamespace(fp16=False), scaler=scaler)) is None
    assert one_scaler(Subject(args=half, scaler=torch.amp.GradScaler("cpu", enabled=False))) is None


def test_checkpointing_that_cuts_gradients_off_is_left_to_the_audit_of_gradients():
    """Reentrant checkpointing on frozen inputs gives some parameters no gradient: two lengths, and no crash."""
    from peft import LoraConfig, get_peft_model

    # The head lies above the checkpointed layers: its adapter gets a gradient, theirs do not.
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.disable_input_require_grads()
    assert checkpointing_is_transparent(Subject(model=model)) is None
