"""Prompt labels are 0, a real token, instead of -100."""

from tiny import tiny_llama, token_rows

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
rows = token_rows(8)
for row in rows:
    row["labels"] = [-100 if HEALTHY else 0] * 12 + row["labels"][12:]
findings = workbench.check({"model": model, "dataset": rows})
