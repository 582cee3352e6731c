"""``workbench train`` in which rank 1 stands still in its second step. Started by test_scale.py under torchrun."""

import sys
import time

from workbench.cli.main import main
from workbench.train.ranked_engine import RankedEngine

training_step = RankedEngine.training_step


def stand_still(self, *args, **kwargs):
    if self._ranks.rank == 1 and self.state.global_step == 1:
        time.sleep(300)  # the line that the message has to name
    return training_step(self, *args, **kwargs)


RankedEngine.training_step = stand_still
sys.exit(main(sys.argv[1:]))
