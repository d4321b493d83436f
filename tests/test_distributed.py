"""A plan under FSDP2 and DDP on two ranks (gloo, CPU): every wrapping in one torchrun of distributed_steps.py; and the README's lines for accelerate."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import build_tiny
from distributed_steps import CASES, LARGE, SMALL, UPDATES
from steps_for_tests import frozen_plan
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from hilore_cli import attach
from hilore_cli.errors import PlanMismatchError
from hilore_cli.files import save_json
from hilore_cli.schema import Pattern

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent
SERVED = {"exact": SMALL.label, "exact again": SMALL.label, "codec": LARGE.label}
FSDP = [name for name in CASES if name.startswith("fsdp")]


def run_to_its_end(command: list[str] | str, *, cwd: Path, environment: dict[str, str], seconds: int = 600) -> str:
    """stdout of a launcher; it and all that it started end with us. Fails with what was written to stderr."""
    process = subprocess.Popen(command, cwd=cwd, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, shell=isinstance(command, str), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        out, errors = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, errors[-4000:]
    return out


# ------------------------------------------------------------------------------------------------------------ FSDP2 and DDP


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What the two ranks wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    run_to_its_end([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(TESTS / "distributed_steps.py"), str(folder)], cwd=folder, environment={})
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_exact_plans_are_bitwise_equal_to_the_same_wrapping_without_a_plan(ranks, name) -> None:
    """Gradients, and the parameters after clipping and AdamW, in two updates of two accumulated micro-batches."""
    for rank in ranks:
        for update in ("exact", "exact again"):
            assert rank[name][update]["differing"] == []
            assert rank[name][update]["parameters differing"] == []
        assert rank[name]["codec"]["differing"], "an int8 payload does something"


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process_over_all_micro_batches(ranks, name) -> None:
    """fp32: to rounding, the codec's error included. bf16 weights: as far from it as the same wrapping without a plan may be."""
    for rank in ranks:
        for update in UPDATES:
            assert rank[name][update]["from one process"] < (3e-2 if CASES[name].reference == "bf16" else 3e-6), update
        assert 1e-5 < rank[name]["codec"]["from no plan"] < 1e-2
        assert 1e-5 < rank["one process"]["codec"] < 1e-2


@pytest.mark.parametrize("name", CASES)
def test_ranks_take_the_same_variant_whatever_their_lengths(ranks, name) -> None:
    for rank in ranks:
        assert [rank[name][update]["variants"] for update in UPDATES] == [{SERVED[update]: 2} for update in UPDATES]
        assert [rank[name][update]["calls"] for update in UPDATES] == [{"exact": 4}, {"exact": 4}, {"codec": 2, "exact": 2}]


@pytest.mark.parametrize("name", CASES)
def test_the_graph_is_the_one_that_one_process_profiled(ranks, name) -> None:
    """One for each pattern, over all lengths: DDP's buckets do not cut it, and FSDP's modules bring no symbols into it. A policy
    of mixed precision makes another one, and a warning."""
    for rank in ranks:
        assert rank[name]["graphs"] == {"exact": 1, "codec": 1}
        assert ["a layer's graph is not one that was profiled" in warning for warning in rank[name]["warnings"]] == ([True] if CASES[name].reference == "bf16" else [])


def test_sharded_layers_follow_train_and_eval(ranks) -> None:
    """torch skips its guards on FSDP's modules by default, and would go on with the dropout of the first step."""
    for rank in ranks:
        assert rank["modes"].pop("between modes")
        assert rank["modes"] == {"train": [], "eval": [], "train again": []}


@pytest.mark.parametrize("name", FSDP)
def test_parameters_are_never_packed(ranks, name) -> None:
    """What the planned layers keep is byte for byte what they keep in one process, and none of it is a parameter; resharded, the
    gathered weights are gone between forward and backward."""
    for rank in ranks:
        found = rank[name]["bytes"]
        assert rank[name]["class"] == "FSDPLlamaDecoderLayer"
        assert found["payloads that are parameters"] == 0
        assert found["after forward"] == (0 if name.endswith("resharded") else found["gathered"])
        assert found["gathered"] == found["sharded"] * (1 if CASES[name].reference == "bf16" else 2), "two ranks; two bytes for four"
        if CASES[name].reference == "planned":
            assert found["payload"] == rank["payload of one process"] > 0


@pytest.mark.parametrize("name", CASES)
def test_detached_nothing_is_left(ranks, name) -> None:
    for rank in ranks:
        assert rank[name]["detached"] == {"calls": {}, "left": []}


@pytest.mark.filterwarnings("ignore")
def test_fsdp1_is_refused(tmp_path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = build_tiny("llama")
        plan = frozen_plan(model, {"all": Pattern(default="store")}, ["all", "all"], max_tokens=64)
        with pytest.raises(PlanMismatchError, match=r"FullyShardedDataParallel is not .* FSDP2 \(fully_shard\)"):
            attach(FullyShardedDataParallel(model, device_id=torch.device("cpu")), plan)
    finally:
        torch.distributed.destroy_process_group()


# --------------------------------------------------------------------------------------------------------------- accelerate


def readme_lines() -> tuple[str, str]:
    """The command and the script of the README's example."""
    readme = (TESTS.parent / "README.md").read_text(encoding="utf-8")
    script = re.search(r"```python\n(# train\.py\n.*?)```", readme, re.DOTALL)
    command = re.search(r"^\$ (.*accelerate launch.*train\.py)", readme, re.MULTILINE)
    assert script, "the README has the script"
    assert command, "the README has the command"
    return command[1], script[1]


def trained_in_one_process(model: nn.Module, *, ranks: int = 2, accumulated: int = 2, steps: int = 4) -> dict[str, Tensor]:
    """The README's training, its micro-batches one after another: DDP's mean over the ranks, accelerate's over the accumulated ones."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(steps):
        for rank in range(ranks):
            ids = torch.randint(3, 90, (2, 9 + step + rank), generator=torch.Generator().manual_seed(10 * step + rank))
            (model(input_ids=ids, labels=ids, use_cache=False).loss / (ranks * accumulated)).backward()
        if step % accumulated == accumulated - 1:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.filterwarnings("ignore")
def test_the_readmes_lines_run_under_accelerate(tmp_path) -> None:
    """As printed, on a tiny model: the plan is carried out on both ranks, and the weights are those of one process without a plan."""
    pytest.importorskip("accelerate", reason="accelerate is not installed (extra trl)")
    command, script = readme_lines()
    model = build_tiny("llama")
    model.save_pretrained(tmp_path / "model")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    patterns = {"some": Pattern(actions={"add": "store"}), "all": Pattern(default="store")}
    save_json(frozen_plan(model, patterns, ["some", "all"], max_tokens=64), tmp_path / "plans" / "update.json")
    (tmp_path / "train.py").write_text(script)
    environment = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    out = run_to_its_end(command, cwd=tmp_path, environment=environment)
    assert [ast.literal_eval(line) for line in out.splitlines() if line.startswith("{")] == [{"some": 4, "all": 4}]
    trained, expected = type(model).from_pretrained(tmp_path / "trained").state_dict(), trained_in_one_process(model)
    assert max(float((trained[name] - value).abs().max()) for name, value in expected.items()) < 1e-6
    assert max(float((before[name] - value).abs().max()) for name, value in expected.items()) > 1e-5, "training moved the weights"
