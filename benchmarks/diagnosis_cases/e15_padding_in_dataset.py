"""padding='max_length' at tokenisation."""

import workbench

HEALTHY = globals().get("HEALTHY", False)

rows = []
for index in range(16):
    length = 8 + index % 5
    width = length if HEALTHY else 128
    rows.append(
        {
            "input_ids": list(range(3, 3 + length)) + [0] * (width - length),
            "attention_mask": [1] * length + [0] * (width - length),
        }
    )
findings = workbench.check({"dataset": rows})
