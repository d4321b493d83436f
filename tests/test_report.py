"""hilore report: the pictures' numbers are those of the plan, the page is one file that any browser opens, light, dark and narrow."""

from __future__ import annotations

import html.parser
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from plans_for_tests import small_profile
from plans_for_tests import solved as small_plan
from profiles_for_tests import chain_class, make_profile
from reading_for_tests import bench_of, frozen_of, solved, write_files
from test_cli import here  # noqa: F401

from hilore_cli.errors import PlanMismatchError
from hilore_cli.files import save_json, save_profile
from hilore_cli.frontier import solve_frontier
from hilore_cli.page.document import render_page
from hilore_cli.page.pictures import all_pictures
from hilore_cli.page.rows import (
    PARTS,
    Shown,
    Story,
    action_rows,
    memory_rows,
    moment_rows,
    outcome_rows,
    pair_rows,
    risk_rows,
)
from hilore_cli.page.theme import COLOURS
from hilore_cli.schema import Pattern, Profile
from hilore_cli.timeline import simulate_step

KEYS = ["memory", "actions", "frontier", "risks", "measured"]


@pytest.fixture(scope="module")
def profile() -> Profile:
    return make_profile(layers=5)


@pytest.fixture(scope="module")
def story(profile: Profile) -> Story:
    plan = solved(profile, cap="1.05x-gc")
    frozen = frozen_of(plan)
    return Story(plan=plan, profile=profile, frozen=frozen, frontier=solve_frontier(profile, codecs=["int8"], caps=(1.0, 1.1), risks=(0.0, 0.015)), benches=(bench_of(frozen, profile),))


@pytest.fixture(scope="module")
def shown(story: Story) -> Shown:
    return Shown(story)


@pytest.fixture(scope="module")
def page(story: Story) -> str:
    return render_page(story)


# ------------------------------------------------------------------------------------------------------------ the numbers


def test_the_picture_of_memory_peaks_where_the_plan_does(story: Story, shown: Shown) -> None:
    """The stack's highest sum is the predicted peak to the byte, at the predicted moment; the dashed line's is that of the simulation."""
    sums: dict[str, int] = {}
    for row in memory_rows(shown):
        sums[row["moment"]] = sums.get(row["moment"], 0) + row["nbytes"]
    assert max(sums.values()) == story.plan.predicted.peak_bytes
    assert max(sums, key=sums.__getitem__) == story.plan.predicted.binding_moment
    assert sums == {row["moment"]: row["nbytes"] for row in moment_rows(shown)}
    everything_recomputed = simulate_step(story.profile, [Pattern()] * 5)
    assert max(row["gc_bytes"] for row in moment_rows(shown)) == everything_recomputed.peak_bytes


def test_memory_rows_tell_stored_from_compressed(story: Story, shown: Shown) -> None:
    at_head = {row["part"]: row["nbytes"] for row in memory_rows(shown) if row["moment"] == "loss head"}
    predicted, account = story.plan.predicted, story.profile.account
    assert (at_head["stored"] + at_head["compressed"], at_head["compressed"]) == (predicted.stored_bytes, predicted.compressed_bytes)
    assert (at_head["weights"], at_head["gradients"], at_head["optimizer"], at_head["head"]) == (account.weights_bytes, account.gradients_bytes, account.optimizer_bytes, account.head_bytes)
    assert set(at_head) == set(PARTS)
    moments = [row["moment"] for row in moment_rows(shown)]
    assert moments == [*(f"forward of layer {i}" for i in range(5)), "loss head", *(f"backward of layer {i}" for i in reversed(range(5))), "embedding backward", "optimizer step"]


def test_the_map_is_the_plan(story: Story, shown: Shown) -> None:
    cells = {(row["layer"], row["unit"]): row["action"] for row in action_rows(shown)}
    for layer, name in enumerate(story.plan.layers):
        for unit, action in story.plan.patterns[name].actions.items():
            assert cells[layer, unit] == action.removeprefix("compress:"), "whatever the plan names has a cell"
    nodes = story.profile.classes[0].nodes
    owners = {nodes[i].storage for node in nodes if node.side == "backward" for i in node.inputs}
    read = [nodes[i] for i in owners if i >= 0 and nodes[i].side == "forward" and nodes[i].unit]
    large = {node.unit for node in read if node.nbytes > 0.05 * sum(other.nbytes for other in read)}
    assert {"mlp.gate_proj.mm", "mlp.up_proj.mm", "mlp.mul"} <= large <= {unit for _, unit in cells}, "what backward reads, through views too, whether or not it is kept"
    named = sum(len(story.plan.patterns[name].actions) for name in story.plan.layers)
    assert sum(action != "recompute" for (_, unit), action in cells.items() if unit != "input") <= named


