"""The template closes the assistant's turn outside the marked span."""

from tiny_tokenizer import word_tokenizer

import workbench

HEALTHY = globals().get("HEALTHY", False)

tokenizer = word_tokenizer(pad="[PAD]")
inside = "{% generation %}{{ m['content'] }} </s>{% endgeneration %} "
outside = "{% generation %}{{ m['content'] }}{% endgeneration %} </s> "
tokenizer.chat_template = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }} {% else %}"
    + (inside if HEALTHY else outside)
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
