"""Which variant a micro-batch runs under: by size and exposure, once for all layers, alike on all ranks, and exact whichever it is."""

from __future__ import annotations

import json
import multiprocessing
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import build_tiny
from steps_for_tests import differing, frozen_plan, make_ids, step_gradients
from torch import distributed as dist

from hilore_cli import attach
from hilore_cli.choice import RECOMPUTE_ALL, VariantChoice
from hilore_cli.errors import UsageError
from hilore_cli.exposure import weight_of
from hilore_cli.runtime import attach_patterns
from hilore_cli.schema import Pattern, Variant

PATTERNS = {"store": Pattern(default="store"), "recompute": Pattern(), "mixed": Pattern(actions={"mlp.gate_proj.mm": "store", "add": "store"})}
SMALL = Variant(max_tokens=20, max_length=16, layers=["store", "store"])
LOW = Variant(max_tokens=48, max_length=16, max_exposure=0.5, layers=["store", "mixed"])
MIDDLE = Variant(max_tokens=48, max_length=16, max_exposure=1.2, layers=["mixed", "mixed"])
HIGH = Variant(max_tokens=48, max_length=16, layers=["recompute", "mixed"])
VARIANTS = [HIGH, SMALL, LOW, MIDDLE]


def choice_of(*, micro_batches: int = 3, rule: str = "squared", variants=VARIANTS, group=None) -> VariantChoice:
    return VariantChoice(name="p", variants=variants, micro_batches=micro_batches, rule=rule, group=group)


def run(choice: VariantChoice, rows: int, seen: int, /, **told) -> Variant | None:
    """One micro-batch of two layers, told of before where there is anything to tell."""
    if told:
        choice.tell(**({"exposure": None, "logps": None, "tokens": None, "length": None} | told))
    first, second = (choice.at_layer(layer, rows=rows, length=seen) for layer in (0, 1))
    assert second is first
    return first


# ---------------------------------------------------------------------------------------------------------------- sizes


def test_the_smallest_size_that_holds_it() -> None:
    choice = choice_of()
    assert run(choice, 2, 10) is SMALL
    assert run(choice, 3, 7) is HIGH, "21 tokens, and no exposure is told"
    assert run(choice, 3, 16) is HIGH
    assert run(choice, 20, 1) is SMALL
    assert choice.served == Counter({"up to 20 tokens": 2, "up to 48 tokens": 2})


def test_sizes_that_are_told_count_before_they_are_seen() -> None:
    """Another rank's or a later chunk's: a micro-batch that is announced larger than it is."""
    choice = choice_of()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(choice, 2, 5, tokens=40, length=8) is HIGH
        assert run(choice, 2, 5, tokens=10, length=5) is SMALL
        assert run(choice, 2, 5) is SMALL, "what was told holds for one micro-batch"
        assert run(choice, 2, 5, length=16) is SMALL, "what is not told is seen: 10 tokens"
        assert run(choice, 3, 16, tokens=48) is HIGH


def test_too_little_told_is_one_warning_and_the_real_size() -> None:
    choice = choice_of()
    with pytest.warns(UserWarning, match=r"plan p: a micro-batch of 3 x 8 tokens was announced as 10 in rows of 5.*Announce padded sizes") as caught:
        found = [run(choice, 3, 8, tokens=10, length=5) for _ in range(3)]
    assert found == [HIGH] * 3
    assert len(caught) == 1


def test_above_the_largest_everything_is_recomputed_with_one_warning() -> None:
    choice = choice_of()
    with pytest.warns(UserWarning, match=r"plan p: a micro-batch of 51 tokens in rows of 17 is above the plan's largest \(48 tokens, rows of 16\).*Profile a micro-batch of this size") as caught:
        found = [run(choice, 3, 17), run(choice, 2, 17), run(choice, 7, 8), run(choice, 2, 8, tokens=60, length=8)]
    assert found == [None] * 4
    assert len(caught) == 1
    assert run(choice, 2, 8) is SMALL
    assert choice.served == Counter({RECOMPUTE_ALL: 4, "up to 20 tokens": 1})


def test_decided_once_before_the_first_layer() -> None:
    """Whatever later layers are handed; a layer that comes again begins another micro-batch, also after a step that failed half-way."""
    choice = choice_of()
    choice.expect([1.0])
    choice.tell(exposure=0.3, logps=None, tokens=None, length=None)
    assert choice.at_layer(0, rows=3, length=16) is LOW
    assert choice.at_layer(1, rows=1, length=2) is LOW
    assert choice.at_layer(3, rows=1, length=2) is LOW
    assert choice.at_layer(0, rows=1, length=2) is SMALL
    assert choice.at_layer(0, rows=3, length=16) is HIGH, "the one before was given up after layer 0"
    assert choice.at_layer(1, rows=1, length=2) is HIGH
    assert choice.served.total() == 3


