"""A loop of your own, watched: faults that are switched on are named, healthy loops are not, crashes leave findings."""

import contextlib
import gc
import sys
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import workbench
from workbench import clinic
from workbench.pipeline.signals import rises
from workbench.pipeline.watching import Watch


@pytest.fixture(scope="module", autouse=True)
def older_objects_stand_aside():
    """Keep what is alive before this file out of its many collections: each would take a second after other tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Tiny(nn.Module):
    """An embedding and two layers; returns a mapping with loss and logits as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(50, 16), nn.Linear(16, 32), nn.Linear(32, 50)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.relu(self.up(self.embed(input_ids))))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def batch_of(step: int, length: int = 8) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 50, (4, length), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.clone()}


def run(watch: Watch, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 26, keep=None) -> Watch:
    with watch as w:
        for step in range(steps):
            batch = batch_of(step)
            loss = model(**batch)["loss"]
            if loss.requires_grad:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
            if keep is not None:
                keep(loss)
            w.step(loss=loss, batch=batch)
    return w


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Tiny()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def causes(w: Watch) -> list[str]:
    return [finding.cause for finding in w.findings]


def test_a_healthy_loop_has_no_findings_and_says_what_was_watched() -> None:
    model, optimizer = make()
    w = run(workbench.watch(model, optimizer, look="now"), model, optimizer)
    assert w.findings == []
    assert w.memory_verdict is not None and w.memory_verdict.cause == "memory.clean"
    assert "Watched 26 steps" in w.report()


CHECKED = {"model.no_trainable", "model.optimizer_misses"}


@pytest.mark.parametrize("cause", [name for name in clinic.switches() if name not in CHECKED])
def test_each_fault_of_the_clinic_is_named_by_the_watch(cause: str) -> None:
    model, optimizer = make()
    watch = workbench.watch(model, optimizer, look="now")
    with clinic.switch_on(cause, model, optimizer, at_step=8) as fault:  # a name, so that its holder has one
        if cause == "data.ids_out_of_range":
            with pytest.raises(IndexError):
                run(watch, model, optimizer)
        else:
            run(watch, model, optimizer)
    assert fault.num_forwards > 0
    assert cause in causes(watch), watch.report()


@pytest.mark.parametrize("cause", sorted(CHECKED))
def test_faults_of_the_set_up_are_named_by_the_check(cause: str) -> None:
    model, optimizer = make()
    with clinic.switch_on(cause, model, optimizer):
        assert [f.cause for f in workbench.check({"model": model, "optimizer": optimizer})] == [cause]
    assert workbench.check({"model": model, "optimizer": optimizer}) == []


def test_the_clinic_leaves_the_model_as_it_was() -> None:
    model, optimizer = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for cause in clinic.switches():
        with clinic.switch_on(cause, model, optimizer):
            pass
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_holder_and_the_line_of_a_leak_are_named() -> None:
    model, optimizer = make()
    meter = SimpleNamespace(history=[])
    w = run(
        workbench.watch(model, optimizer, look="now"), model, optimizer, keep=lambda loss: meter.history.append(loss)
    )
    (finding,) = w.findings
    assert finding.cause == "leak.graph_kept"
    assert "history" in finding.where["object"]
    assert finding.evidence["nodes_per_step"] > 0


def test_a_bounded_deque_is_no_leak() -> None:
    model, optimizer = make()
    recent: deque[torch.Tensor] = deque(maxlen=100)
    w = run(
        workbench.watch(model, optimizer, look="now"), model, optimizer, keep=lambda loss: recent.append(loss.detach())
    )
    assert w.findings == []
    assert w.memory_verdict is not None and w.memory_verdict.cause == "memory.bounded_buffer"


def test_a_nan_gradient_never_reaches_the_weights() -> None:
    model, optimizer = make()
    with workbench.watch(model, optimizer) as w:
        for step in range(6):
            batch = batch_of(step)
            loss = model(**batch)["loss"]
            if step == 3:
                loss = loss * float("nan")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            w.step(loss=loss, batch=batch)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    assert w.findings[0].kind == "nonfinite" and w.findings[0].evidence["update_blocked"]
    assert not optimizer._optimizer_step_pre_hooks and not model._forward_hooks


def test_watching_changes_no_weight() -> None:
    def train(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model, optimizer = make()
        if watched:
            run(workbench.watch(model, optimizer, look="now"), model, optimizer)
        else:
            for step in range(26):
                model(**batch_of(step))["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
        return list(model.parameters())

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))


def test_an_out_of_memory_error_is_explained_after_it_has_left_the_block() -> None:
    model, optimizer = make()
    watch = workbench.watch(model, optimizer, limit="48 KiB")
    with pytest.raises(torch.OutOfMemoryError):
        run(watch, model, optimizer)
    (finding,) = watch.findings
    assert finding.kind == "oom"
    assert finding.where["op"] and finding.evidence["requested_bytes"] > 0
    assert finding.where["line"].startswith(__file__)


def test_twenty_runs_out_of_memory_in_one_process_come_back_to_rest() -> None:
    levels = []
    for _ in range(20):
        model, optimizer = make()
        watch = workbench.watch(model, optimizer, limit="48 KiB")
        with contextlib.suppress(torch.OutOfMemoryError):
            run(watch, model, optimizer)
        del model, optimizer, watch
        report = workbench.release({})
        levels.append(report.left_bytes)
    assert max(levels[2:]) <= levels[1]


def test_release_frees_what_a_kept_exception_holds_and_says_so() -> None:
    def fail() -> None:
        activations = torch.zeros(1024, 1024)
        raise ValueError(str(activations.shape))

    kept = []
    try:
        fail()
    except ValueError as error:
        kept.append(error)
    gc.collect()
    report = workbench.release({})
    assert report.freed_bytes >= 4 * 1024 * 1024
    assert any(finding.cause == "release.exception" and "fail" in finding.summary for finding in report.findings)
    assert "Freed 4 MiB" in str(report)
    assert not hasattr(sys, "last_value")


def test_a_level_that_follows_the_tokens_rouses_no_suspicion() -> None:
    tokens = [10, 40, 20, 80, 30, 60, 25, 70]
    steps = list(range(8))
    assert not rises([1000 * count for count in tokens], steps, tokens)
    assert rises([1000 * count + 500 * step for count, step in zip(tokens, steps, strict=True)], steps, tokens)
    assert not rises([5000] * 8, steps, [10] * 8)


def test_wrong_arguments_are_answered_with_what_is_allowed() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        workbench.watch("model")
    with pytest.raises(ValueError, match="'auto', 'now' and 'never'"):
        workbench.watch(nn.Linear(1, 1), look="always")
    with pytest.raises(ValueError, match="allowed are"):
        workbench.check({"modell": None})
