"""watch() on a transformers Trainer: raw loss, blocked update, leaks of callbacks, out of memory, and a clean run."""

import tempfile
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import workbench


def make(cls: type[Trainer] = Trainer, *, steps: int = 6, **options: Any) -> Trainer:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64)  # fmt: skip
    ids = torch.randint(0, 64, (24, 12), generator=torch.Generator().manual_seed(0)).tolist()
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=steps, per_device_train_batch_size=2, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ids]
    return cls(model=LlamaForCausalLM(config), args=arguments, train_dataset=rows, **options)


class NanAtThird(Trainer):
    """Loses its loss once."""

    calls = 0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.calls += 1
        return loss * float("nan") if self.calls == 3 else loss


class Collector(TrainerCallback):
    """Keeps a copy of the output head at every step."""

    def __init__(self) -> None:
        self.copies: list[torch.Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.copies.append(model.lm_head.weight.detach().clone())


def test_a_healthy_run_has_no_findings_and_ends_with_the_weights_of_a_bare_one() -> None:
    watched, bare = make(steps=20), make(steps=20)
    w = workbench.watch(watched, look="now")
    watched.train()
    bare.train()
    assert w.findings == []
    assert w.memory_verdict is not None and not w.memory_verdict.is_fault
    pairs = zip(watched.model.parameters(), bare.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_nan_that_the_log_hides_is_seen_and_kept_from_the_weights() -> None:
    trainer = make(NanAtThird)
    w = workbench.watch(trainer)
    trainer.train()
    assert "nonfinite.hidden_by_filter" in [finding.cause for finding in w.findings]
    assert w.findings[0].where["step"] == 3
    assert all(bool(torch.isfinite(parameter).all()) for parameter in trainer.model.parameters())


def test_a_callback_that_collects_is_named_with_its_attribute() -> None:
    trainer = make(steps=24, callbacks=[Collector()])
    w = workbench.watch(trainer, look="now")
    trainer.train()
    (finding,) = w.findings
    assert finding.cause == "leak.kept_tensors"
    assert finding.where["object"].endswith(".copies")
    assert finding.evidence["bytes_per_step"] == pytest.approx(64 * 32 * 4, rel=0.01)


def test_an_out_of_memory_error_leaves_train_with_a_complete_finding() -> None:
    trainer = make()
    w = workbench.watch(trainer, limit="200 KiB")
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    (finding,) = w.findings
    assert finding.kind == "oom" and finding.where["phase"] in ("forward", "backward", "optimizer")


def test_closing_gives_the_trainer_its_methods_back() -> None:
    trainer = make()
    w = workbench.watch(trainer)
    w.close()
    assert trainer.train.__func__ is Trainer.train
    assert "_Borders" not in [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
