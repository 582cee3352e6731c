"""del model, but the trainer still refers to it."""

from tiny import small_trainer

import workbench

HEALTHY = globals().get("HEALTHY", False)

trainer = small_trainer(max_steps=2)
trainer.train()
model = trainer.model
del model
if HEALTHY:
    trainer.accelerator.free_memory()
    del trainer
report = workbench.release()
