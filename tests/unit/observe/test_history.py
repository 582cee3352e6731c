"""The history: columns, growth under a reader, decimation, files."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest

from workbench.events import METRIC_COLUMNS
from workbench.observe.history import History, read_row


def _filled(rows: int) -> History:
    history = History()
    for step in range(1, rows + 1):
        history.append({"step": step, "loss": step / 2})
    return history


def test_missing_values_are_nan_and_unknown_names_are_left_out():
    history = History()
    history.append({"step": 1, "loss": 2.5, "grad_norm": None, "colour": 3})
    assert history.column("loss").tolist() == [2.5]
    assert math.isnan(history.column("grad_norm")[0])
    assert math.isnan(history.column("eval_loss")[0])
    with pytest.raises(KeyError, match="colour"):
        history.column("colour")


def test_growth_keeps_every_row():
    history = _filled(5000)
    assert len(history) == 5000
    assert np.array_equal(history.column("step"), np.arange(1, 5001))
    assert np.array_equal(history.column("loss"), np.arange(1, 5001) / 2)


def test_columns_cannot_be_written_by_readers():
    with pytest.raises(ValueError, match="read-only"):
        _filled(3).column("loss")[0] = 1


def test_rows_since_gives_all_columns_of_one_length():
    rows = _filled(10).rows_since(7)
    assert set(rows) == set(METRIC_COLUMNS)
    assert rows["step"].tolist() == [8, 9, 10]
    assert {len(values) for values in rows.values()} == {3}


def test_a_repeated_step_supersedes_the_rows_from_there_on():
    history = _filled(10)
    history.append({"step": 6, "loss": 99.0})
    assert history.column("step").tolist() == [1, 2, 3, 4, 5, 6]
    assert history.column("loss")[-1] == 99.0
    assert math.isnan(history.column("grad_norm")[-1])


def test_a_reader_beside_the_writer_sees_whole_rows_only():
    history, wrong = History(), []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            rows = history.rows_since(0)
            if not np.array_equal(rows["loss"], rows["step"] * 2):
                wrong.append(len(rows["step"]))

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(1, 20_000):
        history.append({"loss": step * 2.0, "step": step})
    done.set()
    reader.join()
    assert not wrong


def test_decimation_keeps_spikes_and_leaves_short_histories_alone():
    history = History()
    values = np.sin(np.arange(30_000) / 300)
    values[12_345], values[20_001] = 50.0, -50.0
    for step, value in enumerate(values):
        history.append({"step": step, "loss": value, "eval_loss": value if step % 1000 == 0 else None})
    steps, kept = history.decimated("loss")
    assert len(steps) <= 4000
    assert {12_345.0, 20_001.0} <= set(steps)
    assert kept.max() == 50.0
    assert kept.min() == -50.0
    assert np.all(np.diff(steps) > 0)
    assert np.array_equal(kept, values[steps.astype(int)])
    sparse_steps, sparse = history.decimated("eval_loss")
    assert sparse_steps.tolist() == list(range(0, 30_000, 1000))
    assert not np.isnan(sparse).any()


@pytest.mark.parametrize("rows", [4000, 4001, 7999, 100_001])
def test_decimation_never_exceeds_its_limit(rows):
    steps, _ = _filled(rows).decimated("loss", 4000)
    assert len(steps) <= 4000
    assert steps[0] == 1
    assert steps[-1] == rows


def test_last_finds_the_newest_value_that_is_there():
    history = _filled(3)
    history.append({"step": 4, "eval_loss": 7.0})
    assert (history.last("loss"), history.last("eval_loss"), history.last("loss_scale")) == (1.5, 7.0, None)


def test_files_with_half_lines_and_foreign_lines_are_read(tmp_path):
    whole = ['{"step": 1, "loss": 3.0}', "[1, 2]", "not json", '{"step": 2, "loss": "NaN"}', '{"step": 3, "loss": 2.0}']
    (tmp_path / "metrics.jsonl").write_text("\n".join([*whole, '{"step": 4, "lo']))
    history = History.from_folder(tmp_path)
    assert history.column("step").tolist() == [1, 2, 3]
    assert math.isnan(history.column("loss")[1])
    assert len(History.from_folder(tmp_path / "nothing")) == 0


def test_infinities_survive_the_file():
    assert read_row('{"grad_norm": "Infinity", "loss": "-Infinity"}') == {"grad_norm": math.inf, "loss": -math.inf}
