"""Evaluation batch left at its default of 8 while training runs one row."""

from tiny import small_trainer

import workbench

HEALTHY = globals().get("HEALTHY", False)

trainer = small_trainer(
    **({"per_device_eval_batch_size": 1, "eval_strategy": "epoch"} if HEALTHY else {"eval_strategy": "epoch"})
)
findings = workbench.check(trainer)
