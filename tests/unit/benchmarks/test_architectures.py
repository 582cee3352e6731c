"""The list of architectures: it covers the installed transformers, and a sample of it is traced anew."""

from __future__ import annotations

import json

import pytest
import transformers

from benchmarks import architectures
from workbench.components.task import TASKS

# The page names why each of the others is not estimated. It must not fall.
LEAST_SHARE = 0.95
# One of each kind, each a second or two: experts, a state space, tied embeddings, one key head for all, soft caps,
# weights made on the CPU, a loss over images.
SAMPLE = ("mixtral", "mamba2", "gpt2", "gpt_bigcode", "gemma2", "xlnet", "git")


def test_every_causal_class_of_transformers_is_listed_and_most_are_estimated() -> None:
    stored = architectures.read_rows()
    facts = json.loads(architectures.STORED.read_text(encoding="utf-8"))
    if facts["transformers"] != transformers.__version__:
        pytest.skip(f"listed for transformers {facts['transformers']}; run python -m benchmarks.architectures --again")
    rows = [stored.get(("causal-lm", name)) for name in architectures.model_types("causal-lm")]
    assert None not in rows
    assert all(row.is_traced or row.reason for row in rows if row is not None)
    traced = sum(row.is_traced for row in rows if row is not None)
    assert traced / len(rows) >= LEAST_SHARE


def test_the_page_says_what_is_stored() -> None:
    rows = sorted(architectures.read_rows().values(), key=lambda row: (list(TASKS).index(row.task), row.model_type))
    facts = json.loads(architectures.STORED.read_text(encoding="utf-8"))
    expected = architectures.render_page(rows, facts["transformers"], facts["classes"])
    assert architectures.PAGE.read_text(encoding="utf-8") == expected


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_sample_of_families_is_traced(model_type: str) -> None:
    stored = architectures.read_rows()["causal-lm", model_type]
    row = architectures.trace("causal-lm", model_type)
    assert row.is_traced, row.reason
    assert row.num_parameters == stored.num_parameters
