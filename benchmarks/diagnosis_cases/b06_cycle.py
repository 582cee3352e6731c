"""A card object on the model points back to the trainer."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)

import gc


class Card:
    pass


class Trainer:
    def __init__(self, model):
        self.model = model
        model.card = Card()
        model.card.trainer = None if HEALTHY else self


gc.collect()
gc.disable()
for _ in range(3):
    trainer = Trainer(torch.nn.Linear(256, 256))
del trainer
report = workbench.release()
gc.enable()
