"""`--task`: questions with their own scorers, out of reasoning-gym (extra `tasks`).

    task = load_task("math", seed=0, size=32)   # chain_sum and gsm_symbolic in turn
    task.score("5 + 4 makes 9.", task.items[0])

A name is `math` or any single reasoning-gym generator. Answers are taken out of the text by `extract_answer`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypedDict

from hilore_cli.errors import UsageError

MIXES = {"math": ("chain_sum", "gsm_symbolic")}
# Item i of a reasoning-gym dataset is seeded with seed + i: seeds 0 and 1 would give the same items, shifted by one.
ITEMS_PER_SEED = 1_000_000
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


class Item(TypedDict):
    """One question of a task; `metadata` says which generator it comes from and how it was drawn."""

    question: str
    answer: str
    metadata: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Items in a fixed order, and the scorer that belongs to each."""

    name: str
    seed: int
    items: tuple[Item, ...]
    options: dict[str, Any] = field(default_factory=dict)
    _scorers: dict[str, Callable[[str | None, Item], float]]

    def __len__(self) -> int:
        return len(self.items)

    def score(self, answer_text: str, item: Item) -> float:
        """1.0 if the answer in `answer_text` gets full marks from the item's own scorer, else 0.0.

        Partial marks count as 0.0: reasoning-gym gives 0.5 for "15" where "5" is right, and 0.01 for any number.
        """
        scorer = self._scorers[item["metadata"]["source_dataset"]]
        return 1.0 if scorer(extract_answer(answer_text, item), item) >= 1.0 else 0.0


def load_task(name: str, *, seed: int, size: int, **options: Any) -> Task:
    """Draw `size` items of a task; different seeds never share a draw.

    `options` go to the generators (difficulty: `max_terms=3`), each to those that know it.
    Raises UsageError: unknown task (with near matches), unknown or impossible option, reasoning-gym missing.
    """
    gym = _reasoning_gym()
    generators = MIXES.get(name, (name,))
    unknown = [generator for generator in generators if generator not in gym.factory.DATASETS]
    if unknown:
        near = difflib.get_close_matches(name, [*MIXES, *gym.factory.DATASETS], n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else "use math, or the name of a reasoning-gym generator"
        raise UsageError(f"task {name!r}: unknown; {hint}")
    if not 1 <= size <= ITEMS_PER_SEED:
        raise UsageError(f"task size {size}: must be between 1 and {ITEMS_PER_SEED}")
    per_generator = -(-size // len(generators))
    datasets = {
        generator: _create(gym, generator, options, seed=seed * ITEMS_PER_SEED, size=per_generator)
        for generator in generators
    }
    known = set().union(*(vars(dataset.config) for dataset in datasets.values()))
    if strange := sorted(set(options) - known):
        raise UsageError(f"task {name}: no generator knows the option {strange[0]}; known: {', '.join(sorted(known))}")
    items = [datasets[generators[i % len(generators)]][i // len(generators)] for i in range(size)]
    scorers = {generator: dataset.score_answer for generator, dataset in datasets.items()}
    return Task(name=name, seed=seed, items=tuple(items), options=dict(options), _scorers=scorers)


def extract_answer(text: str, item: Item) -> str:
    """The answer in a completion: the last <answer>...</answer> if there is one (reasoning-gym's own rule), else the
    last number when the right answer is a number (thousands separators dropped), else the whole text, stripped."""
    tagged = _reasoning_gym().utils.extract_answer(text)
    if tagged is not None:
        return tagged
    if NUMBER.fullmatch(item["answer"].strip()):
        numbers = NUMBER.findall(text)
        return numbers[-1].replace(",", "") if numbers else ""
    return text.strip()


def _create(gym: Any, generator: str, options: dict[str, Any], *, seed: int, size: int) -> Any:
    config = gym.factory.DATASETS[generator][1]
    mine = {key: value for key, value in options.items() if key in config.__dataclass_fields__}
    try:
        return gym.create_dataset(generator, seed=seed, size=size, **mine)
    except (AssertionError, TypeError, ValueError) as error:
        raise UsageError(f"task {generator}: cannot be drawn with {mine} ({error}); change the options") from error


def _reasoning_gym() -> Any:
    try:
        import reasoning_gym
        import reasoning_gym.factory
        import reasoning_gym.utils
    except ImportError as error:
        raise UsageError(
            f"--task needs reasoning-gym ({error}); install it with: pip install 'hilore[tasks]'"
        ) from error
    return reasoning_gym
