"""Images of rows: where they stand in a row, how they are opened, and the mark that holds their place in a text."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError, MissingPackageError
from ..recipe.parts import DataPart
from .chat_template import IMAGE_MARK
from .row_format import FieldError
from .rows import RawRow

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_COLUMNS = ("images", "image", "img", "picture", "image_path", "image_file", "file_name")

# Where an image is: a path, or the encoded bytes of a JPEG, PNG or the like.
ImageRef = str | bytes


def find_image_column(data: DataPart, rows: Sequence[RawRow], name: str) -> str:
    """Return the column that holds images, or an empty text where they stand inside the messages (or nowhere).

    Raises:
        DataError: The Recipe names a column that is not there.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row.values))
    if data.image_column:
        if data.image_column not in columns:
            raise DataError(
                f"{name} has no column {data.image_column!r} (data.image_column). Set another, or leave it."
            )
        return data.image_column
    return next((column for column in IMAGE_COLUMNS if column in columns), "")


def image_refs(value: Any, column: str, folder: Path) -> list[ImageRef]:
    """Return where the images of a cell are: none, one, or a list of them.

    Args:
        value: A path, encoded bytes, ``{"path": ..., "bytes": ...}``, a ``data:`` URL, a PIL image, or a list of these.
        column: For messages.
        folder: What relative paths are relative to.

    Raises:
        FieldError: It is none of these, or a path that leads nowhere.
    """
    if value is None or value == "" or value == []:
        return []
    if isinstance(value, (list, tuple)):
        return [ref for index, item in enumerate(value) for ref in image_refs(item, f"{column}[{index}]", folder)]
    if isinstance(value, Mapping):
        given = next((value[key] for key in ("bytes", "path", "url", "image") if value.get(key) is not None), None)
        if given is None:
            raise FieldError(column, "it is an image without path and bytes")
        return image_refs(given, column, folder)
    if isinstance(value, (bytes, bytearray)):
        return [bytes(value)]
    if isinstance(value, str):
        return [_located(value, column, folder)]
    if hasattr(value, "save") and hasattr(value, "mode"):  # a PIL image
        buffer = io.BytesIO()
        value.convert("RGB").save(buffer, format="PNG")
        return [buffer.getvalue()]
    raise FieldError(column, f"it is a {type(value).__name__}; an image is a path or bytes")


def _located(text: str, column: str, folder: Path) -> ImageRef:
    if text.startswith("data:"):
        try:
            return base64.b64decode(text.split(",", 1)[1], validate=True)
        except (IndexError, binascii.Error):
            raise FieldError(column, "it is a data: URL without base64 text") from None
    if text.startswith(("http://", "https://")):
        raise FieldError(column, "it is an address on the web; fetch the image and give its path")
    path = Path(text.removeprefix("file://")).expanduser()
    for candidate in (folder / path, path):
        if candidate.is_file():
            return str(candidate)
    raise FieldError(column, f"there is no image file {text[:120]!r} (looked in {folder})")


def open_image(ref: ImageRef) -> Image:
    """Return an image in RGB.

    Raises:
        MissingPackageError: pillow is not installed.
        ValueError: It is no image that can be read.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise MissingPackageError("pillow", "model.task=image-text-to-text", "vision") from None
    try:
        with Image.open(ref if isinstance(ref, str) else io.BytesIO(ref)) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError, ValueError) as error:
        what = ref if isinstance(ref, str) else f"{len(ref)} bytes"
        raise ValueError(f"{what} is no image that can be read ({str(error).splitlines()[0][:120]})") from error


def marked_messages(messages: Any, column: str, folder: Path) -> tuple[Any, list[ImageRef]]:
    """Return chat messages with a mark in the place of each image part, and the images that the parts hold.

    A part that says where to stand without saying which image (``{"type": "image"}``) takes the next one of the row's
    column of images.
    """
    if not isinstance(messages, list):
        return messages, []
    refs: list[ImageRef] = []
    marked = []
    for place, message in enumerate(messages):
        key = "content" if isinstance(message, Mapping) and "content" in message else "value"
        content = message.get(key) if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            marked.append(message)
            continue
        parts: list[Any] = []
        for part in content:
            # In Arrow every part has every field, the ones it lacks as None.
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in ("image", "image_url"):
                parts.append({"type": "text", "text": IMAGE_MARK})
                given = next(
                    (part[name] for name in ("image", "image_url", "url", "path", "bytes") if part.get(name)), None
                )
                refs += image_refs(given, f"{column}[{place}]", folder)
            else:
                parts.append(part)
        marked.append({**message, key: parts})
    return marked, refs
