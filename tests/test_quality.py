"""The quality benchmark on a tiny setting: all arms through the runtime, common random numbers, resuming, refusals, statistics, the command."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from steps_for_tests import frozen_plan, hand_made_plan, prediction
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from hilore_cli.bench import apply_plan
from hilore_cli.cli import app
from hilore_cli.commands.quality import bench_quality
from hilore_cli.errors import HiloreError, InfeasibleError, PlanMismatchError, ProfileError, UsageError
from hilore_cli.files import load_frozen_plan, load_profile, save_json
from hilore_cli.grpo import GrpoConfig, token_logps
from hilore_cli.models import decoder_layers
from hilore_cli.quality import experiment, planning, text
from hilore_cli.quality.archive import Archive, read_weights
from hilore_cli.quality.arms import INT2_GROUP, make_arms, round_to_int2
from hilore_cli.quality.chars import CharGame, gumbel_noise, judge, roll_out, sample_answers
from hilore_cli.quality.experiment import run_quality
from hilore_cli.quality.game import copy_weights, restore_weights, seed_of, weights_digest
from hilore_cli.quality.planning import choose_plan, make_plans, profiled_batches, refuse_risky
from hilore_cli.quality.problems import END, PAD, draw_problems
from hilore_cli.quality.settings import (
    ARMS,
    RISKS,
    SETTINGS,
    CharGameSpec,
    CharTask,
    Recipe,
    Setting,
    TextGameSpec,
    setting_of,
)
from hilore_cli.quality.statistics import difference_of, has_power, is_within, is_worse, summarise_arm, trend_of
from hilore_cli.quality.training import train
from hilore_cli.quality_records import ArmRun, ErrorPoint, QualityReport
from hilore_cli.schema import Pattern
from hilore_cli.tasks import Task
from hilore_cli.views.quality import quality_view, verdict

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (extra tasks)")

CPU = torch.device("cpu")
TASK = CharTask(generator="chain_sum", pattern=r"problem: (.+) =", options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, draws=3000)
TINY = Setting(
    name="tiny",
    game=CharGameSpec(task=TASK, hidden=32, intermediate=48, warm_steps=70, warm_rows=64, warm_learning_rate=5e-3),
    recipe=Recipe(steps=3, prompts=8, group_size=8, updates=2, learning_rate=3e-3),
    problems=64,
    pairs=2,
    measure_every=1,
    free_codecs=True,
)


def silent(*_: object) -> None:
    pass


def run(folder: Path, *, setting: Setting = TINY, pairs: int = 2, minutes: float | None = None, progress=silent, note=silent) -> QualityReport:
    return run_quality(setting, pairs=pairs, folder=folder, device=CPU, minutes=minutes, progress=progress, note=note)


def without_times(runs: list[ArmRun]) -> list[dict]:
    return [one.model_dump(exclude={"seconds"}) for one in runs]


@pytest.fixture(scope="module")
def game() -> CharGame:
    """Warmed up enough for groups of mixed rewards."""
    found = CharGame(TINY, device=CPU)
    found.warm_up(silent)
    return found


@pytest.fixture(scope="module")
def folder(game, tmp_path_factory) -> Path:
    """With plans made by hand: to profile takes a minute (test_the_whole_way)."""
    found = tmp_path_factory.mktemp("quality")
    batch = profiled_batches(game)[0]
    for name, codec in (("hilore", "fbgemm-int8"), ("risk-0.15", "fbgemm-int4")):
        plan = hand_made_plan(game.model, batch, {"A": Pattern(actions={"mlp.gate_proj.mm": f"compress:{codec}"})}, ["A", "A"], head="full", risk=RISKS[name])
        plan = plan.model_copy(update={"predicted": prediction(rel_error=RISKS[name])})
        save_json(apply_plan(game.model, plan, [batch], emit_anyway=True, progress=silent, name=name), found / f"{name}.json")
    return found


@pytest.fixture(scope="module")
def report(folder) -> QualityReport:
    return run(folder)


def copy_of(folder: Path, target: Path, *, runs: bool) -> Path:
    """The experiment's starting weights and plans, with or without its runs."""
    shutil.copytree(folder, target, ignore=None if runs else shutil.ignore_patterns("runs.json"))
    return target


# ------------------------------------------------------------------------------------------------------------ experiment


