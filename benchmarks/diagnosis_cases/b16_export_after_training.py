"""Trainer and loader state is alive when the export begins."""

from tiny import small_trainer

import workbench

HEALTHY = globals().get("HEALTHY", False)

trainer = small_trainer(max_steps=2)
trainer.train()
weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
if HEALTHY:
    del trainer, weights
report = workbench.release()
