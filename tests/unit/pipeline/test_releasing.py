"""``release``: what an exception holds is given back, also what only the frames' functions hold."""

from __future__ import annotations

import gc
import weakref

import torch

from workbench.pipeline.releasing import release
from workbench.units import MIB


def fail_with(num_bytes: int, cause: BaseException | None = None):
    """Fail in a frame that holds a tensor, with a chained exception or none."""
    held = torch.zeros(num_bytes, dtype=torch.uint8)
    raise ValueError(f"failed with {held.nbytes} bytes") from cause


def error_of(num_bytes: int, cause: BaseException | None = None) -> BaseException:
    try:
        fail_with(num_bytes, cause)
    except ValueError as caught:
        return caught
    raise AssertionError


def test_each_link_of_a_chain_is_measured_by_itself():
    error = error_of(2 * MIB, cause=error_of(3 * MIB))
    report = release({})
    sizes = {
        finding.cause: finding.evidence["freed_bytes"]
        for finding in report.findings
        if finding.cause.startswith("release.exception") and finding.evidence["freed_bytes"] >= MIB
    }
    assert sizes == {"release.exception": 2 * MIB, "release.exception_chain": 3 * MIB}
    assert error.__traceback__ is None


def test_a_closure_of_a_failed_frame_is_let_go():
    """Clearing a frame's variables leaves its function, whose closure holds the model."""

    def run() -> BaseException:
        model = torch.nn.Linear(1024, 1024)

        def step() -> None:
            raise ValueError(f"failed in {model.in_features}")

        references.append(weakref.ref(model))
        try:
            step()
        except ValueError as caught:
            return caught
        raise AssertionError

    references: list[weakref.ref[torch.nn.Linear]] = []
    error = run()
    gc.collect()
    assert references[0]() is not None
    release({})
    assert references[0]() is None
    assert "failed in" in str(error)


def test_what_stays_is_named_by_its_holder():
    kept = [torch.zeros(2 * MIB, dtype=torch.uint8)]
    report = release({"kept": kept})
    held = [finding for finding in report.findings if finding.where.get("object") == "kept"]
    assert held and held[0].evidence["held_bytes"] == 2 * MIB
    assert report.left_bytes >= 2 * MIB and kept
