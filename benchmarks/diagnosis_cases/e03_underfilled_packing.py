"""The packer gets a few documents per call and leaves rows half empty."""

import workbench

HEALTHY = globals().get("HEALTHY", False)

import random

documents = [list(range(3, 3 + random.Random(n).randint(20, 44))) for n in range(64)]


def pack(documents, size):
    rows, row = [], []
    for document in documents:
        if len(row) + len(document) > size:
            rows.append(row)
            row = []
        row = row + document
    return [*rows, row]


pool = 64 if HEALTHY else 1
packed = [row for start in range(0, 64, pool) for row in pack(documents[start : start + pool], 128)]
dataset = [
    {"input_ids": row + [0] * (128 - len(row)), "attention_mask": [1] * len(row) + [0] * (128 - len(row))}
    for row in packed
]
findings = workbench.check({"dataset": dataset, "packing": True})
