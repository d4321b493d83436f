"""The house of design section 8: who may import whom, who may know which library, and what loads at a cold start."""

from __future__ import annotations

import ast
import functools
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import hilore_cli

PACKAGE = Path(hilore_cli.__file__).parent
FLOORS = {
    0: ["errors", "environment", "findings", "sizes", "records", "provenance", "schema", "bench_records", "check_records", "suite_records", "quality_records", "ablation_records", "files", "stages", "json_schemas", "malloc", "presets"],
    1: ["exposure", "devices", "relative", "scaling", "timeline", "ilp", "program", "step_planner", "planner", "check", "frontier", "explain", "diff", "ablations"],
    2: ["codecs"],
    3: ["capture", "frozen_weights", "output_capture", "adapters", "partition", "capture_failures", "choice", "replay", "gradient_error", "guard", "runtime", "batches", "captured", "tasks", "wheel_models", "models", "lora", "grpo", "stretch", "norms"],
    4: ["rollout", "peak", "risk", "workbench", "calibration", "uncaptured", "identities", "whole_step", "profiler", "bench", "peers", "paper_dp", "suite", "quality", "ablation_bench", "codec_bench", "fake", "estimate", "streamed", "check_model"],
    5: ["integrations", "trainer_settings", "doctor"],
    6: ["views", "page", "commands", "cli", "__main__"],
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names}
TRAINING = ["runtime", "partition", "capture", "codecs", "schema", "files"]
NOT_IN_TRAINING = {"pulp", "pandas", "typer", "rich"}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(path: Path) -> str:
    """`codecs` for hilore_cli/codecs/cpu.py, `cli` for hilore_cli/cli.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def imports_of(path: Path, *, nested: bool = True) -> set[str]:
    """Dotted names that a file imports when it runs; those for type checkers are left out."""
    found: set[str] = set()

    def walk(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and not nested:
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports by their whole name only"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            walk(child)

    walk(ast.parse(path.read_text(encoding="utf-8")))
    return found


def own_parts(path: Path, *, nested: bool = True) -> set[str]:
    """Our own parts that a file imports; `hilore_cli.__version__` and the like are none."""
    names = (name.split(".") for name in imports_of(path, nested=nested) if name.startswith("hilore_cli."))
    return {parts[1] for parts in names if parts[1] in FLOOR_OF}


def libraries(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports_of(path)}


def reached_from(part: str) -> set[str]:
    """A part and all parts of ours that it brings in."""
    reached, waiting = set(), [part]
    while waiting:
        current = waiting.pop()
        if current not in reached:
            reached.add(current)
            waiting.extend(p for path in FILES if part_of(path) == current for p in own_parts(path))
    return reached


def test_every_file_has_a_floor():
    assert {part_of(path) for path in FILES} - set(FLOOR_OF) == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path):
    mine = FLOOR_OF[part_of(path)]
    above = {part for part in own_parts(path) if FLOOR_OF[part] > mine}
    assert not above, f"{path.name} is on floor {mine} and imports {above}"
    assert "cli" not in own_parts(path) or part_of(path) == "__main__"
    assert "commands" not in own_parts(path) or part_of(path) in ("commands", "cli")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_libraries_stay_where_they_belong(path):
    part, used = part_of(path), libraries(path)
    if FLOOR_OF[part] <= 1:
        assert not used & {"torch", "transformers", "functorch", "rich", "typer"}
    if part not in ("views", "commands", "cli"):
        assert not used & {"rich", "typer"}
    if part != "ilp":
        assert "pulp" not in used
    if part != "partition":
        partitioners = [name for name in imports_of(path) if name.startswith(("functorch", "torch._functorch"))]
        assert not partitioners, "only partition.py imports torch's partitioner"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_our_imports_inside_functions_are_at_the_torch_edge(path):
    """Allowed in commands/ alone, which must start without torch: elsewhere they would hide a circle."""
    hidden = own_parts(path) - own_parts(path, nested=False)
    assert not hidden or part_of(path) == "commands", f"{path.name} imports {hidden} inside a function"


@pytest.mark.parametrize("part", TRAINING)
def test_training_reaches_no_solver_table_or_terminal(part):
    reached = reached_from(part)
    for path in FILES:
        if part_of(path) in reached:
            assert not libraries(path) & NOT_IN_TRAINING, f"{part} reaches {path.name}"


def test_no_import_circles():
    edges = {part: set() for part in FLOOR_OF}
    for path in FILES:
        edges[part_of(path)] |= own_parts(path) - {part_of(path)}
    while edges:
        free = [part for part, needs in edges.items() if not needs & set(edges)]
        assert free, f"a circle among {sorted(edges)}"
        for part in free:
            del edges[part]


# ----------------------------------------------------------------------------------------------------------- cold starts


def loaded_by(code: str) -> set[str]:
    """Top-level packages in sys.modules after a fresh Python ran the code."""
    script = f"{code}\nimport sys\nprint('LOADED', *sorted({{name.split('.')[0] for name in sys.modules}}))"
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    return set(finished.stdout.split("LOADED", 1)[1].split())


def seconds_of(*arguments: str) -> tuple[float, str]:
    """CPU seconds, which other tests beside this one do not lengthen, and what is printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    finished = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, finished.stdout


def test_help_is_fast():
    """In units of what any command line of typer and rich costs: 0.27 s of 0.15 s on one machine are 0.52 s on a slower one."""
    runs = [(seconds_of("-m", "hilore_cli", "--help"), seconds_of("-c", "import typer.rich_utils, rich.markdown, rich.table")) for _ in range(5)]
    shown = runs[0][0][1]
    assert all(command in shown for command in ("profile", "plan", "apply", "bench", "rollout", "capture", "show", "demo"))
    assert min(ours for (ours, _), _ in runs) < 2.5 * min(libraries for _, (libraries, _) in runs)


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["--version"], ["plan", "--mem-cap", "much"]], ids=" ".join)
def test_help_and_early_errors_load_no_heavy_library(arguments):
    code = f"import sys\nsys.argv = ['hilore', *{arguments!r}]\nfrom hilore_cli.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass"
    assert not loaded_by(code) & {"torch", "transformers", "pandas", "pulp", "numpy", "pyarrow"}


def test_planning_loads_no_torch():
    assert not loaded_by("import hilore_cli.planner") & {"torch", "transformers", "typer", "rich", "pandas"}


def test_training_loads_no_solver_table_or_terminal():
    ours = loaded_by("import hilore_cli.runtime") & NOT_IN_TRAINING
    theirs = loaded_by("import torch, torch._dynamo, functorch.compile, transformers.models.auto.modeling_auto, huggingface_hub")
    assert ours <= theirs
