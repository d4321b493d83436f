"""A profile that was interrupted goes on where it stopped, one of another request starts anew, and a meaningless batch is refused first."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import build_tiny

import hilore_cli.profiler as profiler
from hilore_cli.batches import synthetic_micro_batch
from hilore_cli.bench import gradient_error
from hilore_cli.calibration import kappas_of
from hilore_cli.errors import ProfileError, UsageError
from hilore_cli.exposure import TrlLoss, VerlLoss
from hilore_cli.files import load_profile
from hilore_cli.grpo import GrpoConfig, gradients
from hilore_cli.identities import batch_identity, update_digest
from hilore_cli.planner import solve_plan
from hilore_cli.profiler import ProfileRequest, profile_update
from hilore_cli.schema import Pattern, Variant
from hilore_cli.sizes import parse_cap
from hilore_cli.stages import Stages
from hilore_cli.step_planner import StepPlanner
from hilore_cli.workbench import Workbench

REQUEST = ProfileRequest(name="tiny", source="tiny", task="none", sources=["a", "b"], codecs=["int8"], config=GrpoConfig(head="full"), repeats=1)
BATCH, OTHER = (synthetic_micro_batch(vocab_size=97, rows=4, prompt_tokens=8, completion_tokens=n, group_size=4, seed=seed) for seed, n in ((0, 16), (1, 12)))
FLAT = replace(BATCH, advantages=torch.zeros_like(BATCH.advantages))
UPDATE = [("flat", FLAT), ("other", OTHER), ("largest", BATCH)]


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
    """A profile of three layers, stopped before the third and then run again: its folder, and how often each part was measured.

    Of the update's micro-batches one has no gradient, and one is smaller than the one to profile.
    """
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("profile") / "tiny"
    model = build_tiny("llama", num_hidden_layers=3)
    counts: dict[str, Counter] = {"first": Counter(), "second": Counter()}
    with pytest.MonkeyPatch.context() as patch:
        for run, progress in (("first", interrupt_at("measuring layers", 2)), ("second", silent)):
            for name in ("measure_steps", "measure_layer", "try_plans"):
                original = getattr(profiler, name)
                patch.setattr(profiler, name, counting(original, counts[run], name))
            try:
                profile_update(model, UPDATE, REQUEST, folder=folder, progress=progress)
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
    assert counts["second"] == Counter(measure_layer=1, try_plans=1)
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
    assert profile.kappas == kappas_of(profile.calibration, ["int8"])
    assert profile.kappa("int8") == profile.kappas[0].value > 0
    with pytest.raises(ProfileError, match=r"codec int4 was not calibrated; measure it again .*--batch"):
        profile.kappa("int4")
    assert len(profile.calibration) == profile.kappas[0].pairs
    assert sum(pair.heldout for pair in profile.calibration) >= 4
    assert {(pair.micro_batch, pair.heldout) for pair in profile.calibration} == {("other", True), (profile.batch.source, False)}, "without gradient nothing can be tried"
    assert profile.times.threads == torch.get_num_threads()
    assert profile.sources == ["a", "b"]


def test_resumed_profile_knows_the_update(interrupted) -> None:
    """The largest micro-batch with a gradient is profiled and stands first; norms are those of the exact gradients."""
    profile = load_profile(interrupted[0])
    assert (profile.batch.source, profile.batch.tokens, profile.batch.digest) == ("largest", 96, batch_identity(BATCH, source="").digest)
    rows = profile.micro_batches
    assert [(row.source, row.tokens) for row in rows] == [("largest", 96), ("other", 80), ("flat", 96)]
    assert rows[2].gradient_norm == rows[2].squared == rows[2].scalar == 0 < rows[2].uniform
    assert [row.logits for row in rows] == [None] * 3
    assert [row.squared for row in rows] == pytest.approx([mb.weight("squared") for mb in (BATCH, OTHER, FLAT)])
    model = build_tiny("llama", num_hidden_layers=3)

    def norm(*batches) -> float:
        return sum(float(g.double().square().sum()) for g in gradients(model, batches, REQUEST.config).values()) ** 0.5

    assert [row.gradient_norm for row in rows[:2]] == pytest.approx([norm(BATCH), norm(OTHER)], rel=1e-5)
    assert rows[0].gradient_norm == profile.gradient_norm
    assert profile.update_gradient_norm == pytest.approx(norm(BATCH, OTHER, FLAT), rel=1e-5)
    assert profile.smaller.tokens == 48
    assert 0 < profile.smaller.account.head_bytes < profile.account.head_bytes
    assert profile.smaller.account.weights_bytes == profile.account.weights_bytes


def test_stages_of_another_request_are_discarded(tmp_path: Path) -> None:
    """Another seed, codec, thread count or model: parts measured for it are not mixed in. Nothing is compiled here."""
    folder = tmp_path / "unfinished"
    Stages(folder, key="a").save("layer-0", {"x": 1.5})
    with pytest.warns(UserWarning, match="unfinished: an interrupted run is gone on with, 1 of its parts are here"):
        assert Stages(folder, key="a").load("layer-0") == {"x": 1.5}
    with pytest.warns(UserWarning, match="unfinished: its unfinished parts are of other options"):
        assert Stages(folder, key="b").load("layer-0") is None
    assert Stages(folder, key="a").load("layer-0") is None


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path):
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds something else; give another output"):
        Stages(tmp_path / "unfinished", key="a")
    assert (tmp_path / "unfinished" / "notes.txt").read_text() == "mine"
    keys = {profiler._key({"m": 1}, [{"b": 1}], request) for request in (REQUEST, replace(REQUEST, seed=1), replace(REQUEST, codecs=["int4"]), replace(REQUEST, repeats=2), replace(REQUEST, config=GrpoConfig(head="chunked")), replace(REQUEST, name="other"))}
    keys |= {profiler._key({"m": 2}, [{"b": 1}], REQUEST), profiler._key({"m": 1}, [{"b": 2}], REQUEST), profiler._key({"m": 1}, [{"b": 1}, {"b": 1}], REQUEST)}
    assert len(keys) == 9
    assert profiler._key({"m": 1}, [{"b": 1}], replace(REQUEST, codecs=("int8",))) in keys


def test_stage_with_nan_is_not_written(tmp_path: Path) -> None:
    stages = Stages(tmp_path / "unfinished", key="a")
    with pytest.raises(ValueError, match="not JSON compliant"):
        stages.save("layer-0", {"x": float("nan")})
    assert stages.load("layer-0") is None


@pytest.mark.parametrize("damage", ["masked", "zero", "nan"])
def test_meaningless_batch_is_refused_before_anything_is_written(tmp_path: Path, damage: str) -> None:
    masked = torch.zeros_like(BATCH.loss_mask)
    changes = {
        "masked": {"loss_mask": masked, "advantages": BATCH.advantages * masked},
        "zero": {"advantages": torch.zeros_like(BATCH.advantages)},
        "nan": {"advantages": BATCH.advantages * float("nan")},
    }
    reasons = {"masked": "all completions are masked", "zero": "all advantages are zero", "nan": "advantages hold NaN"}
    folder = tmp_path / "tiny"
    with pytest.raises(ProfileError, match=reasons[damage]):
        profile_update(build_tiny("llama"), [("a", replace(BATCH, **changes[damage]))], REQUEST, folder=folder, progress=silent)
    assert not folder.exists()


def test_digests_tell_micro_batches_apart() -> None:
    """By ids, masks, advantages, layout and loss; of an update, one digest that depends on the order."""
    others = [replace(BATCH, layout="packed"), replace(BATCH, loss=TrlLoss(num_items_in_batch=10**4)), FLAT, replace(BATCH, input_ids=BATCH.input_ids.flip(0))]
    assert len({update_digest([mb]) for mb in (BATCH, *others)}) == 5
    assert update_digest([BATCH]) == batch_identity(BATCH, source="x", task="y").digest
    assert len({update_digest(mbs) for mbs in ([BATCH, OTHER], [OTHER, BATCH], [BATCH], [BATCH, BATCH])}) == 4
    packed = batch_identity(others[0], source="x", task="y")
    assert (packed.rows, packed.length, packed.tokens) == (1, BATCH.real_tokens, BATCH.real_tokens)
    assert packed.group_size == 4


def test_terms_that_the_step_lacks_are_told() -> None:
    bonus = replace(BATCH, loss=TrlLoss(num_items_in_batch=500, entropy_coef=0.01))
    with pytest.warns(UserWarning, match="the recorded loss has entropy_coef, which is left out"):
        profiler._warn_of_other_terms([BATCH, bonus])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (BATCH, "micro-batches a and b are the same; give each once"),
        (replace(OTHER, layout="packed"), r"micro-batches a and b differ in layout \(padded, packed\)"),
        (replace(OTHER, loss=TrlLoss(num_items_in_batch=500, epsilon=0.3)), r"differ in epsilon \(0.2, 0.3\); give those of one update"),
        (replace(OTHER, loss=VerlLoss()), "differ in "),
    ],
)
def test_micro_batches_of_other_updates_are_refused(tmp_path: Path, other, words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        profile_update(build_tiny("llama"), [("a", BATCH), ("b", other)], REQUEST, folder=tmp_path / "tiny", progress=silent)
    assert not (tmp_path / "tiny").exists()


def test_micro_batches_of_one_update_may_count_differently() -> None:
    """TRL's micro-batches of one update may come with counts of their own. The largest is profiled."""
    smaller = replace(OTHER, loss=TrlLoss(num_items_in_batch=10**4, current_gradient_accumulation_steps=2))
    assert [name for name, _ in profiler.ordered_update([("smaller", smaller), ("larger", BATCH)])] == ["larger", "smaller"]


