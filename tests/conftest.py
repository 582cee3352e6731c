"""What every test of this project needs."""

from __future__ import annotations

import os

# Tests trace anew: what an earlier run stored on this machine decides nothing. Processes that tests start inherit it.
os.environ["WORKBENCH_TRACES"] = ""
