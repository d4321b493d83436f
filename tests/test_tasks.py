"""Tasks: draws that never overlap, scoring, extraction, unknown names."""

from __future__ import annotations

import sys

import pytest

from hilore_cli.errors import UsageError
from hilore_cli.tasks import extract_answer, load_task

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (extra tasks)")


def questions(task) -> list[str]:
    return [item["question"] for item in task.items]


def test_math_is_a_mix_and_is_seeded():
    task = load_task("math", seed=4, size=7)
    assert [item["metadata"]["source_dataset"] for item in task.items] == ["chain_sum", "gsm_symbolic"] * 3 + [
        "chain_sum"
    ]
    assert questions(task) == questions(load_task("math", seed=4, size=7))
    assert len(task) == 7


def test_neighbouring_seeds_share_no_draw():
    """reasoning-gym seeds item i with seed + i: its own seeds 0 and 1 share all items but one."""
    first, second = (questions(load_task("chain_sum", seed=s, size=50, min_digits=4)) for s in (0, 1))
    assert not set(first) & set(second)


def test_options_reach_the_generators_that_know_them():
    task = load_task("math", seed=0, size=20, max_terms=2, max_digits=1)
    sums = [item["metadata"]["expression"] for item in task.items if "expression" in item["metadata"]]
    assert len(sums) == 10
    assert all(len(expression.split()) == 3 for expression in sums)


ITEM = {"question": "", "answer": "1234", "metadata": {}}
WORD = {"question": "", "answer": "yes", "metadata": {}}


@pytest.mark.parametrize(
    ("text", "item", "answer"),
    [
        ("1 + 2 = 3, so 1,234.", ITEM, "1234"),
        ("<answer> 7 </answer> then 8", ITEM, "7"),
        ("it is -5", ITEM, "-5"),
        ("2.50 each", ITEM, "2.50"),
        ("no number", ITEM, ""),
        (" yes ", WORD, "yes"),
    ],
)
def test_extraction(text, item, answer):
    assert extract_answer(text, item) == answer


@pytest.mark.parametrize("name", ["chain_sum", "gsm_symbolic", "math", "gcd"])
def test_right_answers_score_and_wrong_ones_do_not(name):
    task = load_task(name, seed=2, size=6)
    for item in task.items:
        assert task.score(f"I think it is {item['answer']}.", item) == 1.0
        assert task.score(f"It is {item['answer']}9", item) == 0.0  # reasoning-gym itself gives partial marks
        assert task.score("I do not know", item) == 0.0


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("chain_sums", {}, "did you mean chain_sum"),
        ("maths", {}, "did you mean math"),
        ("xq", {}, "use math"),
        ("math", {"max_term": 3}, "max_term"),
        ("chain_sum", {"max_terms": 0}, "max_terms"),
        ("math", {"size": 0}, "size 0"),
    ],
)
def test_bad_tasks_are_one_line(name, options, words):
    with pytest.raises(UsageError, match=words) as caught:
        load_task(name, seed=0, **{"size": 3, **options})
    assert "\n" not in str(caught.value)


def test_reasoning_gym_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UsageError, match=r"hilore\[tasks\]"):
        load_task("math", seed=0, size=1)
