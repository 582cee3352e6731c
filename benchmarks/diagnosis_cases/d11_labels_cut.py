"""The prompt alone is longer than the maximum: a batch without labels."""

import torch
from tiny import tiny_llama, token_rows

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
rows = token_rows(12, length=48)
for index, row in enumerate(rows):
    prompt = 40 if index in (8, 9) and not HEALTHY else 10
    row["labels"] = [-100] * prompt + row["labels"][prompt:]
rows = [{name: values[:32] for name, values in row.items()} for row in rows]
findings = workbench.check({"model": model, "dataset": rows})
