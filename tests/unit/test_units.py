"""Sizes, durations and counts as people read them."""

import pytest

from workbench.units import GIB, MIB, format_bytes, format_count, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1536, "1.5 KiB"),
        (19.83 * GIB, "19.8 GiB"),
        (-2 * MIB, "-2 MiB"),
        (200 * GIB, "200 GiB"),
    ],
)
def test_bytes_are_shown_with_three_figures(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (5e-6, "5 µs"),
        (0.0384, "38.4 ms"),
        (2.41, "2.41 s"),
        (200, "3 min 20 s"),
        (18720, "5 h 12 min"),
        (-0.5, "-500 ms"),
    ],
)
def test_durations_change_their_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_counts_have_a_suffix() -> None:
    assert format_count(134_515_008) == "134.5M"
    assert format_count(12_300) == "12.3k"
    assert format_count(7) == "7"


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("15 GiB", 15 * GIB), ("80GB", 80 * 10**9), ("512MiB", 512 * MIB), ("1024", 1024), (7, 7)]
)
def test_sizes_are_read_in_binary_and_decimal_units(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


def test_a_size_that_is_none_says_how_to_write_one() -> None:
    with pytest.raises(ValueError, match="Write for example 15 GiB"):
        parse_bytes("much")
