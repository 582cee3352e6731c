"""The out-of-memory verdict: which fact explains it."""

import pytest

from workbench.diagnose.oom import OomEvidence, judge_oom
from workbench.units import MIB

FULL = {"parameter": 4 * MIB, "gradient": 4 * MIB, "activation": 20 * MIB}

CASES = {
    "oom.optimizer_state": OomEvidence(0, "optimizer", bill=FULL, state_bytes=8 * MIB),
    "oom.resume_two_copies": OomEvidence(0, "between", functions=["main", "load_state_dict"]),
    "oom.save": OomEvidence(9, "between", functions=["save_pretrained"]),
    "oom.evaluation": OomEvidence(9, "evaluation", num_tokens=4096),
    "oom.longest_batch": OomEvidence(9, "backward", num_tokens=900, earlier_tokens=[300, 280], bill=FULL),
    "oom.grouped_long_rows": OomEvidence(
        9,
        "forward",
        num_tokens=660,
        earlier_tokens=[48],
        row_tokens=[160, 165],
        earlier_row_tokens=[12] * 20,
        bill=FULL,
    ),
    "oom.row_not_truncated": OomEvidence(
        3, "forward", num_tokens=800, earlier_tokens=[40], row_tokens=[20, 400], max_length=64, bill=FULL
    ),
    "oom.loss_logits": OomEvidence(
        0,
        "forward",
        op="aten._log_softmax",
        requested_bytes=8 * MIB,
        bill=FULL,
        logits_bytes=16 * MIB,
        logits_shape=(4, 64, 8192),
    ),
    "oom.activations": OomEvidence(0, "forward", bill=FULL),
    "oom.weights": OomEvidence(0, "forward", bill={"parameter": 40 * MIB, "activation": 1 * MIB}),
}


@pytest.mark.parametrize("cause", CASES)
def test_each_cause_is_named(cause: str) -> None:
    assert judge_oom(CASES[cause]).cause == cause


def test_adam_state_of_the_step_before_explains_a_batch_that_fitted() -> None:
    bill = FULL | {"optimizer_state": 8 * MIB}
    seen = OomEvidence(1, "backward", num_tokens=96, earlier_tokens=[96], state_is_new=True, bill=bill)
    assert judge_oom(seen).cause == "oom.optimizer_state"


def test_each_finding_has_a_fix() -> None:
    assert all(judge_oom(seen).fixes for seen in CASES.values())
