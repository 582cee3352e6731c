"""Processors of image models: tokenizer and image processor together, loaded from a local folder only."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
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

    try:
        processor = _without_video(source) or AutoProcessor.from_pretrained(
            source.path, backend="pil", local_files_only=True, trust_remote_code=source.trust_remote_code
        )
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


def _without_video(source: ModelSource) -> Any | None:
    """Return the processor without its video part, where it has one that needs torchvision and that is missing.

    Nothing here reads videos, and transformers refuses to make such a processor without it. None where transformers
    can load it as it is.
    """
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
    from transformers.utils import is_torchvision_available

    kind = PROCESSOR_MAPPING.get(type(source.config), None)
    if kind is None or is_torchvision_available() or "video_processor" not in kind.get_attributes():
        return None
    options = {"local_files_only": True, "trust_remote_code": source.trust_remote_code}
    parts = {
        "tokenizer": AutoTokenizer.from_pretrained(source.path, **options),
        "image_processor": AutoImageProcessor.from_pretrained(source.path, backend="pil", **options),
    }
    settings, _ = kind.get_processor_dict(source.path, local_files_only=True)
    settings = {name: value for name, value in settings.items() if name not in (*parts, "video_processor")}
    accepted = list(inspect.signature(kind.__init__).parameters)[1:]
    _, settings = kind.validate_init_kwargs(processor_config=settings, valid_kwargs=accepted)
    processor = kind.__new__(kind)
    check = processor.check_argument_for_proper_class
    # Its constructor checks the class of every part, and there is none of the video's.
    processor.check_argument_for_proper_class = lambda name, part: None if part is None else check(name, part)
    missing = [name for name in kind.get_attributes() if name not in parts]
    kind.__init__(processor, **parts, **dict.fromkeys(missing), **settings)
    del processor.check_argument_for_proper_class
    return processor


def save_processor(processor: Any, folder: Path) -> None:
    """Write a tokenizer, or a processor with the parts it has; the video part of one that has none is left out."""
    parts = [getattr(processor, name, None) for name in getattr(processor, "get_attributes", list)()]
    if None not in parts:
        processor.save_pretrained(folder)
        return
    for part in parts:
        if part is not None:
            part.save_pretrained(folder)
    if processor.chat_template:
        (folder / "chat_template.jinja").write_text(processor.chat_template, encoding="utf-8")
    settings = processor.to_dict()
    plain = {name: value for name, value in settings.items() if isinstance(value, str | int | float)}
    (folder / "processor_config.json").write_text(json.dumps(plain, indent=2), encoding="utf-8")