def test_risks_of_the_picture_add_up_to_the_plans(story: Story, shown: Shown) -> None:
    brought = [row["in_plan"] for row in risk_rows(shown) if row["in_plan"] is not None]
    assert math.sqrt(sum(error**2 for error in brought)) == pytest.approx(story.plan.predicted.rel_error)
    assert brought


def test_predicted_and_measured(story: Story) -> None:
    pairs = pair_rows(story)
    assert {row["kind"] for row in pairs} == {"calibration, int8", "calibration, int4", "this plan"}
    outcomes = {(row["where"][:8], row["figure"]): row for row in outcome_rows(story)}
    assert outcomes["dry run,", "peak"]["measured"] == story.frozen.measured.peak_bytes
    assert outcomes["benchmar", "step"]["measured"] / outcomes["benchmar", "step"]["predicted"] == pytest.approx(1.04)


def test_without_codecs_frontier_and_measurements_their_pictures_are_left_out() -> None:
    profile = make_profile(layers=2, layer_class=chain_class(), codecs=())
    bare = Story(plan=solved(profile, risk=0.0, codecs=(), cap="1.05x-gc"), profile=profile, frozen=None, frontier=None, benches=())
    assert [picture.key for picture in all_pictures(Shown(bare))] == ["memory", "actions"]


def test_another_profile_is_refused(story: Story) -> None:
    with pytest.raises(PlanMismatchError, match="has 5 layers, profile synthetic has 4"):
        Shown(Story(plan=story.plan, profile=make_profile(layers=4), frozen=None, frontier=None, benches=()))


# --------------------------------------------------------------------------------------------------------------- the page


