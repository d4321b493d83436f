"""hilore show: 80 columns, colour on terminals alone, estimates marked."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest
from reading_for_tests import write_files
from test_cli import here  # noqa: F401

from hilore_cli.files import save_json
from hilore_cli.quality_records import ArmRun, ErrorPoint, QualityRuns, RunsIdentity


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A measured profile and an estimated one, each with its plans."""
    paths = {name: tmp_path_factory.mktemp(name) for name in ("measured", "estimated")}
    for name, path in paths.items():
        write_files(path, layers=3, estimated=name == "estimated")
    return paths


@pytest.mark.parametrize("path", ["profiles/synthetic", "plans/roomy.plan.json", "plans/roomy.json", "bench.json"])
def test_show_fits_a_terminal(here, folders, path: str) -> None:  # noqa: F811
    code, out, err = here("show", path, folder=folders["measured"])
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "\x1b" not in out
    assert "estimated" not in out


@pytest.mark.parametrize(("path", "heading"), [("plans/roomy.plan.json", "estimated"), ("plans/roomy.json", "dry run")])
def test_estimates_are_marked(here, folders, path: str, heading: str) -> None:  # noqa: F811
    """In words, and as the heading of every figure that is foretold."""
    out = here("show", path, folder=folders["estimated"])[1]
    assert "estimated, not measured: times of a h100 (not compared with any measured" in out
    line = next(line for line in out.splitlines() if line.startswith(heading) and "not measured" not in line)
    assert "estimated" in line
    assert "predicted" not in line
    assert "estimated, not measured" in here("explain", "gate", path, "--no-resolve", folder=folders["estimated"])[1]


def test_unfinished_training_in_pairs_is_shown_run_by_run(here, tmp_path) -> None:  # noqa: F811
    """What hilore bench --quality keeps in its folder: runs that are there, one that is not yet, one that diverged."""
    identity = RunsIdentity(setting="gcd", setting_digest="0", hilore="0.1.0", torch="2.13.0", transformers="5", device="cpu", threads=1, checkpoint_digest="0", plan_digests={})
    rest = {"rewards": [], "weights_digest": "0", "seconds": 90.0}
    errors = [ErrorPoint(step=i, rel_error=error) for i, error in enumerate((0.001, 0.004, 0.5))]
    runs = [ArmRun(pair=pair, arm=arm, greedy=0.808, sampled=0.7973, errors=errors if arm == "hilore" else [], diverged_at=None, **rest) for pair, arm in ((0, "gc"), (0, "hilore"), (1, "gc"))]
    runs.insert(2, ArmRun(pair=0, arm="int2", greedy=0.0, sampled=0.0, errors=[], diverged_at=17, **rest))
    save_json(QualityRuns(identity=identity, runs=runs), tmp_path / "quality" / "gcd" / "runs.json")
    code, out, err = here("show", "quality/gcd/runs.json", folder=tmp_path)
    assert (code, err) == (0, "")
    assert "quality gcd: 4 finished runs, 6 minutes\non cpu, 1 thread" in out
    table = [line.split("  ") for line in out.splitlines() if line.startswith(("pair", "1", "2", "error "))]
    assert [[cell.strip() for cell in row if cell] for row in table] == [["pair", "gc", "hilore", "int2"], ["1", "80.80 79.73", "80.80 79.73", "diverged at 17"], ["2", "80.80 79.73", "-", "-"], ["error", "-", "4.0e-03", "-"]]
    assert "`hilore bench --quality --setting gcd`" in out


@pytest.mark.parametrize(("no_color", "styled", "red"), [(None, True, True), ("1", True, False)])
def test_colour_is_for_terminals(folders, no_color: str | None, styled: bool, red: bool) -> None:
    """On a pseudo-terminal there are styles, and colours unless NO_COLOR forbids them."""
    environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "TERM")} | {"TERM": "xterm-256color", "COLUMNS": "80"} | ({"NO_COLOR": no_color} if no_color else {})

    def on_terminal(*arguments: str) -> str:
        main, end = pty.openpty()
        finished = subprocess.Popen([sys.executable, "-m", "hilore_cli", *arguments], cwd=folders["measured"], env=environment, stdout=end, stderr=end)
        os.close(end)
        parts = []
        try:
            while part := os.read(main, 4096):
                parts.append(part)
        except OSError:  # the other end is closed: the command is done
            pass
        finished.wait(timeout=60)
        os.close(main)
        return b"".join(parts).decode()

    assert ("\x1b[1m" in on_terminal("show", "plans/roomy.plan.json")) == styled
    assert ("31m" in on_terminal("show", "nowhere.json")) == red
