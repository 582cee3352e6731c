"""Progress bars of third parties, off while our own progress is reported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars: they would go to a cell that has long ended; ours go to the panel."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def expected_report(is_expected: bool) -> Iterator[None]:
    """Keep transformers from printing which weights are new, where it is known that some are."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    if is_expected:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
