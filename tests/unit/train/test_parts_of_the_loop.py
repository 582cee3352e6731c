"""Control, order of samples, counting, clock, publisher, frames, sentences."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from workbench.components.sampling import inverse_frequencies
from workbench.errors import DataError, MissingPackageError, NonFiniteError, RunError
from workbench.events import Event
from workbench.train import arguments as arguments_module
from workbench.train.arguments import training_arguments
from workbench.train.control import Control, StopRequested
from workbench.train.explain import as_run_error, sentence_of
from workbench.train.sampler import EpochSampler
from workbench.train.teardown import chain_of, drop_frames
from workbench.train.telemetry import Publisher, StepClock, TokenCounts, count_tokens

from ..components.tiny import CPU, GPU
from .parts import Log, collate, rows_of, small_recipe


def test_control_costs_nothing_until_asked():
    control = Control()
    assert control.check() == 0.0
    control.stop()
    with pytest.raises(StopRequested):
        control.check()


def test_control_stands_still_until_resumed():
    states, waited = [], []
    control = Control(states.append)
    control.pause()
    thread = threading.Thread(target=lambda: waited.append(control.check()))
    thread.start()
    time.sleep(0.1)
    assert states == [True]
    control.resume()
    thread.join(5)
    assert states == [True, False]
    assert waited[0] >= 0.09


def test_every_epoch_has_its_own_order_and_the_same_each_time():
    def order(epoch, seed=1):
        sampler = EpochSampler(20, seed)
        sampler.set_epoch(epoch)
        torch.rand(3)  # What the process draws in between does not matter.
        return list(sampler)

    assert order(0) == order(0)
    assert sorted(order(0)) == list(range(20))
    assert order(0) != order(1)
    assert order(0) != order(0, seed=2)


@pytest.mark.parametrize("count", [1, 7, 64, 1000])
def test_grouping_takes_every_sample_once_with_less_padding(count):
    lengths = torch.randint(5, 500, (count,), generator=torch.Generator().manual_seed(0)).tolist()

    def padding(order):
        batches = [order[start : start + 4] for start in range(0, count, 4)]
        return sum(max(lengths[i] for i in batch) * len(batch) for batch in batches) - sum(lengths)

    plain, grouped = EpochSampler(count, 3), EpochSampler(count, 3, lengths, batch_size=4)
    assert sorted(grouped) == list(range(count))
    assert len(grouped) == count
    if count >= 64:
        assert padding(list(grouped)) < 0.3 * padding(list(plain))
        assert lengths[next(iter(grouped))] == max(lengths)
        full = [[lengths[i] for i in list(grouped)[start : start + 4]] for start in range(0, 40, 4)]
        assert full != sorted(full, reverse=True)  # The batches themselves stay in random order.


def test_balanced_draws_are_a_function_of_seed_and_epoch_and_reach_the_rare_sample():
    probabilities = inverse_frequencies([0] * 99 + [1])

    def order(epoch, seed=1):
        sampler = EpochSampler(100, seed, probabilities=probabilities)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert order(0) != order(0, seed=2)
    assert len(order(0)) == 100
    drawn = [index for epoch in range(40) for index in order(epoch)]
    assert set(drawn) <= set(range(100))
    assert 0.46 < drawn.count(99) / len(drawn) < 0.54


def test_tokens_are_counted():
    batch = collate(list(rows_of(3)))
    counts = count_tokens(batch)
    real = sum(len(sample["input_ids"]) for sample in rows_of(3))
    assert counts.real == real
    assert counts.padding == batch["input_ids"].numel() - real > 0
    assert counts.supervised == int((batch["labels"][:, 1:] != -100).sum())
    assert counts + TokenCounts(1, 2, 3) == TokenCounts(real + 1, counts.padding + 2, counts.supervised + 3)


def test_the_clock_leaves_pauses_out():
    clock = StepClock(elapsed_s=10.0)
    assert clock.elapsed_s == 10.0
    clock.begin_step()
    clock.add_pause(100.0)
    assert clock.end_step() == pytest.approx(-100.0, abs=5)
    assert clock.elapsed_s == pytest.approx(-90.0, abs=5)


def test_observers_get_events_of_several_threads_one_at_a_time():
    inside, overlaps = [], []

    class Slow:
        def on_event(self, event):
            overlaps.append(len(inside))
            inside.append(1)
            time.sleep(0.002)
            inside.pop()

    publisher = Publisher([Slow()])
    threads = [threading.Thread(target=lambda: [publisher.publish(Event("log")) for _ in range(10)]) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert overlaps == [0] * 40


def test_an_observer_added_later_gets_later_events():
    log, publisher = Log(), Publisher()
    publisher.publish(Event("log", {"message": "early"}))
    publisher.add_observer(log)
    publisher.publish(Event("log", {"message": "late"}))
    assert log.of("log") == [{"message": "late"}]


class _Big:
    pass


def test_frames_and_closures_of_a_whole_chain_are_dropped():
    kept = []

    def inner_most(big):
        raise ValueError("first")

    def fail():
        big = _Big()
        kept.append(weakref.ref(big))

        def closure():
            return inner_most(big)

        try:
            closure()
        except ValueError as error:
            raise RuntimeError("second") from error

    try:
        fail()
    except RuntimeError as caught:
        error = caught
    assert [str(link) for link in chain_of(error)] == ["second", "first"]
    text = drop_frames(error)
    gc.collect()
    assert kept[0]() is None
    assert "in closure" in text
    assert "second" in text
    assert "in closure" in error.__notes__[0]


def test_sentences_for_people():
    assert sentence_of(DataError("rows.csv is empty. Add rows.")) == "rows.csv is empty. Add rows."
    assert sentence_of(KeyError("x")).startswith("The run failed (KeyError: 'x').")
    assert "Out of memory" in sentence_of(MemoryError())
    assert "Out of memory" in sentence_of(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))


def test_a_run_error_keeps_its_kind_and_its_cause():
    original = NonFiniteError("Step 3: the loss is nan.")
    fresh = as_run_error(original)
    assert type(fresh) is NonFiniteError
    assert fresh is not original
    assert fresh.__cause__ is original
    assert type(as_run_error(DataError("x"))) is RunError


def test_arguments_turn_everything_off_that_is_done_elsewhere(tmp_path):
    recipe = small_recipe(training__mixed_precision="bf16", training__gradient_checkpointing=True)
    found = training_arguments(recipe, CPU, tmp_path)
    assert (found.bf16, found.fp16, bool(found.activation_checkpointing)) == (False, False, False)
    assert found.logging_nan_inf_filter is False
    assert (str(found.eval_strategy), str(found.save_strategy)) == ("IntervalStrategy.NO", "SaveStrategy.NO")
    assert found.report_to == []
    assert (found.use_cpu, found.dataloader_pin_memory, found.n_gpu) == (True, False, 0)
    assert found.max_steps == 6
    assert training_arguments(recipe, GPU, tmp_path).dataloader_pin_memory is True


def test_a_missing_tracker_names_its_pip_line(tmp_path, monkeypatch):
    monkeypatch.setattr(arguments_module.importlib.util, "find_spec", lambda name: None)
    for tracker, line in (("wandb", "pip install wandb"), ("tensorboard", r"pip install 'workbench\[report\]'")):
        with pytest.raises(MissingPackageError, match=line):
            training_arguments(small_recipe(training__report_to=(tracker,)), CPU, tmp_path)
