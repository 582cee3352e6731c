"""What a model answers: at the checkpoints of a run, and afterwards beside the model that it began with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.cli.main import main
from workbench.errors import RunError
from workbench.events import Cancel
from workbench.panel.runs import list_samples, open_run
from workbench.pipeline import chat as chat_module
from workbench.pipeline import start_session
from workbench.pipeline.chat import Chat
from workbench.recipe import Recipe

PROMPT = "What is a list, a tuple?"
PLAIN = {
    "model.name_or_path": "tiny-llama",
    "data.max_length": 48,
    "data.max_rows": 24,
    "training.max_steps": 4,
    "training.save_steps": 2,
    "training.learning_rate": 0.03,
    "adapter.lora_dropout": 0.1,
    "evaluation.max_rows": 2,
    "evaluation.eval_steps": 0,
}
ASKED = {"evaluation.sample_prompts": [PROMPT], "evaluation.num_samples": 1, "evaluation.sample_max_new_tokens": 8}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield start_session(Recipe().with_changes(PLAIN | ASKED), run_dir=tmp_path_factory.mktemp("runs") / "asked").wait()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def chat(run: Any) -> Iterator[Chat]:
    with Chat(run.run_dir) as found:
        yield found


def answers(run: Any, step: int) -> list[str]:
    return next([one["answer"] for one in data["samples"]] for data in run.samples if data["step"] == step)


def test_the_same_prompts_are_answered_before_the_run_and_at_each_checkpoint(run: Any) -> None:
    assert [data["step"] for data in run.samples] == [0, 2, 4]
    assert [[one["prompt"] for one in data["samples"]] for data in run.samples][1:] == [
        [one["prompt"] for one in run.samples[0]["samples"]]
    ] * 2
    assert run.samples[0]["samples"][0]["prompt"] == PROMPT
    row = run.samples[0]["samples"][1]
    assert "Python" in row["prompt"]
    assert row["wanted"] and row["wanted"] not in row["prompt"]
    assert answers(run, 0) != answers(run, 4), "four steps at this rate change the answers"


def test_answers_are_read_back_from_the_folder(run: Any) -> None:
    assert list_samples(open_run(run.run_dir)) == [json.loads(json.dumps(data)) for data in run.samples]


def test_asking_changes_nothing_that_is_learned(run: Any, tmp_path: Path) -> None:
    plain = start_session(Recipe().with_changes(PLAIN), run_dir=tmp_path / "plain").wait()
    for name in ("loss", "grad_norm", "eval_loss"):
        assert list(plain.history.column(name)[-1:]) == list(run.history.column(name)[-1:])
    assert list(plain.history.column("loss")) == list(run.history.column("loss"))


def test_both_sides_answer_as_the_run_did_before_and_after(run: Any, chat: Chat) -> None:
    told: list[str] = []
    assert chat.ask(PROMPT, "base", max_new_tokens=8, on_text=told.append) == answers(run, 0)[0]
    assert chat.ask(PROMPT, "tuned", max_new_tokens=8) == answers(run, 4)[0]
    assert told[-1] == answers(run, 0)[0]
    assert len(told) == 8, "a text after every token"


def test_an_answer_ends_where_it_is_stopped(chat: Chat) -> None:
    cancel, told = Cancel(), []

    def stop_after_three(text: str) -> None:
        told.append(text)
        if len(told) == 3:
            cancel.set()

    assert chat.ask(PROMPT, "base", max_new_tokens=64, on_text=stop_after_three, cancel=cancel) == told[-1]
    assert len(told) <= 4, "at the next token"


def test_a_live_run_refuses_the_chat(run: Any, chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "live_session", lambda: type("Live", (), {"state": "running"})())
    with pytest.raises(RunError, match="A run is running in this kernel and needs its memory"):
        Chat(run.run_dir)
    with pytest.raises(RunError, match="Stop it first"):
        chat.ask(PROMPT)


def test_released_models_say_so(run: Any) -> None:
    with Chat(run.run_dir) as found:
        pass
    with pytest.raises(RunError, match="released"):
        found.ask(PROMPT)


def test_the_command_line_prints_both_answers(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(run.run_dir), PROMPT, "--max-new-tokens", "8", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told == {"prompt": PROMPT, "base": answers(run, 0)[0], "tuned": answers(run, 4)[0]}
