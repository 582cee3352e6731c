"""Hooks are removed, what they stored on the modules is not."""

from tiny import batch_of, tiny_llama

import workbench

HEALTHY = globals().get("HEALTHY", False)

model = tiny_llama()


def store(module, inputs, output):
    module._last = output


handles = [layer.mlp.register_forward_hook(store) for layer in model.model.layers]
model(**batch_of(0))
for handle in handles:
    handle.remove()
if HEALTHY:
    for layer in model.model.layers:
        del layer.mlp._last
findings = workbench.check({"model": model})
