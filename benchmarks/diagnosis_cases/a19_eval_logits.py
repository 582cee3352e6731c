"""The evaluation keeps all logits for compute_metrics."""

from tiny import small_trainer

import workbench

HEALTHY = globals().get("HEALTHY", False)

trainer = small_trainer(**({"metrics": True, "reduce": True} if HEALTHY else {"metrics": True}))
findings = workbench.check(trainer)
