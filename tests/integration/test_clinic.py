"""The clinic: every cause has a fault that the doctors name, and a healthy twin of which they do not speak."""

import gc
from collections.abc import Iterator

import pytest
import torch

from workbench import clinic
from workbench.diagnose.causes import CAUSES

# What a variable of the twin holds on purpose is told by release() all the same.
HOLDERS = {"release.variable", "release.optimizer", "release.trainer"}


@pytest.fixture(scope="module", autouse=True)
def older_objects_stand_aside() -> Iterator[None]:
    """Each of the many collections would go through what other tests have loaded."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


def test_every_cause_has_a_fault_or_says_what_it_needs() -> None:
    names, elsewhere = clinic.names(), clinic.elsewhere()
    assert set(names) | set(elsewhere) == set(CAUSES) and not set(names) & set(elsewhere)
    assert all(text.startswith("Needs ") for text in elsewhere.values())
    assert set(clinic.switches()) <= set(names)


@pytest.mark.parametrize("cause", clinic.names())
def test_the_fault_is_named_and_its_twin_is_not(cause: str) -> None:
    sick = clinic.run(cause)
    assert sick.is_named and not sick.is_healthy, sick
    twin = clinic.run(cause, healthy=True)
    assert not twin.is_named, twin
    if CAUSES[cause].kind != "memory":  # Those are verdicts of health: their twin may be a fault.
        assert not {finding.cause for finding in twin.findings if finding.is_fault} - HOLDERS, twin


def test_a_run_can_be_read_and_its_code_seen() -> None:
    text = str(clinic.run("leak.graph_total"))
    assert "A running total keeps the autograd history" in text and "'total'" in text
    assert "total = total + (loss.detach() if healthy else loss)" in clinic.source_of("leak.graph_total")


def test_what_cannot_be_run_is_told_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="second process holds memory"):
        clinic.run("oom.other_process")
    with pytest.raises(ValueError, match="no cause with a fault"):
        clinic.run("leak.of_nothing")


def test_the_command_line_lists_runs_and_shows(capsys: pytest.CaptureFixture[str]) -> None:
    from workbench.cli.main import main

    assert main(["clinic"]) == 0
    listed = capsys.readouterr().out
    assert all(cause in listed for cause in CAUSES)
    assert main(["clinic", "data.double_bos"]) == 0 and "begin with two '<s>'" in capsys.readouterr().out
    assert main(["clinic", "data.double_bos", "--healthy"]) == 0 and "No fault found" in capsys.readouterr().out
    assert main(["clinic", "data.double_bos", "--source"]) == 0 and "def two_beginnings" in capsys.readouterr().out
    assert main(["clinic", "data.nothing"]) == 2