def test_layers_below_that_are_left_to_checkpoint_never_come() -> None:
    """The first layer that is called decides."""
    choice = choice_of()
    assert [choice.at_layer(layer, rows=2, length=5) for layer in (2, 3, 2, 3)] == [SMALL] * 4
    assert choice.served.total() == 2


# -------------------------------------------------------------------------------------------------------------- exposure


def test_exposure_classes_relative_to_the_announced_mean() -> None:
    """Neither the scale nor the order matters; the class's edge is in it; each from the first to the last, and again in the next update."""
    for scale in (1.0, 2.0**-30, 2.0**30):
        choice = choice_of(micro_batches=2)
        for _ in range(2):
            choice.expect([scale * w for w in (0.0, 1.0, 1.25, 2.25, 2.5, 5.0)])  # mean 2
            assert [run(choice, 3, 16, exposure=scale * w) for w in (0.0, 1.0, 1.25, 2.25, 2.5, 5.0)] == [LOW, LOW, MIDDLE, MIDDLE, HIGH, HIGH]


def test_an_announcement_is_for_its_own_update() -> None:
    """After as many as were announced, the last that were told count again."""
    choice = choice_of(micro_batches=2)
    choice.expect([10.0, 10.0])
    assert [run(choice, 3, 16, exposure=w) for w in (1.0, 1.0)] == [LOW, LOW]
    assert run(choice, 3, 16, exposure=1.0) is MIDDLE


def test_running_mean_of_as_many_as_the_update_had() -> None:
    """Careful until as many were told; then each is compared with the last three, itself among them."""
    choice = choice_of(micro_batches=3)
    assert [run(choice, 3, 16, exposure=w) for w in (1.0, 1.0)] == [HIGH, HIGH]
    assert run(choice, 3, 16, exposure=1.0) is MIDDLE
    assert run(choice, 3, 16, exposure=0.1) is LOW, "of a mean of 0.7"
    assert run(choice, 3, 16, exposure=4.0) is HIGH, "of a mean of 1.7"
    assert run(choice, 3, 16, exposure=1.0) is MIDDLE, "of a mean of 1.7"
    assert run(choice, 3, 16) is HIGH, "nothing is told: the most careful"
    assert run(choice, 3, 16, tokens=48, length=16) is HIGH
    assert run(choice, 3, 16, exposure=0.5) is LOW, "of 4, 1 and 0.5: the untold ones did not count"


def test_no_exposure_anywhere() -> None:
    choice = choice_of(micro_batches=2)
    choice.expect([0.0, 0.0])
    assert run(choice, 3, 16, exposure=0.0) is LOW
    assert run(choice, 2, 5, exposure=0.0) is SMALL
    choice.expect([])
    assert run(choice, 3, 16, exposure=0.0) is LOW


def test_exposure_as_a_tensor_is_weighed_by_the_plans_rule() -> None:
    c = torch.tensor([[0.5, -1.0], [0.0, 2.0]], dtype=torch.bfloat16)
    logps = torch.log(torch.tensor([[0.5, 0.9], [0.1, 0.2]]))
    weights = {"squared": 5.25, "scalar": 3.5**2, "logits": 0.25**2 + 0.1**2 + 1.6**2}
    for rule, expected in weights.items():
        found = weight_of(c.double(), rule, logps=logps.double(), xp=torch)
        assert found == pytest.approx(expected, rel=1e-6)
        choice = choice_of(micro_batches=100, rule=rule)
        choice.expect([found] * 3)
        assert run(choice, 3, 16, exposure=c, logps=logps) is MIDDLE
        assert run(choice, 3, 16, exposure=c * 0.5, logps=logps) is LOW
        assert run(choice, 3, 16, exposure=c.clone().requires_grad_() * 2, logps=logps) is HIGH


