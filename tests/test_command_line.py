"""What all commands have in common: options, completion, variables, and the README's sections that come from them."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from reading_for_tests import write_files

import hilore_cli
from hilore_cli import cli, models, presets
from hilore_cli.check_records import Check, CheckReport, FileChecks, Limits
from hilore_cli.commands import demo, docs, options
from hilore_cli.environment import OF_TESTS, VARIABLES
from hilore_cli.errors import UsageError
from hilore_cli.files import save_json

ROOT = Path(__file__).parents[1]
PACKAGE = Path(hilore_cli.__file__).parent
TOP = cli.build_command()


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder with a profile and plans; tests do not change it."""
    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    return folder


def complete(*words: str, folder: Path) -> list[str]:
    """What bash is offered for the last word."""
    environment = os.environ | {"_HILORE_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["hilore", *words]), "COMP_CWORD": str(len(words))}
    return subprocess.run([sys.executable, "-m", "hilore_cli"], cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout.split()


# -------------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_speaks_json_is_quiet_and_verbose(name):
    names = {option for parameter in TOP.commands[name].params for option in parameter.opts}
    assert {"--verbose", "-v"} <= names
    assert {"--json", "--quiet", "-q"} <= names


def test_version(here):
    assert here("--version") == (0, f"hilore {hilore_cli.__version__}\n", "")


def test_verbose_adds_solver_runs_and_time(here, files):
    profile = files / "profiles" / "synthetic"
    code, out, quiet = here("plan", str(profile), "--mem-cap", "1.3x-gc", "-o", "a.json", "-q", "--json")
    assert (code, quiet) == (0, "")
    code, verbose_out, err = here("plan", str(profile), "--mem-cap", "1.3x-gc", "-o", "a.json", "-q", "--json", "-v")
    assert code == 0
    assert {key: value for key, value in json.loads(verbose_out).items() if key != "solver"} == {key: value for key, value in json.loads(out).items() if key != "solver"}
    assert re.search(r"^CBC: \d+ rows, \d+ variables: Optimal in [\d.]+ s$", err, re.MULTILINE)
    assert re.search(r"^hilore plan: [\d.]+ s\n\Z", err, re.MULTILINE)
    assert here("plan", str(profile), "--mem-cap", "1.3x-gc", "-o", "a.json", "-q", "--json")[2] == "", "and the next command is quiet again"


def test_verbose_names_stages(here, files):
    code, _, err = here("frontier", str(files / "profiles" / "synthetic"), "-q", "-v", "--json", "--caps", "1.3", "--risks", "0")
    assert code == 0, err
    assert re.search(r"^solve: 1\.30x-gc, risk 0: [\d.]+ s$", err, re.MULTILINE), err


def test_capture_as_json(here):
    code, out, err = here("capture", "trl", "--json")
    document = json.loads(out)
    assert (code, err, document["trainer"]) == (0, "", "trl")
    assert "\n".join(document["lines"]) + "\n" == here("capture", "trl")[1]


def test_show_knows_what_check_wrote(here, tmp_path):
    report = CheckReport(date="2026-01-01", hilore="0", solver="CBC", limits=Limits(), passed=0, failed=1, skipped=0, files=[FileChecks(path="plans/a.json", kind="frozen plan", profile=None, estimated=False, checks=[Check(name="digest", status="failed", detail="covers other content")])])
    save_json(report, tmp_path / "check.json")
    code, out, _ = here("show", "check.json")
    assert code == 0
    assert all(words in out for words in ("plans/a.json: frozen plan", "digest", "failed", "covers other content", "1 of 1 checks failed"))
    assert json.loads(here("show", "check.json", "--json")[1]) == report.model_dump(mode="json")


# ----------------------------------------------------------------------------------------------------------- completion


def test_completion_is_not_listed():
    for name in ("install_completion", "show_completion"):
        assert next(p for p in TOP.params if p.name == name).hidden


def test_completion_in_a_shell(tmp_path):
    """One process, as the shell calls it: presets, without loading torch."""
    assert complete("rollout", "--model", "llama", folder=tmp_path) == ["llama-1b", "llama-3b", "llama-8b"]


def test_what_is_completed(monkeypatch, files):
    monkeypatch.chdir(files)
    assert options.complete_models("") == sorted(presets.PRESETS)
    assert options.complete_plans("plans/ro") == ["plans/roomy.json", "plans/roomy.plan.json"]
    assert options.complete_profiles("") == ["profiles/synthetic"]
    assert options.complete_plans("elsewhere/") == [], "shells then offer files"
    assert options.complete_trainers("o") == ["openrlhf", "own"]
    assert "math" in options.complete_tasks("ma")
    assert options.complete_tasks("mathh") == []


@pytest.mark.parametrize(("command", "parameter"), [("profile", "model"), ("profile", "task"), ("plan", "profile"), ("apply", "plan"), ("bench", "frozen_plan"), ("bench", "model"), ("show", "path"), ("explain", "plan"), ("diff", "a"), ("frontier", "profile"), ("report", "plan"), ("check", "paths"), ("doctor", "target"), ("capture", "trainer")])
def test_parameters_that_complete(command, parameter, monkeypatch, files):
    monkeypatch.chdir(files)
    found = next(p for p in TOP.commands[command].params if p.name == parameter)
    context = SimpleNamespace(params={}, command=TOP.commands[command])
    assert found.shell_complete(context, ""), f"{command}: nothing is offered for {parameter}"
    assert all(item.type != "file" for item in found.shell_complete(context, "")), "the shell's own files are what there is without a completion"


# ------------------------------------------------------------------------------------------------------------ variables


def variables_in(folder: Path) -> set[str]:
    """HILORE_* names in the code, but for typer's own _HILORE_COMPLETE."""
    texts = (path.read_text(encoding="utf-8") for path in [*folder.rglob("*.py"), *folder.glob("Makefile")])
    return {name for text in texts for name in re.findall(r"(?<![A-Z_])HILORE_[A-Z_]+\b", text)}


def test_every_variable_is_documented():
    assert variables_in(PACKAGE) == set(VARIABLES | OF_TESTS)
    tests = variables_in(ROOT / "tests") - {"HILORE_DEVISE"}  # one that a test misspells
    assert tests <= set(VARIABLES | OF_TESTS)
    assert set(OF_TESTS) <= tests
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in VARIABLES | OF_TESTS if f"`{name}`" not in readme] == []


def test_help_names_the_variables(here):
    text = here("--help")[1]
    assert all(name in text for name in (*VARIABLES, "--install-completion"))
    assert not any(name in text for name in OF_TESTS)


def test_variables_are_read(here, monkeypatch):
    monkeypatch.setenv("HILORE_THREADS", "none")
    code, _, err = here("bench", "--codecs", "int8")
    assert (code, "HILORE_THREADS" in err) == (2, True), err


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "p.json", "--suite", "-o"),
        ("bench", "p.json", "--suite", "--csv"),
        ("bench", "p.json", "--suite", "--parquet"),
        ("bench", "p.json", "--suite", "--png"),
        ("ablate", "profiles/p", "-o"),
        ("plan", "profiles/p", "-o"),
        ("apply", "p.plan.json", "-o"),
        ("check", "-o"),
        ("check", "--junit"),
        ("report", "p.json", "-o"),
    ],
    ids=" ".join,
)
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_read(here, tmp_path, arguments) -> None:
    """The inputs are not there either: the output is named, so it was looked at first."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for output, said in (("file/out", "file/out: in file is a file where a folder would have to be; give another path"), ("folder", "folder: is a folder; name a file")):
        code, out, err = here(*arguments, output)
        assert (code, out) == (2, "")
        assert said in " ".join(err.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


# --------------------------------------------------------------------------------------------------------------- README


def test_the_readme_is_that_of_the_command_line():
    """After a change: hilore docs --write README.md."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert docs.exchanged(readme, docs.document(TOP), where="README.md") == readme