def test_every_arm_of_every_pair_is_a_run(report) -> None:
    assert [(one.pair, one.arm) for one in report.runs] == [(pair, arm) for pair in range(2) for arm in ARMS]
    assert all(len(one.rewards) == TINY.recipe.steps and one.diverged_at is None for one in report.runs)
    assert [arm.arm for arm in report.arms] == list(ARMS)
    by_arm = {arm: [one for one in report.runs if one.arm == arm] for arm in ARMS}
    for arm in report.arms:
        assert arm.greedy == pytest.approx(sum(one.greedy for one in by_arm[arm.arm]) / 2)
        assert (arm.greedy_difference is None) == (arm.arm == "gc")
    errors = {arm: [point for one in by_arm[arm] for point in one.errors] for arm in ARMS}
    assert errors["gc"] == errors["noise"] == []
    for arm in ("hilore", "risk-0.15", "int2"):
        assert [point.step for point in errors[arm]] == [0, 1, 2] * 2
        assert all(point.rel_error > 0 for point in errors[arm])
    median = {arm.arm: arm.median_rel_error for arm in report.arms}
    assert median["hilore"] < median["risk-0.15"] < median["int2"]
    assert report.trend.low <= report.trend.slope <= report.trend.high


def test_runs_of_a_pair_share_all_but_the_arm(report) -> None:
    """The first step samples from the same weights: the same rewards in every arm but noise, and other ones in the other pair."""
    first = {(one.pair, one.arm): one.rewards[0] for one in report.runs}
    for pair in range(2):
        assert len({first[pair, arm] for arm in ARMS if arm != "noise"}) == 1
    digests = {(one.pair, one.arm): one.weights_digest for one in report.runs}
    assert len(set(digests.values())) == len(digests), "every arm goes another way"
    one, other = (run.rewards for run in report.runs if run.arm == "gc")
    assert one != other


def test_plans_are_described(report, folder) -> None:
    plans = {plan.arm: plan for plan in report.plans}
    assert {name: plan.compressed for name, plan in plans.items()} == {"hilore": {"mlp.gate_proj.mm:fbgemm-int8": 2}, "risk-0.15": {"mlp.gate_proj.mm:fbgemm-int4": 2}}
    for name, plan in plans.items():
        frozen = load_frozen_plan(folder / f"{name}.json")
        assert (plan.digest, plan.risk, plan.measured_rel_error) == (frozen.digest, RISKS[name], frozen.measured.rel_error)
    errors = [point.rel_error for one in report.runs if one.arm == "hilore" for point in one.errors]
    assert report.covered == sum(error <= 0.015 for error in errors) / len(errors)


@pytest.mark.slow
def test_the_whole_way(tmp_path) -> None:
    """Warm-up, profile, plans and runs; what is there is not made again; a plan that compresses nothing is refused."""
    found = run(tmp_path)
    plans = {plan.arm: plan for plan in found.plans}
    assert list(plans) == list(RISKS)
    for plan in plans.values():
        assert plan.compressed_bytes > 0
        assert plan.compressed
        assert all(unit.rpartition(":")[2] in ("fbgemm-int8", "fbgemm-int4") for unit in plan.compressed)
        assert 0 < plan.predicted_rel_error <= plan.risk == RISKS[plan.arm]
        assert 0 < plan.measured_rel_error <= plan.risk
    assert plans["risk-0.15"].predicted_rel_error > plans["hilore"].predicted_rel_error
    assert found.covered >= 0.5
    shutil.rmtree(tmp_path / "profile")
    assert without_times(run(tmp_path).runs) == without_times(found.runs)
    assert not (tmp_path / "profile").exists(), "plans that are there are not made again"


@pytest.mark.slow
def test_a_plan_that_compresses_nothing_is_refused(game, tmp_path) -> None:
    with pytest.raises(PlanMismatchError, match="under 10x-gc compresses nothing"):
        make_plans(game, replace(TINY, cap="10x-gc"), start=copy_weights(game.model), folder=tmp_path, progress=silent)
    with pytest.raises(InfeasibleError):
        choose_plan(load_profile(tmp_path / "profile"), replace(TINY, cap="0.01x-gc"), name="hilore")
    assert not (tmp_path / "hilore.json").exists()


def test_the_report_comes_back(report) -> None:
    assert QualityReport.model_validate_json(report.model_dump_json()) == report


