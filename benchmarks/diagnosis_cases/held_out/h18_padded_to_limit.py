"""A collate function pads every batch to the model's limit; the mask goes by position."""

import torch

import workbench

HEALTHY = globals().get("HEALTHY", False)

torch.manual_seed(0)


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(80, 32)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 1)
        self.head = torch.nn.Linear(32, 2)

    def forward(self, input_ids, attention_mask):
        states = self.layers(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        return self.head(states[:, 0])


def collate(rows):
    width = max(len(row) for row in rows) if HEALTHY else 128
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = [torch.randint(1, 80, (14 + index % 6,)) for index in range(200)]
with workbench.watch(model, optimizer) as w:
    for start in range(0, 200, 5):
        batch = collate(rows[start : start + 5])
        loss = torch.nn.functional.cross_entropy(model(**batch), torch.zeros(5, dtype=torch.long))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss, batch=batch)