def test_exposure_that_the_rule_cannot_weigh_is_refused() -> None:
    c = torch.ones(3)
    with pytest.raises(UsageError, match="plan p: exposure rule logits: needs the log-probabilities that were recorded at sampling"):
        run(choice_of(rule="logits"), 3, 16, exposure=c)
    with pytest.raises(UsageError, match=r"plan p: was made with exposure ignored .* as a number, or no exposure"):
        run(choice_of(rule="tokens"), 3, 16, exposure=c)
    choice = choice_of(rule="tokens", micro_batches=1)
    assert run(choice, 3, 16, exposure=2.0) is MIDDLE
    assert run(choice, 3, 16, exposure=torch.tensor(2.0)) is MIDDLE, "a weight, as a number"


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_weights_that_are_none_are_refused(weight: float) -> None:
    choice = choice_of()
    for told in (weight, torch.tensor(weight)):
        with pytest.raises(UsageError, match=r"exposure weight .*: must be a finite number of 0 or more"):
            run(choice, 3, 16, exposure=told)
    with pytest.raises(UsageError, match="must be a finite number"):
        choice.expect([1.0, weight])
    if weight != -1.0:
        with pytest.raises(UsageError, match="is there a NaN"):
            run(choice, 3, 16, exposure=torch.tensor([1.0, weight]))


# ------------------------------------------------------------------------------------------------------------ on a model


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return build_tiny("llama")


@pytest.fixture(scope="module")
def handle(model):
    """A plan of several variants, compiled as the tests need it; detached between them."""
    handle = attach(model, frozen_plan(model, PATTERNS, SMALL.layers, max_tokens=48, variants=VARIANTS, micro_batches=2))
    handle.detach()
    return handle


def test_every_variant_is_exact_and_layers_share_it(model, handle) -> None:
    """Stored or recomputed, told or seen, in one run with changing variants: bit for bit the gradients without a plan."""
    batches = [make_ids(2, 9, padded=True), make_ids(3, 16, padded=True, seed=1), make_ids(3, 16, padded=True, seed=2), make_ids(4, 11, padded=True, seed=3), make_ids(4, 16, padded=True, seed=4)]
    expected = [step_gradients(model, *batch) for batch in batches]
    told = [None, None, 0.1, 1.0, 9.0]
    wanted = [SMALL.layers, HIGH.layers, LOW.layers, MIDDLE.layers, [RECOMPUTE_ALL] * 2]
    with handle, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch, exact, exposure, layers in zip(batches, expected, told, wanted, strict=True):
            before = Counter(handle.calls)
            handle.expect([1.0, 1.0])
            if exposure is not None:
                handle.microbatch(exposure=exposure)
            assert differing(step_gradients(model, *batch), exact) == []
            assert handle.calls - before == Counter(layers)
    assert handle.microbatches == Counter({"up to 20 tokens": 1, "up to 48 tokens": 1, "up to 48 tokens, exposure up to 0.5": 1, "up to 48 tokens, exposure up to 1.2": 1, RECOMPUTE_ALL: 1})
    assert sum("every layer is recomputed" in str(w.message) for w in caught) == 1


def test_as_many_graphs_as_patterns_over_many_lengths(model, handle) -> None:
    """Sizes are dynamic: a variant is no new compilation, and neither is a length."""
    with handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows, length, exposure in [(2, 5, 1.0), (2, 10, 1.0), (3, 6, 0.1), (3, 7, 1.0), (4, 12, 9.0), (5, 9, 0.1), (3, 15, 1.0), (6, 8, 9.0), (7, 5, 1.0), (8, 9, 1.0)]:
            handle.expect([1.0])
            handle.microbatch(exposure=exposure, tokens=rows * length, length=length)
            step_gradients(model, *make_ids(rows, length, padded=True))
    assert set(handle.graphs) == {"store", "recompute", "mixed", RECOMPUTE_ALL}
    assert set(handle.graphs.values()) == {1}


def test_told_of_an_evaluation_is_not_used_up(model, handle) -> None:
    """A forward without gradient between the telling and the step runs under no plan."""
    ids, mask = make_ids(3, 16, padded=True)
    with handle:
        handle.expect([1.0])
        handle.microbatch(exposure=0.1)
        before = Counter(handle.microbatches)
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask)
        assert handle.microbatches == before
        step_gradients(model, ids, mask)
        assert handle.microbatches - before == Counter([LOW.label])


# --------------------------------------------------------------------------------------------------------- on two ranks


