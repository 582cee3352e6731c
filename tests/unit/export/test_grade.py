"""Grades: known logits give the known perplexity, and what answers otherwise than its source is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from workbench.errors import ExportError
from workbench.export import gptq
from workbench.export import grade as module
from workbench.export.formats import FORMATS, WEIGHT_BITS
from workbench.export.gptq_worker import choose_group
from workbench.export.quantized import PACKAGES

VOCABULARY = 8
IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
LABELS = torch.tensor([[-100, 2, 3, 4], [-100, -100, 7, -100]])
ROWS = module.GradedRows(((IDS, MASK, LABELS),), "held-out")


def answer_next(sharpness: float) -> module.Reader:
    """Return a reader that knows every next token, with a logit of ``sharpness``."""

    def read(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        following = torch.roll(ids, -1, 1)
        return sharpness * torch.nn.functional.one_hot(following, VOCABULARY).float()

    return read


def test_known_logits_give_the_known_perplexity() -> None:
    measured = module.measure_reader(answer_next(2.0), ROWS)
    expected = (VOCABULARY - 1 + math.exp(2)) / math.exp(2)
    assert measured.perplexity == pytest.approx(expected) and measured.accuracy_fraction == 1.0
    # Four supervised tokens; the first of a row and padding are none.
    assert measured.num_tokens == 4 and measured.logits.shape == (4, VOCABULARY)
    uniform = module.measure_reader(answer_next(0.0), ROWS)
    assert uniform.perplexity == pytest.approx(VOCABULARY)


def test_a_grade_compares_with_the_merged_model() -> None:
    merged, export = (module.measure_reader(answer_next(value), ROWS) for value in (2.0, 1.0))
    grade = module.compare_measured(export, merged, ROWS, (100, 400), "a reader")
    assert grade.compression == 4.0 and grade.perplexity > grade.merged_perplexity
    assert grade.mean_logit_difference == pytest.approx(1 / VOCABULARY) and grade.mean_divergence > 0.05
    assert grade.same_next_token_fraction == 1.0 and grade.num_rows == 2
    same = module.compare_measured(merged, merged, ROWS, (400, 400), "a reader")
    assert same.mean_logit_difference == 0 and same.mean_divergence < 1e-6


def test_an_export_that_answers_otherwise_is_refused() -> None:
    merged, wrong = (module.measure_reader(answer_next(value), ROWS) for value in (2.0, -8.0))
    grade = module.compare_measured(wrong, merged, ROWS, (1, 1), "a reader")
    with pytest.raises(ExportError, match=r"the merged model: its logits differ by .* Nothing was kept"):
        module.require_sound(grade, "gguf-q4_0", 4)
    with pytest.raises(ExportError, match="not finite"):
        module.measure_reader(answer_next(float("nan")), ROWS)
    module.require_sound(module.compare_measured(merged, merged, ROWS, (1, 1), "a reader"), "onnx", 32)


def test_rows_reach_another_process_unchanged(tmp_path: Path) -> None:
    module.save_rows(ROWS, tmp_path / "rows.npz")
    found = module.load_rows(tmp_path / "rows.npz")
    assert found.origin == "held-out" and found.num_rows == 2
    assert all(torch.equal(a, b) for a, b in zip(found.batches[0], ROWS.batches[0], strict=True))


def test_awq_without_a_gpu_and_gptq_without_its_packages_say_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ExportError, match=r"there is no GPU here. Export gptq"):
        gptq.require_gptq("awq")
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    for name in gptq.PACKAGES[1:]:
        (tmp_path / "gptq" / name).mkdir(parents=True)
    monkeypatch.setattr(gptq.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ExportError, match=r"needs gptqmodel, not installed here. Run: pip install --no-deps"):
        gptq.require_gptq("gptq")
    (tmp_path / "gptq" / "gptqmodel").mkdir()
    gptq.require_gptq("gptq")


def test_what_the_other_process_says_last_is_told(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"could not quantize this model \(\w+Error: .*Export gguf-q4_0"):
        gptq._work(["quantize", str(tmp_path), str(tmp_path), "gptq", str(tmp_path / "rows.npz")], None)


def test_groups_divide_every_layer() -> None:
    assert [choose_group(4096, 11008), choose_group(576, 1536), choose_group(96, 160)] == [128, 64, 32]
    assert choose_group(50) == -1


def test_every_graded_format_is_a_format_and_has_a_bound() -> None:
    assert set(WEIGHT_BITS) | {"adapter", "script", "report"} == set(FORMATS)
    assert set(WEIGHT_BITS.values()) == set(module.MAX_DIFFERENCE)
    assert set(PACKAGES) <= set(WEIGHT_BITS)
