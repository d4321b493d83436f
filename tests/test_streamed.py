"""--layers-sample: a model streamed layer by layer, held against the full profile of the same model; and profiles without the device,
from a configuration alone, through the command line and on to a plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import build_tiny
from profiles_for_tests import make_profile
from safetensors.torch import load_file, save_file

from hilore_cli.batches import save_micro_batch, synthetic_micro_batch
from hilore_cli.cli import main
from hilore_cli.errors import UsageError
from hilore_cli.files import load_plan_file, load_profile, save_profile
from hilore_cli.grpo import GrpoConfig
from hilore_cli.models import load_model
from hilore_cli.profiler import ProfileRequest, profile_update
from hilore_cli.streamed import profile_by_layers

LAYERS = 3
BATCH, OTHER = (synthetic_micro_batch(vocab_size=97, rows=4, prompt_tokens=8, completion_tokens=n, group_size=4, seed=seed) for seed, n in ((0, 24), (1, 16)))
UPDATE = [("largest", BATCH), ("other", OTHER)]
REQUEST = ProfileRequest(name="tiny", source="tiny", task="none", sources=["a", "b"], codecs=["int8"], config=GrpoConfig(head="chunked", chunk_tokens=16), repeats=1)


def silent(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny llama in two files with an index, as large models come."""
    folder = tmp_path_factory.mktemp("model")
    build_tiny("llama", num_hidden_layers=LAYERS, tie_word_embeddings=True).save_pretrained(folder, max_shard_size="60KB")
    assert (folder / "model.safetensors.index.json").is_file()
    return folder


@pytest.fixture(scope="module")
def profiles(folder, tmp_path_factory):
    """The full profile, and the one of streamed layers."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("profiles")
    full = profile_update(load_model(folder), UPDATE, REQUEST, folder=out / "full", progress=silent)
    streamed = profile_by_layers(folder, UPDATE, REQUEST, dtype="float32", device=torch.device("cpu"), relative=full, out=out / "streamed", progress=silent)
    assert load_profile(out / "streamed") == streamed
    return full, streamed


def test_gradients_are_the_full_profiles(profiles):
    full, streamed = profiles
    assert streamed.model == full.model
    assert streamed.gradient_norm == pytest.approx(full.gradient_norm, rel=1e-6)
    for name in ("grad_norm", "input_grad_norm", "noise_transfer"):
        assert [getattr(row, name) for row in streamed.layers] == pytest.approx([getattr(row, name) for row in full.layers], rel=1e-5)


def test_risk_of_sampled_layers_is_the_full_profiles_and_others_are_near(profiles):
    full, streamed = profiles
    measured, sampled = ({(row.layer, row.unit): row for row in profile.units} for profile in profiles)
    assert measured.keys() == sampled.keys()
    for (layer, unit), row in measured.items():
        mine = sampled[layer, unit]
        assert (mine.nbytes, mine.payload_bytes) == (row.nbytes, row.payload_bytes)
        if layer < 2:
            assert (mine.rho2, mine.replayed_rho2, mine.rel_error) == pytest.approx((row.rho2, row.replayed_rho2, row.rel_error), rel=1e-4)
        else:
            assert 0.2 < mine.rho2 / row.rho2 < 5, f"layer {layer}, {unit}: taken from layer 1"
    assert streamed.kappas == full.kappas


def test_bytes_are_the_full_profiles(profiles):
    full, streamed = profiles
    states = LAYERS * torch.get_rng_state().numel()  # of torch's checkpoint on a CPU: test_fake.py
    for name, value in full.account.model_dump().items():
        assert 0 <= value - getattr(streamed.account, name) <= (states if name == "head_bytes" else 16)
    assert streamed.peaks.none_bytes == full.peaks.none_bytes
    bare = [[row.model_copy(update={"time_us": 0.0}) for row in c.nodes] for profile in profiles for c in profile.classes]
    assert bare[0] == bare[1]
    assert streamed.times.none_us < streamed.times.recompute_us
    assert streamed.estimate.relative == "tiny", "kappa is not this model's"


def test_a_file_that_lacks_a_layer_is_named(folder, tmp_path):
    tensors = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(UsageError, match=r"holds no tensor model\.layers\.1\.mlp\.up_proj\.weight, .*without --layers-sample"):
        profile_by_layers(tmp_path, UPDATE, REQUEST, dtype="float32", device=torch.device("cpu"), relative=make_profile(layers=2), out=tmp_path / "out", progress=silent)


# ---------------------------------------------------------------------------------------------------------- command line


@pytest.fixture
def place(folder, tmp_path, monkeypatch) -> Path:
    """A working folder with a model's configuration, no weights, a relative and recorded micro-batches."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((folder / "config.json").read_text())
    save_profile(make_profile(layers=6), tmp_path / "relative")
    for name, batch in (("a", BATCH), ("b", OTHER)):
        save_micro_batch(tmp_path / f"{name}.parquet", batch)
    return tmp_path