def test_a_killed_run_goes_on_with_the_same_rows(report, folder, tmp_path) -> None:
    other = copy_of(folder, tmp_path / "other", runs=False)

    def killer(what: str, done: int, _total: int) -> None:
        if (what, done) == ("pair 2, noise", 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(other, progress=killer)
    kept = Archive(other).runs
    assert [(one.pair, one.arm) for one in kept] == [(0, arm) for arm in ARMS] + [(1, "gc"), (1, "hilore")]
    trained = []
    resumed = run(other, pairs=3, progress=lambda what, *_: trained.append(what))
    assert without_times(resumed.runs[: len(report.runs)]) == without_times(report.runs)
    assert resumed.pairs == 3
    assert {what for what in trained if what.startswith("pair")} == {"pair 2, noise", "pair 2, risk-0.15", "pair 2, int2"} | {f"pair 3, {arm}" for arm in ARMS}
    assert without_times(run(other, pairs=2).runs) == without_times(report.runs), "fewer are judged alone"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"setting": replace(TINY, recipe=replace(TINY.recipe, clip=0.3))}, "runs are of setting digest"),
        ({"setting": replace(TINY, name="other")}, "runs are of setting tiny, this is other"),
        ({"torch": "1.0"}, "runs are of torch 1.0"),
        ({"plan_digests": {"hilore": "0" * 16}}, "runs are of plan digests"),
        ({"checkpoint_digest": "0" * 16}, "runs are of checkpoint digest"),
    ],
    ids=["values", "name", "version", "plan", "checkpoint"],
)
def test_a_folder_of_another_experiment_is_refused(report, folder, tmp_path, change: dict, words: str) -> None:
    other = copy_of(folder, tmp_path / "other", runs=True)
    setting = change.pop("setting", TINY) if "setting" in change else TINY
    document = json.loads((other / "runs.json").read_text())
    document["identity"] |= change if setting is TINY else {}
    (other / "runs.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match=words) as refusal:
        run(other, setting=setting)
    assert "--folder" in str(refusal.value)


def test_damaged_files_are_named(report, folder, tmp_path, game) -> None:
    other = copy_of(folder, tmp_path / "other", runs=True)
    whole = (other / "runs.json").read_text()
    for content, words in ((whole[:-20], "cannot be read"), (whole.replace('"greedy"', '"grady"', 1), "Field required"), (whole.replace('"version": 1', '"version": 9'), "version 9")):
        (other / "runs.json").write_text(content)
        with pytest.raises(HiloreError, match=words):
            Archive(other)
    weights = other / "warm-up.safetensors"
    with pytest.raises(UsageError, match="another setting"):
        read_weights(weights, game.model, setting_digest="0" * 16)
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ProfileError, match="delete it to warm up again"):
        read_weights(weights, game.model, setting_digest=TINY.digest)


def test_without_time_nothing_is_begun(folder, report, tmp_path) -> None:
    other = copy_of(folder, tmp_path / "other", runs=False)
    told = []
    with pytest.raises(HiloreError, match="0 of 2 pairs are finished"):
        run(other, minutes=0, note=told.append)
    assert told[-1] == "the time is over; run again to go on"


def test_a_plan_over_its_risk_is_refused(folder) -> None:
    plan = load_frozen_plan(folder / "hilore.json")
    refuse_risky(plan)
    with pytest.raises(PlanMismatchError, match="over its risk budget of 1e-06"):
        refuse_risky(plan.model_copy(update={"budgets": plan.budgets.model_copy(update={"risk": 1e-6})}))


# ----------------------------------------------------------------------------------------------------- common random numbers


def test_training_under_an_exact_plan_is_checkpointing_to_the_last_bit(game) -> None:
    start = copy_weights(game.model)
    layers = ["A"] * len(decoder_layers(game.model))
    exact = frozen_plan(game.model, {"A": Pattern(default="store")}, layers, max_tokens=10_000)
    try:
        gc, store, noise, int2 = make_arms(game.model, ["gc", "store", "noise", "int2"], {"store": exact})
        ends = {}
        for arm in (gc, store, noise, int2, replace(gc, name="gc again")):
            trained = train(game, arm, TINY, pair=0, start=start, progress=silent)
            ends[arm.name] = (weights_digest(copy_weights(game.model)), trained.rewards)
            assert not any("_hilore" in vars(layer) or "forward" in vars(layer) for _, layer in decoder_layers(game.model))
        assert ends["gc"] == ends["store"] == ends["gc again"]
        assert ends["gc"][0] not in (ends["noise"][0], ends["int2"][0])
        assert train(game, store, TINY, pair=0, start=start, progress=silent).errors == [ErrorPoint(step=step, rel_error=0.0) for step in range(3)]
    finally:
        restore_weights(game.model, start)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the update is a fake
