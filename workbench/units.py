"""Units for display. The only file that holds 2**30; everything stored is in bytes and seconds."""

from __future__ import annotations

KIB = 2**10
MIB = 2**20
GIB = 2**30


def format_bytes(num_bytes: float) -> str:
    """Return ``num_bytes`` as text in B, KiB, MiB or GiB with three figures, e.g. ``"19.8 GiB"``."""
    sign = "-" if num_bytes < 0 else ""
    value = abs(float(num_bytes))
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if value >= size:
            scaled = value / size
            return f"{sign}{scaled:.0f} {unit}" if scaled >= 100 else f"{sign}{scaled:.3g} {unit}"
    return f"{sign}{value:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return a duration as text, e.g. ``"38 ms"``, ``"2.4 s"``, ``"3 min 20 s"`` or ``"5 h 12 min"``."""
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_count(count: float) -> str:
    """Return a count with a metric suffix, e.g. ``"134.5M"`` for parameters or ``"12.3k"`` for tokens."""
    value = abs(float(count))
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{count / size:.4g}{suffix}"
    return f"{count:.4g}"


def parse_bytes(text: str | int) -> int:
    """Return bytes from ``"15 GiB"``, ``"512MiB"``, ``"80GB"`` (powers of ten) or a plain number.

    Raises:
        ValueError: The text is not a number with one of the units B, KiB, MiB, GiB, kB, MB, GB.
    """
    if isinstance(text, int):
        return text
    stripped = text.strip()
    units = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "kB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}
    unit = next((unit for unit in units if stripped.endswith(unit)), "")
    try:
        return round(float(stripped.removesuffix(unit)) * units.get(unit, 1))
    except ValueError:
        raise ValueError(f"{text!r} is not a size. Write for example 15 GiB, 512 MiB or 80 GB.") from None
