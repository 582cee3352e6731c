"""Processors of image models: tokenizer and image processor together, loaded from a local folder only."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ..errors import ModelError

if TYPE_CHECKING:
    from .source import ModelSource


def load_processor(source: ModelSource) -> Any:
    """Return the processor of ``source``; its ``tokenizer`` is set up as ``load_tokenizer`` does.

    The image processor is the one that works with pillow: it needs no torchvision and gives the same values on every
    machine.

    Raises:
        ModelError: There are no processor files, or they cannot be read.
    """
    from transformers import AutoProcessor, ProcessorMixin

    from .tokenizer import set_up_tokenizer

    options = {"local_files_only": True, "trust_remote_code": source.trust_remote_code}
    try:
        with _without_video():
            processor = AutoProcessor.from_pretrained(source.path, backend="pil", **options)
    except Exception as error:  # broken files raise whatever their parser raises
        text = (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")
        raise ModelError(
            f"The processor of {source.name!r} cannot be read ({text}). Save it with save_pretrained into the model's "
            "folder; models of images and text need one."
        ) from error
    if not isinstance(processor, ProcessorMixin) or not hasattr(processor, "image_processor"):
        raise ModelError(
            f"{source.name!r} has a tokenizer but no processor of images. Save its processor into the same folder."
        )
    set_up_tokenizer(processor.tokenizer)
    return processor


@contextlib.contextmanager
def _without_video() -> Any:
    """Load processors whose video part needs torchvision without it: nothing here reads videos."""
    yield