def test_a_gradient_that_is_not_finite_ends_the_run(game) -> None:
    start = copy_weights(game.model)
    (gc,) = make_arms(game.model, ["gc"], {})
    setting = replace(TINY, arms=("gc",))
    broken = patch("hilore_cli.quality.training.actor_update", side_effect=[1.0, math.nan])
    with broken:
        run = experiment.run_arm(game, gc, setting, pair=0, start=start, progress=silent)
    assert (run.diverged_at, run.greedy, run.sampled, len(run.rewards)) == (0, 0.0, 0.0, 1)
    restore_weights(game.model, start)


def test_int2_rounds_each_group_to_three_values() -> None:
    x = torch.randn(5 * INT2_GROUP + 7, generator=torch.Generator().manual_seed(0))
    x[:INT2_GROUP] = 0
    rounded = round_to_int2(x)
    assert rounded.shape == x.shape
    assert rounded[:INT2_GROUP].count_nonzero() == 0
    for start in range(INT2_GROUP, len(x), INT2_GROUP):
        group, back = x[start : start + INT2_GROUP], rounded[start : start + INT2_GROUP]
        largest = group.abs().max()
        assert set(back.abs().unique().tolist()) <= {0.0, float(largest)}
        assert (back - group).abs().max() <= largest / 2 + 1e-6


# ------------------------------------------------------------------------------------------------------------- characters


def text_of(ids: torch.Tensor, alphabet: str) -> str:
    return "".join(alphabet[i] for i in ids.tolist())


def test_problems_are_distinct_encoded_and_apart() -> None:
    drawn = draw_problems(TASK, held_out=64)
    alphabet = ".$+-0123456789="  # padding, end, and the characters in their order
    assert drawn.vocabulary == len(alphabet)
    parts = [[(text_of(p, alphabet), text_of(a, alphabet)) for p, a in zip(part.prompts, part.answers, strict=True)] for part in (drawn.held_out, drawn.training)]
    assert [len(part) for part in parts] == [64, 136], "ten by ten, plus and minus"
    assert len({prompt for part in parts for prompt, _ in part}) == 200
    for prompt, answer in parts[0] + parts[1]:
        assert str(eval(prompt.removesuffix("="))) + "$" == answer.rstrip("."), "answers are padded on the right"
    assert draw_problems(TASK, held_out=10).held_out.prompts.tolist() == drawn.held_out.prompts[:10].tolist()
    with pytest.raises(UsageError, match="200 distinct problems are too few to hold 101 out"):
        draw_problems(TASK, held_out=101)
    with pytest.raises(UsageError, match="is not of the pattern"):
        draw_problems(replace(TASK, pattern="what is (.+)"), held_out=10)


def test_rollouts_are_what_a_trainer_makes(game) -> None:
    rollout = game.sample(seed_of(1, 0))
    recipe = TINY.recipe
    assert [len(update) for update in rollout.updates] == [1, 1]
    batches = [batch for update in rollout.updates for batch in update]
    rewards = torch.cat([batch.rewards for batch in batches])
    assert 0 < rollout.reward < 1
    assert rollout.reward == pytest.approx(float(rewards.mean()))
    for batch in batches:
        batch.validate()
        assert batch.rows == recipe.prompts * recipe.group_size // recipe.updates
        assert batch.loss.num_items_in_batch == sum(one.loss_tokens for one in batches)
        grouped = batch.rewards.view(-1, recipe.group_size)
        expected = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
        torch.testing.assert_close(batch.advantages, expected.flatten()[:, None] * batch.loss_mask)
        with torch.no_grad():
            again = token_logps(game.model, batch, GrpoConfig(head="full"))
        torch.testing.assert_close(batch.old_logps[batch.loss_mask.bool()], again, atol=1e-5, rtol=1e-5)
    same, other = game.sample(seed_of(1, 0)), game.sample(seed_of(2, 0))
    assert torch.equal(same.updates[0][0].input_ids, batches[0].input_ids)
    assert not torch.equal(other.updates[0][0].input_ids, batches[0].input_ids)


