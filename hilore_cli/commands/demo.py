"""hilore demo."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from hilore_cli.commands.inputs import (
    load_batches,
)
from hilore_cli.commands.options import (
    SHIPPED_BATCHES,
    SHIPPED_HELDOUT,
    SHIPPED_MODEL,
    SHIPPED_TASK,
    Json,
    Quiet,
)
from hilore_cli.views.console import print_view
from hilore_cli.views.plan import trainer_lines

NAME = "demo"
"""Of the profile and the plans: not those of a checkout's reference files."""

def demo_command(
    folder: Annotated[Path, typer.Option(help="Folder to write profiles/ and plans/ into.")] = Path("."),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats: noisier figures.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The whole job on SmolLM2-135M and recorded rollouts of a math task: profile, plan, apply, bench."""
    from hilore_cli.models import resolve_model

    resolve_model(SHIPPED_MODEL)
    load_batches([*SHIPPED_BATCHES, SHIPPED_HELDOUT])
    folder.mkdir(parents=True, exist_ok=True)
    options = " --json" * as_json + " -q" * quiet
    steps = [
        ("Measure one GRPO update: time, bytes and risk of each activation in 30 layers.", f"profile --model {SHIPPED_MODEL} --task {SHIPPED_TASK} --name {NAME} --codecs fbgemm-int8 --repeats {1 if quick else 2}"),
        ("Solve: what to store, compress and recompute for the fastest step under 1.1 x the peak of gradient checkpointing (GC).", f"plan profiles/{NAME} --mem-cap 1.1x-gc --risk 0.015"),
        ("Bind the plan to the model: run one update, compare peak and gradient error with the prediction, on rollouts that were not profiled.", f"apply plans/{NAME}.plan.json"),
        ("Run no checkpointing, GC and the plan side by side, on the rollouts that were not profiled.", f"bench plans/{NAME}.json --batch {SHIPPED_HELDOUT} --repeats {2 if quick else 3}"),
    ]
    tell = partial(print_view, to_stderr=as_json) if not quiet else (lambda _: None)
    started, results = time.monotonic(), []
    for number, (what, command) in enumerate(steps, 1):
        before = time.monotonic()
        tell(Text(f"\n[{number}/{len(steps)}] {what}", style="bold"))
        tell(Text(f"$ hilore {command}", style="cyan"))
        # each step is the very command, in a process of its own: its figures are those that the user gets
        finished = subprocess.run([sys.executable, "-m", "hilore_cli", *(command + options).split()], cwd=folder, check=False, stdout=subprocess.PIPE if as_json else None)
        if finished.returncode:
            raise typer.Exit(finished.returncode)
        seconds = time.monotonic() - before
        results.append({"command": f"hilore {command}", "seconds": seconds} | ({"result": json.loads(finished.stdout)} if as_json else {}))
        tell(Text(f"({seconds:.0f} s)", style="dim"))
    tell("")
    tell(trainer_lines(f"plans/{NAME}.json"))
    tell(f"\nThe whole demo took {time.monotonic() - started:.0f} s. Look closer with: hilore show plans/{NAME}.json")
    if as_json:
        print(json.dumps({"format": "hilore-demo", "seconds": time.monotonic() - started, "steps": results}, indent=1))
