"""The response marker is tokenised differently in context."""

from tiny_tokenizer import byte_tokenizer

import workbench

HEALTHY = globals().get("HEALTHY", False)

tokenizer = byte_tokenizer()
texts = [f"question {n}\n### Response: answer {n}" for n in range(6)]
rows = [tokenizer(text) for text in texts]
marker = "\n### Response:"
if HEALTHY:
    ids = rows[0]["input_ids"]
    head = len(tokenizer("question 0")["input_ids"])
    marker = ids[head : head + 4]
else:
    marker = "### Response:"
findings = workbench.check({"tokenizer": tokenizer, "dataset": rows, "response_template": marker})
