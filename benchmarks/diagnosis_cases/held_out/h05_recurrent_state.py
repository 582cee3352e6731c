"""A recurrent network reads a stream for evaluation; its state is passed on with its history."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)

torch.manual_seed(0)


class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 32)
        self.rnn = torch.nn.GRU(32, 32, batch_first=True)
        self.head = torch.nn.Linear(32, 50)

    def forward(self, ids, hidden=None):
        states, hidden = self.rnn(self.embed(ids), hidden)
        return self.head(states), hidden


model = Tagger().eval()
hidden, correct = None, 0
with workbench.watch(model) as w:
    for step in range(40):
        ids = torch.randint(0, 50, (4, 9))
        logits, hidden = model(ids[:, :-1], hidden)
        if HEALTHY:
            hidden = hidden.detach()
        correct += int((logits.argmax(-1) == ids[:, 1:]).sum())
        w.step(batch=ids)
