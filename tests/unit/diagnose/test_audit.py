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


def test_padding_that_is_learned_is_named_unless_the_labels_are_another_sequence() -> None:
    ids = torch.tensor([[3, 4, 0, 0], [5, 6, 7, 8]])
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.clone()}
    (finding,) = audit(Subject(batch=batch))
    assert finding.cause == "data.wrong_ignore_index" and "25 % of the supervised labels are padding" in finding.summary
    model = Local()
    model.config.is_encoder_decoder = True
    assert causes(batch=batch, model=model) == []
    assert causes(batch=batch | {"labels": torch.where(ids == 0, -100, ids)}) == []


def test_an_adapter_that_stands_still_while_other_weights_train_is_named() -> None:
    model = nn.ModuleDict({"lora_A": nn.Linear(2, 2), "lora_B": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    model["lora_A"].requires_grad_(False)
    assert "model.adapter_frozen" not in causes(model=model)
    model["lora_B"].requires_grad_(False)
    assert causes(model=model) == ["model.adapter_frozen"]
