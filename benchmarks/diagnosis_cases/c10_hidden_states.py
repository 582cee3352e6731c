"""The model returns hidden states, the evaluation gathers them all."""

from tiny import small_trainer

import workbench

HEALTHY = globals().get("HEALTHY", False)

trainer = small_trainer(
    **({"metrics": True, "reduce": True} if HEALTHY else {"metrics": True, "reduce": True, "hidden_states": True})
)
findings = workbench.check(trainer)
