"""Bytes, times and caps: what is read, what is refused, what is printed."""

from __future__ import annotations

import pytest

from hilore_cli.errors import UsageError
from hilore_cli.sizes import format_bytes, format_gain, format_us, parse_bytes, parse_cap


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("40GiB", 40 * 2**30), ("1.5 GB", 1_500_000_000), ("100mib", 100 * 2**20), (" 7 B ", 7), (".5KiB", 512), ("1e3MB", 10**9)],
)
def test_parse_bytes(text, nbytes):
    assert parse_bytes(text) == nbytes
    assert parse_cap(text).resolve(gc_bytes=1, none_bytes=2) == nbytes


@pytest.mark.parametrize("text", ["", "40", "GiB", "-1GiB", "0GiB", "1,5GiB", "nanGiB", "infGiB", "1.2.3GB", "40GiBs", "40iB", "1e400GiB"])
def test_unreadable_bytes_name_the_text_and_an_example(text):
    with pytest.raises(UsageError, match=r"is not understood.*40GiB") as error:
        parse_bytes(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(("text", "nbytes"), [("1.1x-gc", 1100), ("1x-GC", 1000), ("0.9x-none", 1800), ("1.0001x-gc", 1000)])
def test_ratios_are_rounded_down(text, nbytes):
    assert parse_cap(text).resolve(gc_bytes=1000, none_bytes=2000) == nbytes


@pytest.mark.parametrize("text", ["", "1.1", "1.1gc", "x-gc", "0x-gc", "-1x-gc", "1.1x-all", "nanx-gc", "1.1x-gc or so", "40", "40iB", "9" * 400 + "x-gc"])
def test_unreadable_caps_name_the_text_and_the_forms(text):
    with pytest.raises(UsageError, match=r"1\.1x-gc, 0\.9x-none or a size such as 40GiB") as error:
        parse_cap(text)
    assert repr(text) in str(error.value)


def test_printing():
    assert [format_bytes(n) for n in (0, 1023, 1536, 2**30, 5 * 2**40)] == ["0 B", "1023 B", "1.5 KiB", "1 GiB", "5 TiB"]
    assert [format_us(t) for t in (0.5, 1500, 2.5e6)] == ["0.5 us", "1.5 ms", "2.5 s"]
    assert [format_gain(r) for r in (1.135, 0.98, 1.0)] == ["+13.5 %", "-2.0 %", "+0.0 %"]
