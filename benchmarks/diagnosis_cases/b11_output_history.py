"""A displayed tensor stays in the output history after del."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)

namespace = {"Out": {}, "_": "", "__": "", "___": ""}
t = torch.randn(512, 512)
if not HEALTHY:
    namespace["Out"][3] = namespace["_3"] = namespace["_"] = t
del t
report = workbench.release(namespace)