def hilore(*words: str) -> int:
    """The command's exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["hilore", *words])
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def test_from_a_configuration_to_a_plan(place, capsys):
    assert hilore("profile", "--model", "bare", "--device", "h100", "--dtype", "bfloat16", "--relative", "relative", "--batch", "a.parquet", "--batch", "b.parquet", "--name", "far") == 0
    said = capsys.readouterr()
    assert "estimated, not measured: times of a h100 (not compared with any measured profile)" in " ".join(said.out.split())
    assert "steps estimated for a h100" in said.out
    assert "data sheet" in said.err
    profile = load_profile("profiles/far")
    assert (profile.estimate.device, profile.estimate.relative, profile.estimate.time_error) == ("h100", "synthetic", None)
    assert profile.account.workspace_bytes == 64 * 2**20
    assert profile.codecs == ["int8", "int4"]
    assert 0 < profile.times.none_us < profile.times.recompute_us < 1.05 * profile.times.gc_us
    assert all(row.compress_us > 5 for row in profile.units)
    assert hilore("plan", "profiles/far", "--mem-cap", "1.1x-gc", "--risk", "0.015", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert load_plan_file("plans/far.plan.json").estimate == profile.estimate
    assert plan["predicted"]["rel_error"] <= 0.015
    assert plan["predicted"]["gc_peak_bytes"] == profile.peaks.gc_bytes


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--device", "h1000"), 2, "device 'h1000': unknown; use cpu or cuda to measure, or a model: h100"),
        (("--device", "h100", "--relative", "nowhere"), 4, "nowhere"),
        (("--device", "h100", "--relative", "relative", "--codecs", "e4m3"), 4, "codec e4m3 was not measured there"),
        (("--device", "h100", "--relative", "relative", "--batch", "a.parquet", "--tokens", "512"), 2, "leave them out"),
        (("--device", "h100", "--task", "nope"), 2, "nope"),
        (("--device", "h100", "--dtype", "int8"), 2, "dtype 'int8': unknown"),
        (("--device", "h100", "--relative", "relative", "--tokens", "128"), 2, "which is more than the"),
        (("--relative", "relative"), 2, "--relative and --rows belong to a profile without the device"),
        (("--device", "h100"), 4, "no measured profile to scale the risk from; measure a small model"),
        (("--device", "h100", "--layers-sample"), 2, "--layers-sample measures on this machine"),
        (("--layers-sample", "--lora", "4"), 2, "--layers-sample: of a model whose own weights train"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_refusals_are_one_line(place, capsys, monkeypatch, words, code, message):
    monkeypatch.setattr("hilore_cli.commands.inputs.SHIPPED_RELATIVES", ("not-there",))
    assert hilore("profile", "--model", "bare", *words) == code
    said = capsys.readouterr()
    assert message in " ".join(said.err.split())
    assert said.out == ""
    assert not (place / "profiles").exists()


def test_an_estimate_takes_no_measured_profiles_place(place, capsys):
    measured = load_profile("relative")
    save_profile(measured, Path("profiles/kept"))
    assert hilore("profile", "--model", "bare", "--device", "h100", "--relative", "relative", "--batch", "a.parquet", "--name", "kept") == 2
    assert "profiles/kept: was measured, and would be replaced by an estimate; give that another --name" in " ".join(capsys.readouterr().err.split())
    assert load_profile("profiles/kept") == measured


def test_stretched_micro_batches_are_kept(place, capsys):
    """Without --batch the recorded lengths are stretched, said, and written down for the day the model is there."""
    assert hilore("profile", "--model", "bare", "--device", "l40s", "--relative", "relative", "--tokens", "2048", "--rows", "8", "--name", "long", "--codecs", "int8") == 0
    assert "stretched to 2048 tokens: that is invented" in " ".join(capsys.readouterr().err.split())
    profile = load_profile("profiles/long")
    assert (profile.batch.rows, profile.batch.length, profile.batch.group_size) == (8, 256, 8)
    assert sorted(profile.sources) == [f"profiles/long{suffix}.parquet" for suffix in ("-calibration-0", "-calibration-1", "")]
    assert all(Path(source).is_file() for source in profile.sources)


HOLES = """
import torch
from hilore_cli import malloc

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) // 1024

malloc.steady_malloc()
blocks = [torch.ones(2**23) for _ in range(12)]  # 32 MiB each
full = resident()
del blocks[:-1]  # the last one holds the top of the heap
kept = resident()
malloc.give_back()
print(full - kept, kept - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted by Linux")
def test_a_steady_heap_gives_back_its_holes_when_asked() -> None:
    """In MiB: nothing by itself, which is what makes it steady; then all of the eleven blocks but their edges."""
    out = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True).stdout
    by_itself, asked = map(int, out.split())
    assert by_itself < 32
    assert asked > 10 * 32
