"""The values that flow between the stages."""

import pytest

from workbench.errors import Cancelled
from workbench.events import LIVE_STATES, METRIC_COLUMNS, RUN_STATES, Cancel


def test_work_ends_at_its_next_check_after_cancel() -> None:
    cancel = Cancel()
    cancel.check()
    cancel.set()
    assert cancel.is_set
    with pytest.raises(Cancelled, match="Nothing was lost"):
        cancel.check()


def test_live_states_are_states_and_columns_are_unique() -> None:
    assert set(RUN_STATES) > LIVE_STATES
    assert len(set(METRIC_COLUMNS)) == len(METRIC_COLUMNS)