def test_the_document_has_every_command_option_and_exit_code():
    text = docs.document(TOP)
    sections = dict(re.findall(r"<code>hilore (\S+?)[ <].*?</summary>(.*?)</details>", text, re.DOTALL))
    assert list(sections) == list(cli.COMMANDS), "docs itself is hidden"
    for name, section in sections.items():
        for parameter in TOP.commands[name].params:
            assert parameter.param_type_name == "argument" or any(f"`{option}" in section or f", {option}`" in section for option in parameter.opts), (name, parameter.name)
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)] == [*range(10), 130]
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) in (3, 4) for line in tables), "a bar in a cell is escaped"
    assert "<code>hilore explain UNIT|LAYER" in text, "outside a table a backslash would be seen"
    assert "| `--seed` | `0` |" in sections["profile"], "0 is a default, too"


def test_docs_are_written_between_the_marks(here, tmp_path):
    (tmp_path / "README.md").write_text(f"before\n{docs.START}\nold\n{docs.END}\nafter\n")
    assert here("docs", "--write", "README.md") == (0, "", "")
    text = (tmp_path / "README.md").read_text()
    assert text == f"before\n{docs.START}\n{docs.document(TOP)}{docs.END}\nafter\n"
    with pytest.raises(UsageError, match="once, on a line of its own"):
        docs.exchanged("no marks", "text", where="x")