def test_rewards_are_one_for_the_right_answer_with_its_end(game) -> None:
    """Noise that leaves no choice: every row is forced to say a given text."""
    asked = game.training.take(slice(0, 2))
    right = asked.answers[1]
    noise = torch.full((right.shape[0], 4, game.vocabulary), -1e6)
    forced = [right, right.clone(), right.clone()]
    forced[1][0] = 5 if right[0] != 5 else 6  # another digit
    forced[2][right == END] = PAD  # padding where the end has to be
    for row, ids in enumerate((asked.answers[0], asked.answers[0], *forced[:1], forced[1])):
        noise[torch.arange(len(ids)), row, ids] = 0.0
    rollout = roll_out(game.model, asked, noise, replace(TINY.recipe, group_size=2, updates=1, prompts=2))
    assert rollout.updates[0][0].rewards.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert rollout.reward == 0.75
    noise = torch.full((right.shape[0], 1, game.vocabulary), -1e6)
    noise[torch.arange(len(right)), 0, forced[2]] = 0.0
    tokens, counted, _ = sample_answers(game.model, asked.take(slice(1, 2)), noise)
    assert not torch.equal(tokens[0], right)
    assert counted.all(), "without an end all of it is sampled"


def test_judging_is_exact(game) -> None:
    """Greedy against decoding without noise; sampled against the share of many samples."""
    problems, found = game.held_out, judge(game.model, game.held_out)
    silence = torch.zeros(problems.answers.shape[1], len(problems), game.vocabulary)
    tokens, _, _ = sample_answers(game.model, problems, silence)
    assert found.greedy == float((tokens == problems.answers).all(1).float().mean())
    rng, shares = torch.Generator().manual_seed(3), []
    for _ in range(40):
        tokens, _, _ = sample_answers(game.model, problems, gumbel_noise(*silence.shape, rng=rng))
        shares.append(float((tokens == problems.answers).all(1).float().mean()))
    error = torch.tensor(shares).std() / math.sqrt(len(shares))
    assert 0 < found.sampled < 1
    assert abs(sum(shares) / len(shares) - found.sampled) < 4 * error


# ------------------------------------------------------------------------------------------------------------- statistics


def runs_of(arm: str, greedy: list[float], errors: list[list[float]] | None = None) -> list[ArmRun]:
    points = [[ErrorPoint(step=10 * i, rel_error=error) for i, error in enumerate(series)] for series in errors or [[] for _ in greedy]]
    return [ArmRun(pair=i, arm=arm, greedy=share, sampled=share, rewards=[], errors=series, diverged_at=None, weights_digest="", seconds=0.0) for i, (share, series) in enumerate(zip(greedy, points, strict=True))]


def test_paired_differences_by_hand() -> None:
    """d = 1, 2, 6 points: mean 3, sd sqrt(7); t at 2 degrees of freedom: 4.30265 (0.975), 2.91999 (0.95)."""
    found = difference_of([0.51, 0.62, 0.76], [0.50, 0.60, 0.70])
    half = 4.30265 * math.sqrt(7 / 3)
    assert found.mean_points == pytest.approx(3)
    assert found.sd_points == pytest.approx(math.sqrt(7))
    assert (found.low_points, found.high_points, found.half_width_points) == pytest.approx((3 - half, 3 + half, half), rel=1e-5)
    assert found.bound_points == pytest.approx(3 + 2.91999 * math.sqrt(7 / 3), rel=1e-5)
    mirrored = difference_of([0.50, 0.60, 0.70], [0.51, 0.62, 0.76])
    assert (mirrored.mean_points, mirrored.bound_points) == pytest.approx((-3, found.bound_points))


def test_eight_pairs_use_the_t_of_seven_degrees() -> None:
    """t(0.975, 7) = 2.36462, from tables."""
    found = difference_of([0.5 + 0.001 * i for i in range(8)], [0.5] * 8)
    assert found.half_width_points == pytest.approx(2.36462 * found.sd_points / math.sqrt(8), rel=1e-3)


