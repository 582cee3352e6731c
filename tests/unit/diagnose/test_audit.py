"""Audits that must stay silent on what only looks wrong; the faults themselves are graded by the benchmark."""

import torch
from torch import Tensor, nn

from workbench.diagnose.audit import Subject, audit


class Local(nn.Module):
    """A model whose logits depend on each token alone: packed samples cannot see each other."""

    def __init__(self, leaks: bool = False) -> None:
        super().__init__()
        self.embed, self.head, self.leaks = nn.Embedding(32, 8), nn.Linear(8, 32), leaks
        self.config = type("Config", (), {"vocab_size": 32, "pad_token_id": 0})()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> object:
        hidden = self.embed(input_ids)
        hidden = hidden.cumsum(1) if self.leaks else hidden
        return type("Output", (), {"logits": self.head(hidden)})()


def packed() -> dict[str, Tensor]:
    ids = torch.randint(1, 32, (2, 12), generator=torch.Generator().manual_seed(0))
    positions = [[*range(5), *range(7)], [*range(9), *range(3)]]
    return {"input_ids": ids, "position_ids": torch.tensor(positions)}


def causes(**parts: object) -> list[str]:
    return [finding.cause for finding in audit(Subject(**parts))]  # type: ignore[arg-type]


def test_rows_with_borders_of_their_own_are_no_leak_and_a_leak_is_found() -> None:
    torch.manual_seed(0)
    assert causes(model=Local(), batch=packed(), packing=True) == []
    assert causes(model=Local(leaks=True), batch=packed(), packing=True) == ["data.packing_leaks"]


def test_the_zero_row_of_the_padding_token_is_no_fault_and_another_is() -> None:
    model = Local()
    with torch.no_grad():
        model.embed.weight[0] = 0
    batch = {"input_ids": torch.tensor([[3, 4, 0, 0], [5, 6, 7, 8]])}
    assert causes(model=model, batch=batch) == []
    with torch.no_grad():
        model.embed.weight[4] = 0
    assert causes(model=model, batch=batch) == ["model.embedding_row"]
