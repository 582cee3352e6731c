"""One NaN step is replaced by the running mean in the log."""

from tiny import small_trainer
from transformers import Trainer

import workbench

HEALTHY = globals().get("HEALTHY", False)


class Broken(Trainer):
    calls = 0

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.calls += 1
        return loss * float("nan") if self.calls == 3 and not HEALTHY else loss


trainer = small_trainer(trainer=Broken, max_steps=6)
w = workbench.watch(trainer)
trainer.train()
