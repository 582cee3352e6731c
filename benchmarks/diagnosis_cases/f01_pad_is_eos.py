"""pad == eos and a collator that masks every pad id."""

from tiny_tokenizer import word_tokenizer
from transformers import DataCollatorForLanguageModeling

import workbench

HEALTHY = globals().get("HEALTHY", False)

tokenizer = word_tokenizer(pad="[PAD]" if HEALTHY else "</s>")
texts = ["how are you", "I am fine thank you", "what is it", "it is a tree"]
rows = [tokenizer(text + " </s>") for text in texts]
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
findings = workbench.check({"tokenizer": tokenizer, "dataset": rows, "collator": collator})
