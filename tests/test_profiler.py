"""A profile that was interrupted goes on where it stopped, one of another request starts anew, and a meaningless batch is refused first."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import build_tiny

import hilore_cli.profiler as profiler
from hilore_cli.batches import MicroBatch, synthetic_micro_batch
from hilore_cli.errors import ProfileError
from hilore_cli.grpo import GrpoConfig
from hilore_cli.profiler import ProfileRequest, kappa_of, profile_update
from hilore_cli.schema import CalibrationPair, load_profile

REQUEST = ProfileRequest(name="tiny", source="tiny", task="none", batch_source="synthetic", codecs=["int8"], config=GrpoConfig(head="full"), repeats=1)
BATCH = synthetic_micro_batch(vocab_size=97, rows=4, prompt_tokens=8, completion_tokens=16, group_size=4, seed=0)


def interrupt_at(stage: str, done: int):
    """A progress callback that is Ctrl-C at one moment."""

    def progress(label: str, position: int, total: int) -> None:
        if label == stage and position == done:
            raise KeyboardInterrupt

    return progress


def silent(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> tuple[Path, dict[str, Counter]]:
    """A profile of three layers, stopped before the third and then run again: its folder, and how often each part was measured."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("profile") / "tiny"
    model = build_tiny("llama", num_hidden_layers=3)
    counts: dict[str, Counter] = {"first": Counter(), "second": Counter()}
    with pytest.MonkeyPatch.context() as patch:
        for run, progress in (("first", interrupt_at("measuring layers", 2)), ("second", silent)):
            for name in ("measure_steps", "measure_layer", "calibrate"):
                original = getattr(profiler, name)
                patch.setattr(profiler, name, counting(original, counts[run], name))
            try:
                profile_update(model, BATCH, REQUEST, folder=folder, progress=progress)
            except KeyboardInterrupt:
                assert not (folder / "profile.json").exists()
                assert {p.name for p in (folder / "unfinished").iterdir()} == {"key", "steps.json", "layer-0.json", "layer-1.json"}
            finally:
                patch.undo()
    return folder, counts


def counting(original, counter: Counter, name: str):
    def counted(*args, **kwargs):
        counter[name] += 1
        return original(*args, **kwargs)

    return counted


def test_second_run_measures_only_what_is_missing(interrupted) -> None:
    folder, counts = interrupted
    assert counts["first"] == Counter(measure_steps=1, measure_layer=2)
    assert counts["second"] == Counter(measure_layer=1, calibrate=1)
    assert not (folder / "unfinished").exists()


def test_resumed_profile_is_whole(interrupted) -> None:
    profile = load_profile(interrupted[0])
    assert [layer.index for layer in profile.layers] == [0, 1, 2]
    units = {row.unit for row in profile.units if row.layer == 0}
    assert len(profile.units) == 3 * len(units)
    assert {(row.layer, row.unit) for row in profile.units} == {(i, unit) for i in range(3) for unit in units}
    assert all(row.replayed_rho2 >= row.rho2 >= 0 and row.payload_bytes < row.nbytes for row in profile.units)
    assert all(row.compress_us > 0 and row.decompress_us > 0 for row in profile.units)
    (layer_class,) = profile.classes
    timed = [row for row in layer_class.nodes if row.side == "forward" and row.matmul]
    assert all(row.time_us > 0 for row in timed)
    assert profile.kappa == kappa_of(profile.calibration) >= 1
    assert profile.times.threads == torch.get_num_threads()
    assert profile.batch.tokens == 96


def test_stages_of_another_request_are_discarded(tmp_path: Path) -> None:
    """Another seed, codec, thread count or model: parts measured for it are not mixed in. Nothing is compiled here."""
    folder = tmp_path / "unfinished"
    profiler.Stages(folder, key="a").save("layer-0", {"x": 1.5})
    assert profiler.Stages(folder, key="a").load("layer-0") == {"x": 1.5}
    assert profiler.Stages(folder, key="b").load("layer-0") is None
    assert profiler.Stages(folder, key="a").load("layer-0") is None
    keys = {profiler._key({"m": 1}, {"b": 1}, request) for request in (REQUEST, replace(REQUEST, seed=1), replace(REQUEST, codecs=["int4"]), replace(REQUEST, repeats=2), replace(REQUEST, config=GrpoConfig(head="chunked")), replace(REQUEST, name="other"))}
    keys |= {profiler._key({"m": 2}, {"b": 1}, REQUEST), profiler._key({"m": 1}, {"b": 2}, REQUEST)}
    assert len(keys) == 8
    assert profiler._key({"m": 1}, {"b": 1}, replace(REQUEST, codecs=("int8",))) in keys


def test_stage_with_nan_is_not_written(tmp_path: Path) -> None:
    stages = profiler.Stages(tmp_path / "unfinished", key="a")
    with pytest.raises(ValueError, match="not JSON compliant"):
        stages.save("layer-0", {"x": float("nan")})
    assert stages.load("layer-0") is None


@pytest.mark.parametrize("damage", ["masked", "zero", "nan"])
def test_meaningless_batch_is_refused_before_anything_is_written(tmp_path: Path, damage: str) -> None:
    changes = {
        "masked": {"completion_mask": torch.zeros_like(BATCH.completion_mask)},
        "zero": {"advantages": torch.zeros_like(BATCH.advantages)},
        "nan": {"advantages": BATCH.advantages * float("nan")},
    }
    reasons = {"masked": "all completions are masked", "zero": "all advantages are zero", "nan": "advantages hold NaN"}
    fields = {name: getattr(BATCH, name) for name in BATCH.__dataclass_fields__}
    folder = tmp_path / "tiny"
    with pytest.raises(ProfileError, match=reasons[damage]):
        profile_update(build_tiny("llama"), MicroBatch(**(fields | changes[damage])), REQUEST, folder=folder, progress=silent)
    assert not folder.exists()


def test_kappa_is_the_worst_pair_and_at_least_one() -> None:
    pairs = [CalibrationPair(label="a", predicted_rho2=1e-4, measured_rel_error=0.02), CalibrationPair(label="b", predicted_rho2=1e-4, measured_rel_error=0.01), CalibrationPair(label="c", predicted_rho2=0.0, measured_rel_error=0.5)]
    assert kappa_of(pairs) == pytest.approx(4.0)
    assert kappa_of(pairs[1:]) == pytest.approx(1.0)
    assert kappa_of([]) == 1.0
