"""Codecs beside a plain copy: the arithmetic from invented times, every row of a real run on tiny tensors, and the command."""

from __future__ import annotations

import io
import json
import os
import sys

import numpy as np
import pytest
import torch
from rich.console import Console

from hilore_cli import cli, codec_bench, malloc
from hilore_cli.bench_records import CodecBenchReport, ProductTimes
from hilore_cli.codec_bench import (
    FEWEST_WIDTHS,
    LONGEST_PRODUCT_US,
    WIDTH_SHARES,
    bench_codecs,
    break_even_width,
    check_sizes,
    codec_pace,
    codecs_of_each_kind,
    columns_of,
    default_sizes,
    fit_line,
    needed_bytes,
    product_runs,
)
from hilore_cli.codecs import CODECS, compress, get_codec
from hilore_cli.errors import PlanMismatchError, UsageError
from hilore_cli.files import load_report, save_json
from hilore_cli.views.bench import codec_bench_view

CPU = torch.device("cpu")
KIB = 2**10
FIXED_US, US_PER_WIDTH = 10.0, 2.0
INVENTED_US = {"clone": 25.0, "compress": 50.0, "decompress": 20.0}


def silent(*_: object) -> None:
    pass


def printed(report: CodecBenchReport, *, width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(codec_bench_view(report))
    return console.file.getvalue()


def kind_of(run) -> str:
    """clone, compress, decompress or product, of a run as codec_bench makes it."""
    called = getattr(run, "func", run)
    return "product" if called is torch.mm else called.__name__


class InventedTimes:
    """A stopwatch whose times follow from what it is given, with a note of it; nothing runs under it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.clock, self.seen = device, "cpu", []

    def us_per_call(self, run, *, calls: int = 1) -> float:
        kind = kind_of(run)
        self.seen.append((kind, calls))
        return INVENTED_US[kind] if kind in INVENTED_US else FIXED_US + US_PER_WIDTH * run.args[0].shape[1]


@pytest.fixture(scope="module")
def measured():
    """One codec of each kind, on tensors of two rows of fp32."""
    torch.set_num_threads(1)
    return bench_codecs(["all"], device=CPU, sizes=[8 * KIB], repeats=2, progress=silent)


# ------------------------------------------------------------------------------------------------------------ arithmetic


@pytest.mark.parametrize(
    ("codec_us", "slope", "width"),
    [(500.0, 2.0, 200), (501.0, 2.0, 201), (100.0, 2.0, 0), (50.0, 2.0, 0), (500.0, 0.0, None), (500.0, -1.0, None)],
    ids=["on a width", "between two", "as long as the fixed part", "below it", "flat", "falling"],
)
def test_break_even_is_the_first_width_that_takes_as_long(codec_us, slope, width):
    assert break_even_width(codec_us, fixed_us=100.0, us_per_width=slope) == width


def test_line_through_exact_times():
    widths = [16, 32, 64, 256, 1024]
    assert fit_line(widths, [100 + 2 * width for width in widths]) == pytest.approx((100, 2))


def test_line_keeps_to_the_small_products():
    """A wide product that is a tenth slower than the line must not move the crossing among the narrow ones, as plain least squares do."""
    widths = [16, 32, 64, 1024]
    times = [(10 + width) * (1.1 if width == 1024 else 1) for width in widths]
    slope_plain, fixed_plain = np.polyfit(widths, times, 1)
    fixed, slope = fit_line(widths, times)
    assert abs(fixed + 16 * slope - 26) < abs(fixed_plain + 16 * slope_plain - 26) / 2
    assert fixed + 16 * slope == pytest.approx(26, rel=0.05)


def test_fractions_are_paired_within_a_repeat():
    pace = codec_pace([10.0, 40.0, 20.0], [5.0, 40.0, 4.0], nbytes=4000, payload_bytes=1000)
    assert pace.us == 20
    assert pace.gb_per_s == pytest.approx(4000 / 20e-6 / 1e9)
    assert (pace.of_clone, pace.of_clone_low, pace.of_clone_high) == (0.5, 0.2, 1.0), "of the medians it would be 0.25"
    assert pace.bandwidth_of_clone == pytest.approx(0.5 * 5000 / 8000)


def test_rows_from_invented_times(monkeypatch):
    monkeypatch.setattr(codec_bench, "Stopwatch", InventedTimes)
    report = bench_codecs(["int8", "mask"], device=CPU, sizes=[8 * KIB], repeats=3, progress=silent)
    by_codec = {row.codec: row for row in report.rows}
    row = by_codec["int8"]
    assert (row.clone_us, row.compress.us, row.decompress.us) == (25, 50, 20)
    assert (row.compress.of_clone, row.decompress.of_clone) == (0.5, 1.25)
    assert row.break_even_width == 30, "10 + 2 K us against 70 us"
    assert by_codec["mask"].break_even_width is None
    for product in report.products:
        assert product.widths == [16, 32, 64, 256, 1024]
        assert (product.fixed_us, product.us_per_width) == pytest.approx((FIXED_US, US_PER_WIDTH))
        assert product.largest_deviation < 1e-9
    assert {product.dtype for product in report.products} == {"float32", "bfloat16", "float16"}, "no product makes a mask"


def test_everything_takes_turns_within_a_repeat():
    stopwatch = InventedTimes(CPU)
    takers = [get_codec("int8"), get_codec("bf16")]
    rounds = []
    codec_bench.measure_case(takers, torch.float32, 8 * KIB, stopwatch=stopwatch, repeats=3, tick=rounds.append)
    one = ["clone", "compress", "decompress"] * 2 + ["product"] * len(WIDTH_SHARES)
    timed = stopwatch.seen[-3 * len(one) :]
    assert [kind for kind, _ in timed] == one * 3
    assert rounds == [0, 1, 2, 3]
    assert dict(timed)["compress"] == codec_bench.MOST_CALLS, "short runs are repeated to make a sample"


def test_no_wider_product_than_the_first_slow_one():
    class Slow(InventedTimes):
        def us_per_call(self, run, *, calls: int = 1) -> float:
            return LONGEST_PRODUCT_US * 2

    assert len(product_runs(torch.ones(2, 1024), stopwatch=Slow(CPU))) == FEWEST_WIDTHS < len(WIDTH_SHARES)
    assert product_runs(torch.ones(2, 1024, dtype=torch.bool), stopwatch=Slow(CPU)) == {}


# -------------------------------------------------------------------------------------------------------------- a real run


def test_every_codec_dtype_and_size_has_a_row(measured):
    names = codecs_of_each_kind(CPU)
    expected = [(name, str(dtype).removeprefix("torch.")) for name in names for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.bool) if dtype in CODECS[name].dtypes]
    assert [(row.codec, row.dtype) for row in measured.rows] == expected
    assert {"int8", "int4", "e4m3", "bf16", "mask", "int8-sr", "fbgemm-int8", "fbgemm-int4"} <= set(names)
    for row in measured.rows:
        dtype = getattr(torch, row.dtype)
        assert row.nbytes == 8 * KIB
        assert row.payload_bytes == compress(torch.zeros(8 * KIB // dtype.itemsize, dtype=dtype), row.codec).numel()
        assert row.stochastic == row.codec.endswith("-sr")
        for pace in (row.compress, row.decompress):
            assert 0 < pace.of_clone_low <= pace.of_clone <= pace.of_clone_high
            assert pace.gb_per_s == pytest.approx(row.nbytes / pace.us / 1e3)
    for product in measured.products:
        assert (product.rows * product.columns * getattr(torch, product.dtype).itemsize, len(product.us)) == (product.nbytes, len(product.widths))
        assert all(us > 0 for us in product.us)
    assert measured.machine.threads == 1
    assert measured.clock == "cpu"


def test_sizes_are_whole_rows_and_all_is_expanded():
    report = bench_codecs(["int8-g32", "bf16", "int8-g32"], device=CPU, sizes=[20 * KIB + 1, 8 * KIB], repeats=1, progress=silent)
    assert [(row.codec, row.dtype, row.nbytes // KIB) for row in report.rows] == [
        *(("int8-g32", dtype, size) for dtype in ("float32", "bfloat16", "float16") for size in (8, 20)),
        *(("bf16", "float32", size) for size in (8, 20)),
    ]


def test_a_gpu_is_kept_busy_while_calls_are_queued(monkeypatch):
    """Else the time between two events would be that of Python launching them."""
    order = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("event")

        def synchronize(self) -> None:
            order.append("wait")

        def elapsed_time(self, end: object) -> float:
            return 6.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "mm", lambda *_: order.append("busy"))
    watch = object.__new__(codec_bench.Stopwatch)
    watch._busy = None
    assert watch._device_us(lambda: order.append("run"), calls=3) == 2000
    assert order == ["busy", "event", "run", "run", "run", "event", "wait"]


def test_wall_time_at_more_threads():
    torch.set_num_threads(2)
    try:
        report = bench_codecs(["mask"], device=CPU, sizes=[8 * KIB], repeats=1, progress=silent)
    finally:
        torch.set_num_threads(1)
    assert (report.clock, report.machine.threads) == ("wall", 2)


def test_view_has_each_row_on_one_line_of_a_terminal(measured):
    lines = printed(measured, width=80).splitlines()
    for row in measured.rows:
        width = "-" if row.break_even_width is None else str(row.break_even_width)
        shown = [line.split() for line in lines if line.split()[:2] == [row.codec, row.dtype]]
        assert len(shown) == 1
        assert shown[0][2:4] == ["8", "KiB"]
        assert float(shown[0][4]) == pytest.approx(row.compress.gb_per_s, rel=0.01)
        assert float(shown[0][5]) == pytest.approx(row.compress.of_clone, abs=0.006)
        assert float(shown[0][7]) == pytest.approx(row.decompress.of_clone, abs=0.006)
        assert shown[0][8] == width
    assert max(map(len, lines)) <= 80


def test_view_of_a_gpu_compares_bandwidth_and_asks_no_goal_of_stochastic_codecs(measured):
    slow = {"of_clone": 0.9, "bandwidth_of_clone": 0.7}
    rows = [row.model_copy(update={side: getattr(row, side).model_copy(update=slow) for side in ("compress", "decompress")}) for row in measured.rows if row.codec in ("int8", "int8-sr")]
    on_gpu = measured.model_copy(update={"clock": "device", "rows": rows})
    text = printed(on_gpu, width=200)
    assert "met in 0 of 3 rows; missed by int8 (3)." in text
    assert "0.70" in text
    assert "0.90" not in text


def test_report_comes_back_from_its_file(measured, tmp_path):
    save_json(measured, tmp_path / "codecs.json")
    assert load_report(tmp_path / "codecs.json", CodecBenchReport, command="hilore bench --codecs") == measured
    document = json.loads((tmp_path / "codecs.json").read_text())
    document["rows"][0]["surprise"] = 1
    (tmp_path / "codecs.json").write_text(json.dumps(document))
    with pytest.raises(PlanMismatchError, match=r"codecs.json: rows.0.surprise.*hilore bench --codecs"):
        load_report(tmp_path / "codecs.json", CodecBenchReport, command="hilore bench --codecs")
    with pytest.raises(ValueError, match="2 widths have 1 times"):
        ProductTimes(dtype="float32", nbytes=1, rows=1, columns=1, widths=[1, 2], us=[1.0], fixed_us=0.0, us_per_width=1.0, largest_deviation=0.0)


# ------------------------------------------------------------------------------------------------------------- what is refused


@pytest.fixture
def nothing_runs(monkeypatch):
    def draw(*_: object, **__: object) -> None:
        raise AssertionError("a tensor was made")

    monkeypatch.setattr(codec_bench, "draw_tensor", draw)


@pytest.mark.parametrize(
    ("names", "size", "words"),
    [
        (["int8", "int3"], 8 * KIB, "codec 'int3' does not exist.*fbgemm-int8"),
        ([], 8 * KIB, "no codec is named; give all"),
        (["int8"], 4 * KIB - 1, "size 3.999 KiB: below one row of 1024 elements, 4 KiB; give larger --sizes"),
        (["all"], 2**50, "size 1024 TiB: measuring it takes about .* are free on this cpu; give smaller --sizes, such as 2 MiB"),
    ],
    ids=["unknown", "none", "too small", "too large"],
)
def test_refusals_before_anything_is_measured(nothing_runs, names, size, words):
    with pytest.raises(UsageError, match=words):
        bench_codecs(names, device=CPU, sizes=[8 * KIB, size], repeats=1, progress=silent)


def test_a_size_fits_to_the_byte(monkeypatch):
    chosen = [get_codec("int8"), get_codec("bf16")]
    needed = needed_bytes(64 * KIB, chosen, device=CPU)
    assert needed > 64 * KIB * 2 + sum(codec.payload_bytes(16 * KIB) for codec in chosen)
    monkeypatch.setattr(codec_bench, "free_bytes", lambda device: needed)
    check_sizes([64 * KIB], chosen, device=CPU)
    monkeypatch.setattr(codec_bench, "free_bytes", lambda device: needed - 1)
    with pytest.raises(UsageError, match="64 KiB"):
        check_sizes([64 * KIB], chosen, device=CPU)


def test_free_memory_is_some_of_the_machines():
    assert 0 < codec_bench.free_bytes(CPU) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_gpu_has_defaults_of_its_own():
    gpu = torch.device("cuda")
    assert not any(name.startswith("fbgemm") for name in codecs_of_each_kind(gpu))
    assert set(codecs_of_each_kind(gpu)) < set(codecs_of_each_kind(CPU)) <= set(CODECS)
    assert max(default_sizes(gpu)) == 2**30
    row_wise, grouped = [get_codec("fbgemm-int8")], [get_codec("int8")]
    assert needed_bytes(2**30, row_wise, device=gpu) > needed_bytes(2**30, grouped, device=gpu) + 2**34, "plain torch works on the whole tensor there"
    assert columns_of(gpu) * 4 < min(default_sizes(gpu))


# ------------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def hilore(monkeypatch, capfd, tmp_path):
    """Run `hilore` in this process and in an empty folder: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(malloc, "steady_malloc", lambda: True)
        monkeypatch.setattr(sys, "argv", ["hilore", *arguments])
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("COLUMNS", "80")
        for name in ("KINETO_LOG_LEVEL", "TORCH_CPP_LOG_LEVEL"):
            monkeypatch.setenv(name, "")  # main sets them; restored afterwards
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        return exit_.value.code, *capfd.readouterr()

    return run


def test_command_measures_keeps_and_shows(hilore, tmp_path):
    code, out, err = hilore("bench", "--codecs", "int8, mask", "--sizes", "8KiB,16KiB", "--repeats", "1", "--threads", "1", "--json", "-o", "codecs.json")
    assert code == 0, err
    document = json.loads(out)
    assert (document["format"], document["repeats"], document["machine"]["threads"]) == ("hilore-codec-bench", 1, 1)
    assert [(row["codec"], row["dtype"], row["nbytes"]) for row in document["rows"]] == [
        *(("int8", dtype, size * KIB) for dtype in ("float32", "bfloat16", "float16") for size in (8, 16)),
        *(("mask", "bool", size * KIB) for size in (8, 16)),
    ]
    assert "recomputing it takes less time" in " ".join(err.split()), "the table, for people"
    assert json.loads((tmp_path / "codecs.json").read_text()) == document
    code, out, _ = hilore("show", "codecs.json")
    assert code == 0
    assert "in GB/s" in out
    assert out.count("int8 ") >= 6
    code, out, _ = hilore("show", "codecs.json", "--json")
    assert json.loads(out) == document


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan.json", "--codecs", "all"], ["without a model", "leave out the plan"]),
        (["--codecs", "all", "--also", "store", "--skip-zero-rows"], ["leave out --also, --skip-zero-rows"]),
        (["--codecs", "all", "--model", "tiny", "--batch", "b", "--against", "p"], ["leave out --batch, --model, --against"]),
        (["--sizes", "1MiB"], ["give --codecs, too"]),
        (["--codecs", "int3"], ["codec 'int3' does not exist"]),
        (["--codecs", ""], ["no codec is named"]),
        (["--codecs", "int8", "--sizes", ","], ["--sizes names none"]),
        (["--codecs", "int8", "--sizes", "large"], ["size 'large' is not understood"]),
        (["--codecs", "int8", "--sizes", "100TiB"], ["size 100 TiB", "are free", "smaller --sizes"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("-") else "",
)
def test_bad_arguments_are_one_line(hilore, tmp_path, arguments, words):
    code, out, err = hilore("bench", *arguments)
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1
    assert all(word in err for word in words), err
    assert not list(tmp_path.iterdir())


def test_damaged_report_is_one_line(hilore, tmp_path):
    (tmp_path / "codecs.json").write_text('{"format": "hilore-codec-bench", "version": 99}')
    code, out, err = hilore("show", "codecs.json")
    assert (code, out, err.count("\n")) == (6, "", 1)
    assert "version 99 of hilore-codec-bench" in err
