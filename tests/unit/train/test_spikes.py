"""Steps whose loss stands out: found, told with their rows, left out or damped, and known after a resume."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.train import spikes as spikes_module
from workbench.train.run_folder import list_checkpoints
from workbench.train.spikes import MIN_STEPS, WINDOW_STEPS, SpikeDetector, begin_of, spike_event

from .parts import rows_of, small_recipe


def seen(losses, factor=6.0, norm=2.0):
    detector = SpikeDetector(factor)
    for loss in losses:
        detector.record(loss, norm)
    return detector


STEADY = [2.0 + 0.1 * (-1) ** step for step in range(WINDOW_STEPS)]  # Median 2.0, MAD 0.1.


def test_a_spike_lies_above_median_and_deviations():
    detector = seen(STEADY)
    limit = 2.0 + 6 * 1.4826 * 0.1
    assert detector.judge(limit - 1e-6, 2.0) is None
    spike = detector.judge(limit + 1e-6, 8.0)
    assert (spike.median, spike.limit) == pytest.approx((2.0, limit))
    assert spike.damping == pytest.approx(0.25)
    assert detector.judge(3.0, 1.0).damping == 1.0  # Damping never makes a gradient larger.
    assert seen(STEADY, factor=20.0).judge(limit + 1e-6, 2.0) is None


def test_the_first_steps_are_not_judged():
    assert seen(STEADY[: MIN_STEPS - 1]).judge(100.0, 1.0) is None
    assert seen(STEADY[:MIN_STEPS]).judge(100.0, 1.0) is not None


def test_what_is_not_finite_or_learns_nothing_stays_out_of_the_window():
    detector = seen(STEADY)
    before = detector.state()
    detector.record(None, 1.0)
    detector.record(math.nan, 1.0)
    detector.record(1.0, math.inf)
    assert detector.state() == before


def test_a_loss_that_no_longer_moves_has_no_spikes_in_its_last_digits():
    assert seen([1.5] * WINDOW_STEPS).judge(1.5 + 1e-6, 1.0) is None
    assert seen([1.5] * WINDOW_STEPS).judge(1.6, 1.0) is not None


def test_a_new_level_becomes_the_usual_one():
    detector = seen(STEADY)
    answers = []
    for step in range(WINDOW_STEPS):
        loss = 5.0 + 0.1 * (-1) ** step
        answers.append(detector.judge(loss, 2.0) is not None)
        detector.record(loss, 2.0)
    assert answers[0] and not any(answers[WINDOW_STEPS // 2 + 1 :])


def test_a_resumed_detector_is_the_same():
    detector, other = seen(STEADY), SpikeDetector(6.0)
    detector.num_spikes, detector.num_skipped = 3, 2
    other.restore(detector.state())
    assert other.state() == detector.state()
    assert other.judge(4.0, 9.0) == detector.judge(4.0, 9.0)
    other.restore(None)
    assert other.judge(4.0, 9.0) is None


def test_an_event_names_rows_and_what_was_done():
    spike = seen(STEADY).judge(4.0, 8.0)
    told = spike_event(spike, "damp", 7, range(20), ["a"])
    assert told["rows"] == list(range(20))
    assert "scaled by 0.25" in told["message"] and "14, 15 and 4 more" in told["message"]
    assert spike_event(spike, "skip", 7, [3], [])["damping"] == 1.0


def test_a_row_begins_as_plain_text():
    class Tokenizer:
        def decode(self, ids):
            return "<b>\x1b[31m\n" + "x" * len(ids)

    assert begin_of({"input_ids": list(range(500))}, Tokenizer()) == "<b> [31m " + "x" * 51
    assert begin_of({"input_ids": [1]}, object()) == ""


NOISY = 13  # Number of the sample that stands out.


def _run(tiny, monkeypatch, policy, steps=16, **options):
    """Train on samples of one token each time, among them one of random tokens, with judging from step 4 on."""
    monkeypatch.setattr(spikes_module, "MIN_STEPS", 4)
    after = []

    def prepare(run):
        def change(sample, index):
            ids = sample["input_ids"] if index == NOISY else [7] * len(sample["input_ids"])
            return {"input_ids": ids, "labels": ids}

        run.data.train = rows_of(22, shortest=20).map(change, with_indices=True)
        run.tokenizer.decode = lambda ids: " ".join(map(str, ids))
        trainable = [p for p in run.model.parameters() if p.requires_grad]
        run.optimizer.register_step_post_hook(lambda *args: after.append([p.detach().clone() for p in trainable]))

    recipe = small_recipe(
        policies__on_spike=policy,
        training__max_steps=steps,
        training__gradient_accumulation_steps=1,
        training__learning_rate=3e-2,
        training__max_grad_norm=0.0,
        adapter__method="none",
    )
    recipe = recipe.with_changes(options.pop("changes", {}))
    session = tiny(recipe, prepare=prepare, **options).start().wait(120)
    assert session.state == "done"
    return session, after


def _same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_spike_is_told_with_its_rows_and_learned_from(tiny, monkeypatch):
    session, after = _run(tiny, monkeypatch, "keep")
    told = [event for event in session.log.of("spike") if NOISY in event["rows"]]
    assert told
    event = told[0]
    assert len(event["rows"]) == 2
    assert event["loss"] == session.log.of("step")[event["step"] - 1]["loss"] > event["limit"]
    assert event["texts"][1 - event["rows"].index(NOISY)].startswith("7 7 7")
    assert not _same(after[event["step"] - 2], after[event["step"] - 1])


def test_skip_leaves_the_update_out_and_counts(tiny, monkeypatch):
    session, after = _run(tiny, monkeypatch, "skip")
    events = session.log.of("spike")
    assert [event["num_skipped"] for event in events] == list(range(1, len(events) + 1))
    skipped = {event["step"] for event in events}
    assert any(NOISY in event["rows"] for event in events)
    same = {step for step in range(2, 17) if _same(after[step - 2], after[step - 1])}
    assert same == skipped


def test_damp_brings_the_gradients_to_the_usual_norm(tiny, monkeypatch):
    """With plain SGD an update is the learning rate times the gradients, whose norm can be read off the weights."""
    changes = {"training.optim": "sgd", "training.lr_scheduler_type": "constant", "training.learning_rate": 0.05}
    session, after = _run(tiny, monkeypatch, "damp", changes=changes)
    event = next(event for event in session.log.of("spike") if event["damping"] < 1)
    rows, step = session.log.of("step"), event["step"]
    moved = torch.stack([(a - b).norm() for a, b in zip(after[step - 1], after[step - 2], strict=True)]).norm()
    norms = sorted(row["grad_norm"] for row in rows[: step - 1])
    usual = (norms[(step - 2) // 2] + norms[(step - 1) // 2]) / 2
    assert float(moved) / 0.05 == pytest.approx(usual, rel=1e-3)
    assert rows[step - 1]["grad_norm"] > usual


def test_the_window_goes_on_after_a_resume(tiny, monkeypatch):
    whole, _ = _run(tiny, monkeypatch, "skip", run_dir="whole")
    spike = whole.log.of("spike")[0]["step"]
    changes = {"training.save_steps": spike - 1, "training.save_total_limit": None}
    first, _ = _run(tiny, monkeypatch, "skip", run_dir="parts", changes=changes)
    checkpoint = list_checkpoints(first.run_dir)[0]
    assert checkpoint.name == f"step-{spike - 1:06d}"
    rest, _ = _run(tiny, monkeypatch, "skip", run_dir="rest", resume_from=checkpoint)
    assert rest.log.of("spike") == whole.log.of("spike")
    assert [row["loss"] for row in rest.log.of("step")] == [row["loss"] for row in whole.log.of("step")][spike - 1 :]
