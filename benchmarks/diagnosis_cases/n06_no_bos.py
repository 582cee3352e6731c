"""Control: rows without BOS, as the template writes them."""

from tiny import tiny_llama
from tiny_tokenizer import word_tokenizer

import workbench

HEALTHY = globals().get("HEALTHY", False)

tokenizer = word_tokenizer(pad="[PAD]")
model = tiny_llama()
rows = [dict(tokenizer(text + " </s>")) for text in ("how are you", "I am fine", "what is it", "it is a tree")]
for row in rows:
    row["labels"] = list(row["input_ids"])
findings = workbench.check({"tokenizer": tokenizer, "dataset": rows, "model": model})
