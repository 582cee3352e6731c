"""Assistant-only loss with a template without generation markers."""

from tiny_tokenizer import word_tokenizer

import workbench

HEALTHY = globals().get("HEALTHY", False)

tokenizer = word_tokenizer(pad="[PAD]")
answer = "{% generation %}{{ m['content'] }} </s>{% endgeneration %} " if HEALTHY else "{{ m['content'] }} </s> "
tokenizer.chat_template = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }} {% else %}"
    + answer
    + "{% endif %}{% endfor %}"
)

dataset = [
    {
        "messages": [
            {"role": "user", "content": "how are you"},
            {"role": "assistant", "content": "I am fine"},
            {"role": "user", "content": "what is it"},
            {"role": "assistant", "content": "it is a tree"},
        ]
    }
    for _ in range(4)
]
findings = workbench.check({"tokenizer": tokenizer, "dataset": dataset, "assistant_only_loss": True})
