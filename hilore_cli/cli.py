"""The command line: profile -> plan -> apply -> bench, and what reads, checks and shows their files.

    hilore profile --model smollm2-135m --task math
    hilore plan --mem-cap 1.1x-gc --risk 0.015
    hilore apply
    hilore bench

stdout is for results (one JSON document with --json), stderr for notes, progress and errors. An error is one line and an exit code
(errors.py). What each command does is in commands/.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any, NoReturn

import typer

import hilore_cli
from hilore_cli.commands import (
    ablate,
    bench,
    check,
    demo,
    diff,
    docs,
    doctor,
    explain,
    frontier,
    plan,
    profile,
    report,
    rollout,
    schema,
    show,
)
from hilore_cli.commands.options import Verbose
from hilore_cli.environment import VARIABLES
from hilore_cli.errors import HiloreError, UsageError
from hilore_cli.views.console import print_error, print_warning, shown_log

INTERRUPTED = 130

CommandLineError: type[Exception] = typer.BadParameter.__base__
"""Unknown options and the like. typer carries click inside since 0.2x, so there is no click to take UsageError from."""

app = typer.Typer(
    name="hilore",
    pretty_exceptions_enable=False,
    help="Profile one GRPO step and compile a plan: which activations to store, compress or recompute under a memory cap and a gradient-error budget.",
    epilog="\n\n".join(
        [
            "First contact: hilore demo. What is here and what is missing: hilore doctor. Completion of your shell: hilore --install-completion.",
            *(f"{name}: {does}" for name, does in VARIABLES.items()),
        ]
    ),
)


def main() -> NoReturn:
    """Console entry: runs the command, turns what went wrong into one line and an exit code."""
    # read once, when torch is loaded: kineto prints two lines at each memory trace, and torch's allocator one for a block
    # that was there before the trace
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch's deterministic mode, in which gradients are compared, refuses matrix products
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin while another process has their core cost a step tenfold
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|torch")
    warnings.showwarning = lambda message, *_: print_warning(str(message))
    try:
        code = build_command()(prog_name="hilore", standalone_mode=False)
    except HiloreError as error:
        print_error(str(error))
        code = error.exit_code
    except CommandLineError as error:
        context = getattr(error, "ctx", None)
        print_error(f"{error.format_message().rstrip('.')}; see: {'hilore' if context is None else context.command_path} --help")
        code = UsageError.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:  # `hilore show ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print_error(f"{where}{error.strerror or error}; check the path, its permissions and the free space")
        code = HiloreError.exit_code
    if code == INTERRUPTED:
        print_error("interrupted; run again, `hilore profile`, `bench --suite -o` and `bench --quality` go on where they stopped, all else begins anew")
    raise SystemExit(code if isinstance(code, int) else 0)


@app.callback(invoke_without_command=True)
def top(context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"hilore {hilore_cli.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


COMMANDS: dict[str, Callable[..., None]] = {
    "profile": profile.profile_command,
    "plan": plan.plan_command,
    "apply": plan.apply_command,
    "bench": bench.bench_command,
    "rollout": rollout.rollout_command,
    "capture": rollout.capture_command,
    "check": check.check_command,
    "show": show.show_command,
    "explain": explain.explain_command,
    "diff": diff.diff_command,
    "frontier": frontier.frontier_command,
    "ablate": ablate.ablate_command,
    "report": report.report_command,
    "schema": schema.schema_command,
    "doctor": doctor.doctor_command,
    "demo": demo.demo_command,
}
"""One file per command, or per few that belong together. torch, transformers, pandas and the solver are imported inside functions: `hilore --help` must answer at once."""


def with_verbose(command: Callable[..., None], *, name: str) -> Callable[..., None]:
    """The command with `--verbose` beside its own options, which is the same for all."""

    @functools.wraps(command)
    def run(*, verbose: bool = False, **arguments: Any) -> None:
        with shown_log(name) if verbose else nullcontext():
            command(**arguments)

    signature = inspect.signature(command, eval_str=True)
    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in signature.parameters.values()]
    parameters = [*own, inspect.Parameter("verbose", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Verbose)]
    run.__signature__ = signature.replace(parameters=parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def build_command() -> Any:
    """The command line. Completion's options are said in the help's last lines, and not listed."""
    command = typer.main.get_command(app)
    for parameter in command.params:
        if parameter.name in ("install_completion", "show_completion"):
            parameter.hidden = True
    return command


for name, function in COMMANDS.items():
    app.command(name)(with_verbose(function, name=name))
app.command("docs", hidden=True)(docs.docs_command)