def test_wrapped_commands_keep_their_own_parameters():
    for name, function in cli.COMMANDS.items():
        own = [parameter for parameter in inspect.signature(function).parameters if parameter != "verbose"]
        assert own == [parameter.name for parameter in TOP.commands[name].params if parameter.name not in ("verbose", "help")]


# ----------------------------------------------------------------------------------------------------------------- demo


@pytest.fixture
def steps(monkeypatch):
    """The demo's commands instead of running them; the second answers with an exit code when told."""
    ran: list[list[str]] = []
    answers = {"code": 0}

    def run(command, *, stdout=None, **_):
        ran.append(command[3:])
        return SimpleNamespace(returncode=answers["code"] if len(ran) == 2 else 0, stdout=b'{"format": "hilore-x"}' if stdout is not None else None)

    monkeypatch.setattr(demo.subprocess, "run", run)
    monkeypatch.setattr(models, "resolve_model", lambda _: None)
    return ran, answers


def test_the_demo_has_names_of_its_own(here, steps):
    """In a checkout it must not write over the reference profile and plans."""
    ran, _ = steps
    code, out, _ = here("demo", "--quick")
    assert code == 0
    assert [command[0] for command in ran] == ["profile", "plan", "apply", "bench"]
    assert ran[0][ran[0].index("--name") + 1] == "demo"
    assert [command[1] for command in ran[1:]] == ["profiles/demo", "plans/demo.plan.json", "plans/demo.json"]
    assert "plans/demo.json" in out


def test_what_the_demo_writes_is_no_part_of_a_checkout():
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    written = ["profiles/demo/profile.json", "plans/demo.json", "plans/demo.plan.json"]
    ignored = subprocess.run(["git", "check-ignore", *written], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    assert ignored == written


def test_the_demo_as_json_and_quiet(here, steps):
    ran, answers = steps
    code, out, err = here("demo", "--json", "-q")
    assert (code, err) == (0, "")
    assert [step["result"]["format"] for step in json.loads(out)["steps"]] == ["hilore-x"] * 4
    assert all({"--json", "-q"} <= set(command) for command in ran)
    ran.clear()
    assert here("demo", "-q")[:2] == (0, "")
    ran.clear()
    answers["code"] = 5
    assert here("demo", "--json", "-q") == (5, "", "")
    assert len(ran) == 2, "a step that fails is the last"