def on_rank(rank: int, folder: str) -> None:
    """What two ranks decide for micro-batches of differing sizes and exposures; in a process of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    alone = [dist.new_group([r]) for r in range(2)][rank]
    together = dist.new_group([0, 1])
    found: dict[str, list[str]] = {}

    def decide(name: str, choice: VariantChoice, *cases: tuple) -> None:
        """Cases: for each rank (rows, length, what is told)."""
        found[name] = []
        for case in cases:
            rows, length, told = case[rank]
            variant = run(choice, rows, length, **told)
            found[name].append(RECOMPUTE_ALL if variant is None else variant.label)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        untold = [((2, 5, {}), (3, 16, {})), ((2, 5, {}), (2, 6, {})), ((2, 17, {}), (2, 5, {}))]
        decide("sizes, seen", choice_of(), *untold)
        decide("sizes, told", choice_of(), *[tuple((rows, length, {"tokens": rows * length, "length": length}) for rows, length, _ in case) for case in untold])
        decide("sizes, a group of both", choice_of(group=together), *untold)
        decide("sizes, each for itself", choice_of(group=alone), *untold)
        exposures = [((3, 16, {"exposure": a}), (3, 16, {"exposure": b})) for a, b in ((0.9, 0.9), (0.9, 0.9), (0.1, 0.1), (0.1, 3.0), (2.0, 0.1))]
        decide("running mean", choice_of(micro_batches=2), *exposures)
        expecting = choice_of(micro_batches=1000)
        expecting.expect([[1.0] * 5, [3.0] * 5][rank])
        decide("announced", expecting, *exposures)
        mixed = choice_of(micro_batches=1000)
        mixed.expect([1.0])
        decide("told by one rank only", mixed, ((3, 16, {"exposure": 0.1}), (3, 16, {"tokens": 48, "length": 16})))
    model = build_tiny("llama", num_hidden_layers=1)
    variants = [Variant(max_tokens=20, layers=["store"]), Variant(max_tokens=48, layers=["recompute"])]
    handle = attach(model, frozen_plan(model, {name: PATTERNS[name] for name in ("store", "recompute")}, ["store"], max_tokens=48, variants=variants))
    step_gradients(model, *make_ids(2, (5, 16)[rank], padded=True))
    found["on a model"] = sorted(handle.calls)
    handle.detach()
    handle = attach(model, frozen_plan(model, {name: PATTERNS[name] for name in ("store", "recompute")}, ["store"], max_tokens=48, variants=variants), group=alone)
    step_gradients(model, *make_ids(2, (5, 16)[rank], padded=True))
    found["on a model, each for itself"] = sorted(handle.calls)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, list[str]]]:
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=on_rank, args=(rank, str(folder))) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
        if worker.is_alive():  # a rank that waits for another one that does not come
            worker.terminate()
    assert [worker.exitcode for worker in workers] == [0, 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_ranks_agree_on_the_largest_size(ranks) -> None:
    for name in ("sizes, seen", "sizes, told", "sizes, a group of both"):
        assert ranks[0][name] == ranks[1][name] == ["up to 48 tokens", "up to 20 tokens", RECOMPUTE_ALL], name
    assert ranks[0]["on a model"] == ranks[1]["on a model"] == ["recompute"]


def test_ranks_of_other_groups_decide_for_themselves(ranks) -> None:
    assert ranks[0]["sizes, each for itself"] == ["up to 20 tokens", "up to 20 tokens", RECOMPUTE_ALL]
    assert ranks[1]["sizes, each for itself"] == ["up to 48 tokens", "up to 20 tokens", "up to 20 tokens"]
    assert [rank["on a model, each for itself"] for rank in ranks] == [["store"], ["recompute"]]


def test_ranks_agree_on_the_highest_exposure(ranks) -> None:
    """Of the ranks' exposures the greatest counts, against the mean over all ranks' means."""
    low, middle, high = LOW.label, MIDDLE.label, HIGH.label
    assert ranks[0]["announced"] == ranks[1]["announced"] == [low, low, low, high, middle], "the mean is 2, of 1 and 3: 0.45, 0.45, 0.05, 1.5, 1.0"
    assert ranks[0]["running mean"] == ranks[1]["running mean"]
    assert ranks[0]["running mean"] == [high, middle, low, high, high]


def test_ranks_agree_where_one_tells_no_exposure(ranks) -> None:
    assert ranks[0]["told by one rank only"] == ranks[1]["told by one rank only"]


def test_attached_patterns_take_the_same_options(model) -> None:
    with attach_patterns(model, patterns=PATTERNS, variants=VARIANTS, name="p", micro_batches=7, exposure_rule="scalar") as handle:
        assert handle.exposure_rule == "scalar"
        assert handle.microbatches == Counter()
