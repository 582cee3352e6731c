"""Exports of weights: the merged model first, from it the wanted format, then both read the same held-out rows.

The merged model lies inside the temporary folder while it is needed, so a killed export leaves it where the next one
removes it, and never where it could be taken for an export.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..components.data import PreparedData, prepare_data
from ..components.source import ModelSource, find_source, load_tokenizer
from ..components.task import CAUSAL
from ..errors import DataError, ExportError
from ..recipe import Recipe
from . import grade as grading
from .formats import WEIGHT_BITS
from .merged import write_merged

if TYPE_CHECKING:
    from .export import Job, Written

# Inside the temporary folder, removed before it gets its final name.
SCRATCH = ".merged"
# Not every format holds its tokenizer.
TOKENIZER_FILES = ("tokenizer*", "chat_template*", "special_tokens_map.json", "*.model", "vocab*", "merges.txt")
CALIBRATION_ROWS = 128


@dataclass(frozen=True)
class Prepared:
    """What an export is calibrated and graded with; ``rows`` is None where the data cannot be read, for ``reason``."""

    data: PreparedData | None
    rows: grading.GradedRows | None
    reason: str = ""


def write_weights(recipe: Recipe, result: Path, job: Job) -> Written:
    """Write one format of weights, read it back, and grade it against the merged model.

    Args:
        recipe: The run's settings.
        result: ``adapter/`` or ``model/`` of the run.
        job: Where to write, and what to tell.

    Returns:
        What was found when the merged model was read back, and the grade.

    Raises:
        ExportError: The format cannot hold this model, or what was read back is not what was written.
        MissingPackageError: The format needs a package that is not installed.
        Cancelled: The user cancelled.
    """
    source = find_source(recipe, for_training=True, progress=job.progress, cancel=job.cancel)
    require_possible(job.to, recipe, source)
    merged = job.target if job.to == "merged" else job.target / SCRATCH
    merged.mkdir(exist_ok=True)
    checks = write_merged(recipe, result, merged, progress=job.progress, cancel=job.cancel)
    if recipe.model.task != CAUSAL:
        return checks, None
    prepared = _prepare(recipe, source, job)
    if job.to != "merged":
        job.begin_stage(2, f"Writing {job.to}")
        _convert(job, merged, source.name, prepared)
    grade = None
    if prepared.rows is None:
        checks["not_graded"] = prepared.reason
    else:
        job.begin_stage(3, "Reading it back and grading it")
        grade = grade_export(job.to, job.target, merged, prepared.rows, job)
        grading.require_sound(grade, job.to, WEIGHT_BITS[job.to])
    if job.to != "merged":
        shutil.rmtree(merged)
    return checks, None if grade is None else grade.to_dict()


def require_possible(to: str, recipe: Recipe, source: ModelSource) -> None:
    """Refuse, before anything is merged, what a format cannot do.

    Raises:
        ExportError: The format cannot hold this model, or needs a GPU.
        MissingPackageError: It needs a package that is not installed.
    """
    if to == "merged":
        return
    if recipe.model.task != CAUSAL:
        raise ExportError(
            f"{to} is written for causal language models; this run's model.task is {recipe.model.task}. "
            "Export it as merged."
        )
    if to.startswith("gguf"):
        from .gguf_file import require_mappable

        require_mappable(source.config)
    elif to == "onnx":
        from .onnx_graph import require_onnx

        require_onnx()
    elif to in ("gptq", "awq"):
        from .gptq import require_gptq

        require_gptq(to)
    else:
        from .quantized import require_quantizer

        require_quantizer(to)


def grade_export(
    to: str,
    target: Path,
    merged: Path,
    rows: grading.GradedRows,
    job: Job,
    reference: grading.Measured | None = None,
) -> grading.Grade:
    """Let the merged model and the export read the same rows, one after the other.

    Args:
        to: The export's format.
        target: The export.
        merged: The merged model.
        rows: What both read.
        job: Whose ``cancel`` is looked at.
        reference: What the merged model says, where it is known already.
    """
    from .readers import merged_reader, reader_of

    if reference is None:
        reference = grading.measure_reader(merged_reader(merged), rows, job.cancel)
    sizes = (grading.weight_bytes(target), grading.weight_bytes(merged))
    if to in ("gptq", "awq"):
        from .gptq import measure_apart

        measured = measure_apart(target, rows, job.cancel)
        return grading.compare_measured(measured, reference, rows, sizes, "transformers")
    with reader_of(to, target, merged, job.cancel) as (read, name):
        measured = grading.measure_reader(read, rows, job.cancel)
    return grading.compare_measured(measured, reference, rows, sizes, name)


def _prepare(recipe: Recipe, source: ModelSource, job: Job) -> Prepared:
    tokenizer = load_tokenizer(source)
    try:
        data = prepare_data(recipe, tokenizer, progress=job.progress, cancel=job.cancel)
    except DataError as error:
        return Prepared(None, None, f"the run's data cannot be read any more: {error}")
    rows = grading.choose_rows(recipe, tokenizer, data)
    if not any((labels[:, 1:] != grading.IGNORED).any() for _, _, labels in rows.batches):
        return Prepared(data, None, f"no {rows.origin} row has a supervised token in its first {grading.GRADE_TOKENS}")
    return Prepared(data, rows)


def _convert(job: Job, merged: Path, name: str, prepared: Prepared) -> None:
    if job.to.startswith("gguf"):
        from .gguf_file import write_gguf

        write_gguf(merged, job.target, job.to, name, job.cancel)
    elif job.to == "onnx":
        from .onnx_graph import write_onnx

        write_onnx(merged, job.target)
        _copy_tokenizer(merged, job.target, ("config.json", "generation_config.json"))
    elif job.to in ("gptq", "awq"):
        from .gptq import write_calibrated

        if prepared.data is None:
            raise ExportError(f"{job.to} needs the run's own data to fit its weights to, but {prepared.reason}")
        write_calibrated(merged, job.target, job.to, _calibration(prepared.data), job.cancel)
        _copy_tokenizer(merged, job.target)
    else:
        from .quantized import write_quantized

        write_quantized(merged, job.target, job.to)
        _copy_tokenizer(merged, job.target)


def _calibration(data: PreparedData) -> list[list[int]]:
    """Return the tokens of the first training rows: never those the export is graded on."""
    rows: Any = data.train
    return [list(rows[index]["input_ids"]) for index in range(min(CALIBRATION_ROWS, len(rows)))]


def _copy_tokenizer(merged: Path, target: Path, more: tuple[str, ...] = ()) -> None:
    for pattern in (*TOKENIZER_FILES, *more):
        for file in merged.glob(pattern):
            shutil.copy2(file, target / file.name)
