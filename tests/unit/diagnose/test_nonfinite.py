"""The NaN verdict: its order, and one example per cause."""

import math

import pytest
import torch

from workbench.diagnose.nonfinite import NonFiniteEvidence, judge_nonfinite
from workbench.observe.finiteness import BadOp


def op(name: str, **fields: object) -> BadOp:
    usual = {"module": "mlp", "phase": "forward", "line": "a.py:3", "value": "inf", "dtype": "float32"}
    return BadOp(**{"op": name, **usual, **fields})  # type: ignore[arg-type]


def evidence(**fields: object) -> NonFiniteEvidence:
    return NonFiniteEvidence(**{"step": 5, "loss": math.nan, "num_parameters": 4, **fields})  # type: ignore[arg-type]


CASES = {
    "nonfinite.fp16_overflow": evidence(created=[op("aten.mm", dtype="float16", fp32_largest=1.7e5)]),
    "nonfinite.fp16_attention": evidence(created=[op("aten.bmm", dtype="float16", module="layers.0.self_attn")]),
    "nonfinite.fp16_log_probs": evidence(created=[op("aten._log_softmax", dtype="float16", value="-inf")]),
    "nonfinite.log_of_zero": evidence(created=[op("aten.log", value="-inf", has_zero_operand=True)]),
    "nonfinite.summed_masks": evidence(
        created=[op("aten.add.Tensor", value="-inf", dtype="bfloat16", largest_input=3.38e38)]
    ),
    "nonfinite.masked_attention": evidence(first_nan=op("aten._softmax", value="nan", all_masked_rows=2)),
    "nonfinite.backward_overflow": evidence(
        created=[op("aten.mul.Tensor", phase="backward", dtype="float16", node="AmplifyBackward")]
    ),
    "nonfinite.backward_singular": evidence(created=[op("aten.div.Tensor", phase="backward", node="SqrtBackward0")]),
    "nonfinite.labels": evidence(num_supervised=0),
    "nonfinite.data_row": evidence(bad_inputs=["pixel_values"]),
    "nonfinite.clipping": evidence(loss=2.0, grad_norm=math.inf, bad_gradients=["head.weight"]),
    "nonfinite.clip_no_op": evidence(loss=2.0, grad_norm=math.inf),
    "nonfinite.embedding_row": evidence(bad_weights=["embed.weight"], bad_embedding_rows=[77]),
    "nonfinite.weights_before": evidence(bad_weights=["head.weight"]),
    "nonfinite.optimizer_update": evidence(
        bad_weights=["head.weight"], last_update={"eps": 1e-8, "dtypes": {torch.float16}, "lr": 1e-3, "step": 4}
    ),
    "nonfinite.learning_rate": evidence(
        bad_weights=["head.weight"], last_update={"eps": 1e-8, "dtypes": {torch.float32}, "lr": 1e4, "step": 4}
    ),
    "nonfinite.logging_only": evidence(replayed=True, replay_is_finite=True),
}


@pytest.mark.parametrize("cause", CASES)
def test_each_cause_is_named(cause: str) -> None:
    assert judge_nonfinite(CASES[cause]).cause == cause


def test_bad_weights_come_before_the_operator_that_shows_them() -> None:
    seen = evidence(bad_weights=["head.weight"], created=[op("aten.mm", dtype="float16")])
    assert judge_nonfinite(seen).cause == "nonfinite.weights_before"


def test_the_operator_comes_before_the_clipping_that_spread_it() -> None:
    seen = evidence(
        grad_norm=math.nan, bad_gradients=["a"], created=[op("aten.log", value="-inf", has_zero_operand=True)]
    )
    assert judge_nonfinite(seen).cause == "nonfinite.log_of_zero"


def test_rows_and_tokens_are_said() -> None:
    finding = judge_nonfinite(evidence(created=[op("aten.mm")], rows=[5], tokens=[7, 8]))
    assert finding.where["batch_rows"] == (5,)
    assert finding.where["token_ids"] == (7, 8)
