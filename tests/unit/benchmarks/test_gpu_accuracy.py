"""The configurations for a real GPU: twenty different ones that a data-centre card accepts."""

import pytest

from benchmarks import gpu_accuracy
from workbench.hardware import find_device
from workbench.recipe import find_problems


def test_there_are_twenty_with_names_of_their_own() -> None:
    names = [item.name for item in gpu_accuracy.CONFIGURATIONS]
    assert len(set(names)) == len(names) == 20
    assert any(item.keeps_events for item in gpu_accuracy.CONFIGURATIONS)


@pytest.mark.parametrize("item", gpu_accuracy.CONFIGURATIONS, ids=lambda item: item.name)
def test_each_is_a_recipe_that_an_a100_accepts(item: gpu_accuracy.Configuration) -> None:
    facts = find_device("NVIDIA A100-SXM4-80GB").facts(for_estimate=True)
    recipe = item.recipe()
    assert find_problems(recipe, facts) == []
    assert recipe.training.per_device_train_batch_size == item.batch_size


def test_without_a_gpu_nothing_is_measured_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_accuracy.main([]) == 0
    assert "nothing was measured" in capsys.readouterr().out


def test_a_configuration_that_dies_is_named_and_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_accuracy, "_run_child", lambda item, is_dry: {"error": "no room"})
    assert gpu_accuracy.main(["--dry-run", "--only", "gpt2"]) == 1
    assert "gpt2-full" in capsys.readouterr().out
