"""watch() on a Lightning Trainer: a clean run equals a bare one, a NaN is kept from the weights, a leak is named."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import workbench

lightning = pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")


class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """A small regression whose loss can be broken at one step."""

    def __init__(self, *, nan_at: int = -1, keep: bool = False, fail_at: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
        self.nan_at, self.fail_at, self.keep = nan_at, fail_at, keep
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, target = batch
        if batch_idx == self.fail_at:
            raise ValueError("broken row")
        error = self.net(features).squeeze(-1) - target
        loss = error.square().mean()
        if batch_idx == self.nan_at:
            loss = loss + torch.log(error[0] * 0)
        self.log("loss", loss)
        if self.keep:
            self.kept.append(loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader() -> Any:
    features = torch.randn(160, 6, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(features, features.sum(-1)), batch_size=4)


def trainer(**options: Any) -> Any:
    torch.set_num_threads(1)
    return lightning.Trainer(
        **{"max_steps": 20, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
           "enable_progress_bar": False, "enable_model_summary": False, **options}
    )  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "max_steps": 16}])
def test_a_healthy_run_has_no_findings_and_ends_with_the_weights_of_a_bare_one(options: dict[str, Any]) -> None:
    watched, bare = Module(), Module()
    fit = trainer(**options)
    w = workbench.watch(fit, look="now")
    fit.fit(watched, loader())
    trainer(**options).fit(bare, loader())
    assert w.findings == []
    assert w.watch.num_steps == options.get("max_steps", 20)
    assert all(torch.equal(a, b) for a, b in zip(watched.parameters(), bare.parameters(), strict=True))


def test_a_nan_is_named_with_its_operator_and_kept_from_the_weights() -> None:
    module, callback = Module(nan_at=5), workbench.lightning_callback()
    trainer(callbacks=[callback], max_steps=10).fit(module, loader())
    (finding,) = callback.findings
    assert finding.cause == "nonfinite.log_of_zero" and finding.where["step"] == 6
    assert finding.evidence["update_blocked"]
    assert all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters())


def test_a_list_of_losses_on_the_module_is_named() -> None:
    module, fit = Module(keep=True), trainer(max_steps=30)
    w = workbench.watch(fit)
    fit.fit(module, loader())
    (finding,) = w.findings
    assert finding.cause == "leak.graph_kept" and "kept" in finding.where["object"]


def test_an_exception_leaves_complete_findings() -> None:
    module, fit = Module(fail_at=3), trainer()
    w = workbench.watch(fit)
    with pytest.raises(ValueError, match="broken row"):
        fit.fit(module, loader())
    assert [finding.cause for finding in w.findings] == ["error.other"] and w.watch.num_steps == 3


def test_the_update_of_a_closure_is_checked_after_the_closure() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    features = torch.randn(4, 3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(features).square().mean()
        loss.backward()
        return loss

    with workbench.watch(model, optimizer, look="never") as w:
        for _ in range(3):
            w.step(loss=optimizer.step(closure), batch=features)
    assert len(w.record.grad_norms) == 3 and all(norm > 0 for norm in w.record.grad_norms)