class Reader(html.parser.HTMLParser):
    """What a page asks for from elsewhere, and what it says of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.ids: list[str] = []
        self.labels: list[str] = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.asked += [values[key] for key in ("src", "href", "xlink:href", "data", "action") if values.get(key) and not values[key].startswith(("#", "data:"))]
        if "id" in values:
            self.ids.append(values["id"])
        if tag == "svg":
            self.labels.append(values.get("aria-label", ""))
            assert values.get("role") == "img"


def test_the_page_needs_nothing_else(page: str) -> None:
    reader = Reader()
    reader.feed(page)
    assert reader.asked == []
    assert not re.search(r"@import|url\((?!#)|fetch\(|<link(?![^>]*data:,)", page)
    assert len(reader.ids) == len(set(reader.ids)), "one id twice would let pictures clip each other"
    assert len(reader.labels) == 2 * len(KEYS)
    assert all(len(label) > 40 for label in reader.labels)
    assert all(f'<section id="{key}"' in page for key in KEYS)
    assert len(page) < 2_000_000


def test_what_records_say_is_text_on_the_page(story: Story) -> None:
    model = story.plan.model.model_copy(update={"source": "<script>alert(1)</script>&amp"})
    page = render_page(Story(plan=story.plan.model_copy(update={"model": model, "name": '"><img src=x>'}), profile=story.profile, frozen=None, frontier=None, benches=()))
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_estimates_are_marked(story: Story) -> None:
    from reading_for_tests import ESTIMATE

    estimated = render_page(Story(plan=story.plan.model_copy(update={"estimate": ESTIMATE}), profile=story.profile, frozen=None, frontier=None, benches=()))
    assert "Estimated." in estimated
    assert "computed for a h100" in estimated


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_text_has_contrast(mode: int) -> None:
    """WCAG: 4.5 for text, 3 for what carries meaning by itself."""

    def luminance(name: str) -> float:
        channels = [int(COLOURS[name][mode][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    def contrast(a: str, b: str) -> float:
        high, low = sorted((luminance(a), luminance(b)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    assert all(contrast(text, "surface") >= 4.5 for text in ("ink", "quiet", "accent"))
    assert contrast("on-store", "store") >= 4.5
    assert contrast("on-compress", "compress") >= 4.5
    assert contrast("store", "compress") >= 1.7
    assert contrast("store", "recompute") >= 3


# ------------------------------------------------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("report")
    write_files(path, layers=3)
    return path


def test_command(here, folder, tmp_path) -> None:  # noqa: F811
    """The page and its pictures, from a frozen plan and a benchmark of it."""
    code, out, err = here("report", "plans/roomy.json", "-o", str(tmp_path / "page.html"), "--png", str(tmp_path / "png"), "--bench", "bench.json", "--no-frontier", "--json", folder=folder)
    assert code == 0, err
    document = json.loads(out)
    assert (tmp_path / "page.html").stat().st_size == document["bytes"]
    assert [Path(p).stem for p in document["pictures"]] == [key for key in KEYS if key != "frontier"]
    for path in document["pictures"]:
        width, height = png_size(Path(path))
        assert width > 600
        assert height > 200
    page = (tmp_path / "page.html").read_text()
    assert "benchmark, 2026-01-03" in page
    assert "dry run, 2026-01-02" in page


def png_size(path: Path) -> tuple[int, int]:
    """Width and height in pixels, of a file that is a PNG."""
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])


def test_other_budgets_are_drawn_too(here, tmp_path) -> None:  # noqa: F811
    """Without --no-frontier: the command solves them, and their picture is in the page and among the files."""
    profile = small_profile()
    save_profile(profile, tmp_path / "profiles" / profile.name)
    save_json(small_plan(profile), tmp_path / "plans" / "p.plan.json")
    code, out, err = here("report", "--png", "png", "--json", folder=tmp_path)
    assert code == 0, err
    assert "png/frontier.png" in json.loads(out)["pictures"]
    width, height = png_size(tmp_path / "png" / "frontier.png")
    assert 1600 < width < 1900, "twice the page's 860"
    assert height > 640
    assert '<section id="frontier"' in (tmp_path / "report.html").read_text()


def test_without_the_drawing_library_one_line_says_what_to_install(here, folder, monkeypatch) -> None:  # noqa: F811
    for name in [name for name in sys.modules if name.startswith("hilore_cli.page")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "altair", None)
    code, out, err = here("report", "plans/roomy.json", "-o", "never.html", folder=folder)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "pip install 'hilore[report]'" in err
    assert not (folder / "never.html").exists()


def test_a_benchmark_of_another_plan_is_refused(here, folder, tmp_path) -> None:  # noqa: F811
    write_files(tmp_path, layers=4)
    code, _, err = here("report", "plans/roomy.json", "--bench", str(tmp_path / "bench.json"), "-o", "never.html", folder=folder)
    assert code == 2
    assert "a benchmark of plan roomy" in err
    assert not (folder / "never.html").exists()


# ------------------------------------------------------------------------------------------------------------ the browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PROBE = """<script>
addEventListener("load", () => {
  const boxes = [...document.querySelectorAll("main svg")].map((svg) => [svg.closest("section").id, svg.getBoundingClientRect()]).filter(([, box]) => box.width > 0);
  const before = getComputedStyle(document.body).backgroundColor;
  const ink = getComputedStyle(document.querySelector("#memory svg text")).fill;
  document.getElementById("theme").click();
  const after = getComputedStyle(document.body).backgroundColor;
  const mark = [...document.querySelectorAll("#actions svg [role=graphics-symbol]")].find((m) => m.getBoundingClientRect().width > 0);
  mark.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: 20, clientY: 20 }));
  const told = document.getElementById("tip").textContent;
  const probe = document.createElement("pre");
  probe.id = "probe";
  probe.textContent = JSON.stringify({ boxes: boxes.map(([id, b]) => [id, b.left, b.width, b.height]), before, after, ink, told, wide: document.documentElement.scrollWidth, window: innerWidth });
  document.body.append(probe);
});
</script></body>"""


def browse(page: str, folder: Path, *, width: int, dark: bool) -> tuple[dict, str]:
    """Open a copy of the page that measures itself: what it found, and what the browser complained of."""
    (folder / "page.html").write_text(page.replace("</body>", PROBE))
    quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-gpu", "--no-sandbox"]
    command = [CHROMIUM, "--headless", *quiet, f"--user-data-dir={folder / 'user'}", f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--window-size={width},900", "--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom", (folder / "page.html").as_uri()]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env={**os.environ, "HOME": str(folder)})
    found = re.search(r'<pre id="probe">(.*?)</pre>', finished.stdout, re.DOTALL)
    assert found, finished.stderr
    return json.loads(html.unescape(found[1])), "\n".join(line for line in finished.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: the report is not opened in a browser (apt-get install chromium)")
@pytest.mark.parametrize(("width", "dark"), [(1100, False), (1100, True), (500, False)], ids=["light", "dark", "narrow"])
def test_a_browser_shows_every_picture(page: str, tmp_path, width: int, dark: bool) -> None:
    """All pictures have a size and fit the window, nothing is logged, the page follows the system's colours and its own button."""
    found, complaints = browse(page, tmp_path, width=width, dark=dark)
    assert complaints == ""
    assert [box[0] for box in found["boxes"]] == KEYS, "one of the wide and the narrow drawing is shown, of every picture"
    for key, left, wide, high in found["boxes"]:
        assert wide > 0.4 * min(width, 860), key
        assert high > 100, key
        assert left >= 0, key
        assert left + wide <= width, key
    assert found["wide"] <= found["window"], "nothing scrolls sideways"
    light, night = (f"rgb({', '.join(str(int(COLOURS['surface'][mode][i : i + 2], 16)) for i in (1, 3, 5))})" for mode in (0, 1))
    assert (found["before"], found["after"]) == ((night, light) if dark else (light, night))
    assert found["ink"] not in ("rgb(0, 0, 0)", "none", ""), "the pictures take the page's colours"
    assert re.match(r"layer \d+, .*: (store|int8|recompute) \(", found["told"]), "the pointer finds what a cell is"