def test_what_differences_show() -> None:
    gc = runs_of("gc", [0.8, 0.81, 0.79])
    near, vague, worse = (summarise_arm(runs_of("x", shares), gc) for shares in ([0.801, 0.809, 0.791], [0.83, 0.79, 0.78], [0.7, 0.712, 0.688]))
    assert (is_within(near, 0.6), has_power(near, 0.6, problems=4000), is_worse(near, 0.6)) == (True, True, False)
    assert (is_within(vague, 0.6), has_power(vague, 0.6, problems=4000), is_worse(vague, 0.6)) == (False, False, False)
    assert (is_within(worse, 0.6), has_power(worse, 0.6, problems=4000), is_worse(worse, 0.6)) == (False, True, True)
    assert not has_power(near, 0.6, problems=100), "one of 100 problems is a point"
    assert summarise_arm(gc, gc).greedy_difference is None


def test_trend_by_hand() -> None:
    """ln(error) grows by 0.2 and by 0.4 over a run of 20 steps: slope 0.3, t at one degree of freedom 12.7062."""
    errors = [run.errors for run in runs_of("hilore", [0.5, 0.5], [[math.exp(slope * i / 2) for i in range(3)] for slope in (0.2, 0.4)])]
    found = trend_of(errors, steps=20)
    half = 12.7062 * math.sqrt(0.02) / math.sqrt(2)
    assert (found.slope, found.low, found.high) == pytest.approx((0.3, 0.3 - half, 0.3 + half), rel=1e-4)
    assert not found.there
    assert trend_of(errors[:1], steps=20) is None
    assert trend_of([series[:2] for series in errors], steps=20) is None
    steady = [run.errors for run in runs_of("hilore", [0.5] * 2, [[math.exp(slope * i / 2) for i in range(3)] for slope in (0.3, 0.301)])]
    assert trend_of(steady, steps=20).there


# ------------------------------------------------------------------------------------------------------------ a text model


def even_words(answer, item) -> float:
    """A reward that a random model gets half of the time: the last word's number is even."""
    return float(answer[-1:] in "02468" and answer != "")


def word_task(_name: str, *, seed: int, size: int, **_options: object) -> Task:
    rng = torch.Generator().manual_seed(seed)
    questions = [" ".join(f"w{j}" for j in torch.randint(94, (2 + i % 3,), generator=rng).tolist()) for i in range(size)]
    return Task(name="words", seed=seed, items=tuple({"question": q, "answer": "word", "metadata": {"source_dataset": "words"}} for q in questions), _scorers={"words": even_words})


