"""The model hub, asked once and briefly: a hub that does not answer costs seconds, never a loop of retries.

``huggingface_hub`` repeats failed requests with growing pauses (measured: 23 s for one missing name server). So one
question with a short limit goes first; only when it is answered do the library's own downloads start.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ..errors import Cancelled, DataError, ModelError, WorkbenchError
from ..events import Cancel, Progress, ProgressCallback

# Long enough for a slow mobile connection, short enough that a person still waits for it.
ANSWER_TIMEOUT_S = 5.0

RepoKind = Literal["model", "dataset"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[\w.\-]+)?", re.ASCII)


def looks_like_hub_id(name: str) -> bool:
    """Return whether ``name`` could be a hub id: ``name`` or ``owner/name`` of letters, digits, dashes and dots."""
    return bool(_HUB_ID.fullmatch(name)) and ".." not in name and "--" not in name and len(name) <= 96


def is_offline() -> bool:
    """Return whether the user turned the hub off (``HF_HUB_OFFLINE``)."""
    import huggingface_hub

    return bool(huggingface_hub.is_offline_mode())


def require_repo(name: str, *, kind: RepoKind, revision: str | None = None, cancel: Cancel | None = None) -> None:
    """Ask the hub once whether ``name`` is there for this user.

    Raises:
        ModelError: (DataError for a dataset) The hub does not answer, does not know the name, or wants a login.
        Cancelled: The user gave up while waiting.
    """
    error: type[WorkbenchError] = ModelError if kind == "model" else DataError
    noun = "model" if kind == "model" else "data set"
    rest = "Give a local file."
    if kind == "model":
        rest = "Give a local folder, or smollm2-135m-instruct, which needs no hub."
    if is_offline():
        raise error(f"{name!r} is not on this machine and the hub is turned off (HF_HUB_OFFLINE). {rest}")
    outcome = _ask(name, kind, revision, cancel)
    if outcome is None:
        return
    from huggingface_hub import errors

    if isinstance(outcome, errors.RevisionNotFoundError):
        raise error(
            f"The {noun} {name!r} has no revision {revision!r} on the hub. Leave the revision empty."
        ) from outcome
    if isinstance(outcome, errors.GatedRepoError):
        raise error(gated_message(name)) from outcome
    if isinstance(outcome, errors.RepositoryNotFoundError):
        raise error(
            f"The hub knows no {noun} {name!r} that this login may see. "
            "Check the spelling, or set HF_TOKEN if it is private."
        ) from outcome
    raise error(f"{name!r} is not on this machine and the hub does not answer ({_short(outcome)}). {rest}") from outcome


def gated_message(name: str) -> str:
    """Return the sentence for a repository whose terms this user has not accepted."""
    return (
        f"{name!r} is gated: its owner gives it only to users who accepted its terms. "
        f"Accept them at https://huggingface.co/{name} and set HF_TOKEN; an estimate needs only a catalogue name."
    )


def cached_snapshot(
    name: str, *, kind: RepoKind, revision: str | None = None, needs: str = "config.json"
) -> str | None:
    """Return the folder of ``name`` in the hub's local cache when ``needs`` lies in it, without any request."""
    import huggingface_hub

    found = huggingface_hub.try_to_load_from_cache(name, needs, revision=revision, repo_type=kind)
    return found[: -len(needs)].rstrip("/\\") if isinstance(found, str) else None


def download(
    name: str,
    *,
    patterns: Sequence[str],
    revision: str | None = None,
    progress: ProgressCallback | None = None,
    cancel: Cancel | None = None,
) -> str:
    """Fetch the files of a model into the hub's cache and return their folder. Call ``require_repo`` first.

    Raises:
        ModelError: The model is gated, or the hub stopped answering, or the disk is full.
        Cancelled: The user cancelled; finished files stay in the cache.
    """
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            etag_timeout=ANSWER_TIMEOUT_S,
            tqdm_class=_bar_class(name, progress, cancel),
        )
    except errors.GatedRepoError as error:
        raise ModelError(gated_message(name)) from error
    except Cancelled:
        raise
    except Exception as error:  # the HTTP client has its own tree of errors, which changed between versions
        raise ModelError(
            f"Fetching {name!r} from the hub failed ({_short(error)}). Try again; finished files are kept."
        ) from error


def _ask(name: str, kind: RepoKind, revision: str | None, cancel: Cancel | None) -> BaseException | None:
    """Return None when the hub knows ``name``, else what went wrong.

    In a thread of its own, because looking up a host name obeys no timeout.
    """
    outcome: list[BaseException | None] = []

    def ask() -> None:
        import huggingface_hub

        try:
            api = huggingface_hub.HfApi()
            info: Callable[..., Any] = api.model_info if kind == "model" else api.dataset_info
            info(name, revision=revision, timeout=ANSWER_TIMEOUT_S)
            outcome.append(None)
        except Exception as error:  # whatever the client raises becomes one sentence
            outcome.append(error)

    thread = threading.Thread(target=ask, daemon=True, name="workbench-hub")
    thread.start()
    waited_s = 0.0
    while thread.is_alive() and waited_s < ANSWER_TIMEOUT_S:
        thread.join(0.05)
        waited_s += 0.05
        if cancel is not None:
            cancel.check()
    return outcome[0] if outcome else TimeoutError(f"no answer within {ANSWER_TIMEOUT_S:g} s")


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0][:160] if lines else type(error).__name__).rstrip(".")


def _bar_class(name: str, progress: ProgressCallback | None, cancel: Cancel | None) -> type:
    """Return a progress bar class that prints nothing, reports to ``progress`` and looks at ``cancel``."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = False
            kwargs["file"] = _Silent()
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]  # tqdm has no types

        def update(self, n: float | None = 1) -> bool | None:
            if cancel is not None:
                cancel.check()
            moved = super().update(n)
            if progress is not None and self.unit == "B":
                progress(Progress("download", self.n, self.total, f"Fetching {name}"))
            return moved

    return Bar


class _Silent:
    """A stream that keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass
