"""hilore docs (hidden): the README's sections on commands, exit codes and variables, from the command line itself. A test compares.

    hilore docs --write README.md      # after a command or an option has changed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from hilore_cli.environment import OF_TESTS, VARIABLES
from hilore_cli.errors import HiloreError, UsageError

START, END = "<!-- hilore docs: from here on generated -->", "<!-- hilore docs: up to here -->"
SHARED_BY = 5
"""An option that so many commands have, in the same words, is described once."""


def docs_command(
    context: typer.Context,
    write: Annotated[Path | None, typer.Option(help="README whose generated sections are exchanged. Default: print them.", show_default=False)] = None,
) -> None:
    """Print the README's sections on commands, exit codes and variables."""
    text = document(context.find_root().command)
    if write is None:
        print(text, end="")
        return
    from hilore_cli.files import write_atomic

    write_atomic(write, exchanged(write.read_text(encoding="utf-8"), text, where=str(write)).encode())


def exchanged(readme: str, text: str, *, where: str) -> str:
    """The README with `text` between the two marks. Raises UsageError where they are missing."""
    if readme.count(START) != 1 or readme.count(END) != 1:
        raise UsageError(f"{where}: holds no {START} and {END}; put each there once, on a line of its own")
    before, rest = readme.split(START)
    return f"{before}{START}\n{text}{END}{rest.split(END)[1]}"


def document(top: Any) -> str:
    """Everything between the marks. `top`: the group of commands."""
    commands = {name: command for name, command in top.commands.items() if not command.hidden}
    shared = shared_options(commands.values())
    lines = ["", *(line for name, command in commands.items() for line in command_lines(name, command, shared)), "Options of several commands:", "", *option_table(shared.values())]
    lines += ["", "### Exit codes", "", "| code | |", "|---|---|", "| 0 | done |", *(f"| {code} | {cell(words)} |" for code, words in exit_codes())]
    lines += ["", "### Environment", "", "| variable | |", "|---|---|", *(f"| `{name}` | {cell(does)} |" for name, does in (VARIABLES | OF_TESTS).items()), ""]
    return "\n".join(lines) + "\n"


def command_lines(name: str, command: Any, shared: dict[str, Any]) -> Iterator[str]:
    """A command's usage and sentence; its arguments and options folded away."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    own = [p for p in command.params if key(p) not in shared]
    also = [option_names(p)[-1] for p in command.params if key(p) in shared]
    needed = [f"{option_names(p)[0]} {p.name.upper()}" for p in command.params if p.required and p not in arguments]
    usage = " ".join(["hilore", name, *needed, *(argument_name(a) for a in arguments)])
    yield f"<details><summary><code>{html(usage)}</code>: {html(' '.join(command.help.split()))}</summary>"
    yield ""
    if own:
        yield from option_table(own)
        yield ""
    if also:
        yield f"Also {', '.join(f'`{name}`' for name in also)}."
        yield ""
    yield "</details>"
    yield ""


def option_table(parameters: Any) -> Iterator[str]:
    yield "| | default | |"
    yield "|---|---|---|"
    for parameter in parameters:
        name = argument_name(parameter) if parameter.param_type_name == "argument" else ", ".join(option_names(parameter))
        default = parameter.default if parameter.show_default or isinstance(parameter.default, (str, int, float, Path)) else None
        shown = "" if default is None or default is False or default == "" or parameter.required else "yes" if default is True else f"`{default}`"
        variable = f" (`{parameter.envvar}`)" if getattr(parameter, "envvar", None) else ""
        yield f"| `{cell(name)}` | {'required' if parameter.required else cell(shown)} | {cell(parameter.help or '')}{variable} |"


def shared_options(commands: Any) -> dict[str, Any]:
    """By key, options that many commands have."""
    every = [parameter for command in commands for parameter in command.params if parameter.param_type_name == "option"]
    count = Counter(key(parameter) for parameter in every)
    return {key(parameter): parameter for parameter in every if count[key(parameter)] >= SHARED_BY}


def key(parameter: Any) -> str:
    return f"{parameter.name}: {parameter.help}"


def option_names(option: Any) -> list[str]:
    """`-o`, `--output`; the way to say no after a slash."""
    names = [*option.opts, *option.secondary_opts]
    return sorted(names, key=lambda name: name.startswith("--"))


def argument_name(argument: Any) -> str:
    name = (argument.metavar or argument.name.upper()).strip("[]")
    return name if argument.required else f"[{name}]"


def exit_codes() -> list[tuple[int, str]]:
    """From the exception family, and what the shell gets after Ctrl-C."""
    kinds: dict[int, str] = {}
    waiting = [HiloreError]
    while waiting:
        kind = waiting.pop(0)
        kinds.setdefault(kind.exit_code, " ".join((kind.__doc__ or "").split(". ")[0].split()).rstrip("."))
        waiting += kind.__subclasses__()
    return [*sorted({**kinds, HiloreError.exit_code: "Anything else that hilore refuses"}.items()), (130, "Interrupted")]


def cell(text: str) -> str:
    """Safe in a cell of a Markdown table."""
    return html(text).replace("|", "\\|")


def html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
