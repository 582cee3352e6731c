from __future__ import annotations

import time
from typing import Any

import pytest

from workbench.components import hub
from workbench.errors import Cancelled, DataError, ModelError
from workbench.events import Cancel


@pytest.mark.parametrize("name", ["owner/model", "gpt2", "a.b/c-d_e"])
def test_possible_ids(name: str) -> None:
    assert hub.looks_like_hub_id(name)


@pytest.mark.parametrize("name", ["", "a/b/c", "../x", "a b", "<b>x</b>", "a/..", "x" * 200, "ü/x"])
def test_impossible_ids(name: str) -> None:
    assert not hub.looks_like_hub_id(name)


def test_a_hub_without_answer_costs_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(hub, "ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(hub, "is_offline", lambda: False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: time.sleep(5))
    start = time.monotonic()
    with pytest.raises(ModelError, match=r"the hub does not answer \(no answer within 0.2 s\).*local folder"):
        hub.require_repo("owner/model", kind="model")
    assert time.monotonic() - start < 2


def test_waiting_for_the_hub_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(hub, "is_offline", lambda: False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: time.sleep(5))
    cancel = Cancel()
    cancel.set()
    with pytest.raises(Cancelled):
        hub.require_repo("owner/model", kind="model", cancel=cancel)


def refusal(kind: str) -> Exception:
    import httpx
    from huggingface_hub import errors

    cls = getattr(errors, kind)
    try:
        request = httpx.Request("GET", "https://huggingface.co")
        return cls("refused", response=httpx.Response(403, request=request))
    except TypeError:
        return cls("refused")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("GatedRepoError", "is gated.*Accept them at https://huggingface.co/owner/model and set HF_TOKEN"),
        ("RepositoryNotFoundError", "The hub knows no model 'owner/model'"),
        ("RevisionNotFoundError", "has no revision 'v2'"),
    ],
)
def test_answers_become_one_sentence(monkeypatch: pytest.MonkeyPatch, kind: str, expected: str) -> None:
    monkeypatch.setattr(hub, "is_offline", lambda: False)
    monkeypatch.setattr(hub, "_ask", lambda *_: refusal(kind))
    with pytest.raises(ModelError, match=expected):
        hub.require_repo("owner/model", kind="model", revision="v2")


def test_data_sets_raise_their_own_error(silent_hub: list[str]) -> None:
    with pytest.raises(DataError, match=r"the hub does not answer.*Give a local file"):
        hub.require_repo("owner/rows", kind="dataset")
    assert silent_hub == ["owner/rows"]


def test_offline_mode_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(hub, "_ask", fail)
    monkeypatch.setattr(hub, "is_offline", lambda: True)
    with pytest.raises(ModelError, match=r"turned off \(HF_HUB_OFFLINE\)"):
        hub.require_repo("owner/model", kind="model")