def test_in_low_precision_no_inexact_value_brings_less_than_rounding(tmp_path) -> None:
    """In bf16 a change of any size makes all below round otherwise: a plan below that is exact, and says so; one above is charged for it."""
    torch.set_num_threads(1)
    model = build_tiny("llama", num_hidden_layers=2).bfloat16()
    bench = Workbench(model, [BATCH], REQUEST.config)
    profile = profile_update(model, UPDATE, REQUEST, folder=tmp_path / "tiny", progress=silent)
    floor = profile.rounding_error
    assert 1e-3 < floor < 0.1
    assert load_profile(tmp_path / "tiny").rounding_error == floor
    with pytest.warns(UserWarning, match=f"in bfloat16 .* by {floor:.2g} of the gradient, which leaves nothing of --risk {floor / 2:g}: the plan is exact"):
        low = solve_plan(profile, cap=parse_cap("1.1x-gc"), risk=floor / 2, codecs=["int8"], name="low")
    assert low.predicted.rel_error == 0
    assert not [action for pattern in low.patterns.values() for action in pattern.actions.values() if action.startswith("compress")]
    packed = Pattern(actions={"input": "compress:int8"})
    predicted = StepPlanner(profile, codecs=("int8",)).predict_actions([tuple(packed.actions.items())] * 2).rel_error
    bench.add_plan("packed", {"A": packed}, [Variant(max_tokens=10**6, layers=["A", "A"])], graph_digests=profile.graph_digests)
    assert 0 < gradient_error(bench.gradients_by("packed"), bench.gradients_by("gc")) <= predicted
    assert predicted > floor


def test_in_fp32_rounding_is_nothing(interrupted) -> None:
    assert load_profile(interrupted[0]).rounding_error == 0
