"""eval_accumulation_steps moves all logits to host memory."""

from tiny import small_trainer

import workbench

HEALTHY = globals().get("HEALTHY", False)

trainer = small_trainer(
    **(
        {"metrics": True, "eval_accumulation_steps": 1, "batch_eval_metrics": True}
        if HEALTHY
        else {"metrics": True, "eval_accumulation_steps": 1}
    )
)
findings = workbench.check(trainer)