@pytest.mark.slow
def test_a_text_model_is_trained_through_rollouts(tiny_llama, tmp_path) -> None:
    pytest.importorskip("peft", reason="peft is not installed (extra lora)")
    words = {word: i for i, word in enumerate(["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(94))])}
    inner = Tokenizer(WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>").save_pretrained(tmp_path / "model")
    tiny_llama().save_pretrained(tmp_path / "model")
    setting = replace(
        SETTINGS["smollm2"],
        game=TextGameSpec(model=str(tmp_path / "model"), lora_rank=2, task="words", max_prompt_tokens=5, max_new_tokens=5),
        recipe=Recipe(steps=2, prompts=8, group_size=4, updates=2, micro_batches=2, learning_rate=1e-2, head="chunked"),
        problems=8,
        free_codecs=True,
    )
    one_codec = patch.object(planning, "default_codecs", lambda _: ("fbgemm-int8",))  # half the patterns to compile
    with patch.object(text, "load_task", word_task), one_codec, patch.object(planning, "MICRO_BATCHES", 2):
        report = run(tmp_path / "runs", setting=setting)
        made = text.TextGame(setting, device=CPU)
        updates = made.sample(seed_of(1, 0)).updates
        short = replace(setting, game=replace(setting.game, max_prompt_tokens=2))
        asked = text.TextGame(short, device=CPU).held_out.items
        with pytest.raises(UsageError, match="0 of 64 problems are new and within 1 tokens, 8 are needed"):
            text.TextGame(replace(short, game=replace(short.game, max_prompt_tokens=1)), device=CPU)
    assert [(one.pair, one.arm) for one in report.runs] == [(pair, arm) for pair in range(2) for arm in ("gc", "hilore", "int2")]
    assert len({item["question"] for item in asked}) == 8, "all that is asked is judged: none is too long, none comes twice"
    assert all(len(item["question"].split()) == 2 for item in asked)
    assert any("NONE, one of 8 problems is 12.5 points" in line for line in verdict(report))
    assert report.model.lora_rank == 2
    assert len({one.weights_digest for one in report.runs}) == 6
    assert [len(update) for update in updates] == [2, 2]
    for batch in (batch for update in updates for batch in update):
        batch.validate()
        assert batch.input_ids.shape == (8, 10), "as wide as prompt and completion may be"
        assert torch.equal(batch.old_logps, batch.sampling_logps)
        assert (batch.loss.current_gradient_accumulation_steps, batch.loss.steps_per_generation) == (2, 4)


# ------------------------------------------------------------------------------------------------------------ the command


def test_the_command_writes_and_prints(report, folder, tmp_path) -> None:
    other = copy_of(folder, tmp_path / "other", runs=True)
    arguments = ["bench", "--quality", "--setting", "tiny", "--pairs", "2", "--folder", str(other), "--threads", "1", "--device", "cpu"]
    arguments += ["--json", "-o", str(tmp_path / "q.json"), "--parquet", str(tmp_path / "q.parquet")]
    failed = report.model_copy(update={"control_failed": True})
    with patch.dict(SETTINGS, {"tiny": TINY}), patch.object(experiment, "is_worse", return_value=True):
        finished = CliRunner().invoke(app, arguments)
    assert finished.exit_code == 0, finished.output
    document = json.loads(finished.stdout)
    assert document == json.loads((tmp_path / "q.json").read_text()) == failed.model_dump(mode="json") | {"date": document["date"]}
    table = pq.read_table(tmp_path / "q.parquet")
    assert table["greedy"].to_pylist() == [one.greedy for one in report.runs]
    assert json.loads(table.schema.metadata[b"hilore-quality"])["pairs"] == 2
    with patch.dict(SETTINGS, {"tiny": TINY}), patch.object(experiment, "is_worse", return_value=False):
        refused = CliRunner().invoke(app, arguments)
    assert isinstance(refused.exception, HiloreError)
    assert refused.exception.exit_code == 1
    assert "proves nothing" in str(refused.exception)
    assert json.loads(refused.stdout)["control_failed"] is False, "the report is there all the same"


def test_the_table_fits_into_80_columns(report) -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(quality_view(report))
    shown = console.export_text()
    rows = [line for line in shown.splitlines() if line.startswith(("arm ", *ARMS))]
    assert len(rows) == 1 + len(ARMS)
    assert all("grad error" in rows[0] and len(line) <= 80 for line in rows)
    words = " ".join(shown.split())
    assert "plan hilore: risk 0.015 under" in words
    assert f"{'NOT ' if not report.within_margin else ''}below 0.6 points" in words
    assert "2 pairs of GRPO runs of 3 steps, 8 x 8 completions" in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--setting", "chain-sum"], "--setting belongs to training in pairs; give --quality"),
        (["--quality", "plan.json"], "leave out the plan"),
        (["--quality", "--suite", "--mem-cap", "1GiB"], "leave out --suite, --mem-cap"),
        (["--quality", "--codecs", "all"], "leave out --codecs"),
        (["--quality", "--repeats", "3"], "leave out --repeats"),
        (["--quality", "--setting", "poems"], "setting 'poems': unknown; use one of chain-sum"),
    ],
    ids=["alone", "plan", "suite", "codecs", "repeats", "unknown"],
)
def test_options_that_do_not_go_together(arguments: list[str], words: str) -> None:
    error = CliRunner().invoke(app, ["bench", *arguments]).exception
    assert isinstance(error, UsageError)
    assert words in str(error)


def test_settings_are_whole() -> None:
    for name, setting in SETTINGS.items():
        assert setting.name == name
        assert {"gc", "hilore", "int2"} <= set(setting.arms) <= set(ARMS)
        assert setting.pairs >= 2
        assert setting_of(name) is setting
    assert len({setting.digest for setting in SETTINGS.values()}) == len(SETTINGS)
    assert replace(TINY, pairs=9).digest == TINY.digest != replace(TINY, problems=9).digest
    with pytest.raises(UsageError, match="9 prompts are not whole parts for 2 updates"):
        replace(TINY.recipe, prompts=9)


def test_a_folder_that_cannot_be_gone_on_with_is_told_first(tmp_path) -> None:
    file = tmp_path / "file"
    file.write_text("{")
    with pytest.raises(UsageError, match="file: is a file; name a folder"):
        bench_quality("chain-sum", pairs=None, problems=None, minutes=None, folder=file, threads=None, device="cpu", output=None, parquet=None, reporter=None)
    with pytest.raises(PlanMismatchError, match=r"file: not a whole JSON document .*; delete it, and it is made again"):
        planning._kept_plan(file)
