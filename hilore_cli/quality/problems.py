"""Problems of a reasoning-gym generator as characters, encoded and split: held-out ones, and those to train on.

    found = draw_problems(task, held_out=4000)          # found.training, found.held_out: Problems

Token 0 is padding, 1 ends an answer, the characters follow in their order. All prompts are padded left to one width P, all answers, with
their end, right to one width T: every micro-batch of a setting has the same shape.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hilore_cli.errors import UsageError
from hilore_cli.quality.settings import CharTask
from hilore_cli.tasks import load_task

PAD, END = 0, 1
FIRST = 2
"""Token of the first character."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Problems:
    """N problems."""

    prompts: Tensor  # (N,P) int64
    prompt_mask: Tensor  # (N,P) int64, 1 on characters
    answers: Tensor  # (N,T) int64, END included, PAD behind it

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, chosen: Tensor | slice) -> Problems:
        return Problems(prompts=self.prompts[chosen], prompt_mask=self.prompt_mask[chosen], answers=self.answers[chosen])

    def to(self, device: torch.device) -> Problems:
        return Problems(prompts=self.prompts.to(device), prompt_mask=self.prompt_mask.to(device), answers=self.answers.to(device))

    @property
    def counted(self) -> Tensor:
        """(N,T) int64, 1 on the answer's characters and its end."""
        return (self.answers != PAD).long()


@dataclass(frozen=True, kw_only=True, eq=False)
class DrawnProblems:
    """No problem is in both parts."""

    vocabulary: int
    training: Problems
    held_out: Problems


def draw_problems(task: CharTask, *, held_out: int) -> DrawnProblems:
    """Distinct problems in the order in which they are drawn; the first `held_out` of them are kept apart.

    Raises UsageError where a question is not of the task's pattern, and where there are too few problems to leave half for training.
    """
    drawn = load_task(task.generator, seed=0, size=task.draws, **task.options)
    answers: dict[str, str] = {}
    for item in drawn.items:
        answers.setdefault(prompt_of(item["question"], task), item["answer"])
    if held_out < 1 or len(answers) < 2 * held_out:
        raise UsageError(f"task {task.generator}: {len(answers)} distinct problems are too few to hold {held_out} out; ask for at most {len(answers) // 2} with --problems")
    tokens = {character: FIRST + i for i, character in enumerate(sorted(set("".join([*answers, *answers.values()]))))}
    encoded = encode_problems(answers, tokens)
    return DrawnProblems(vocabulary=FIRST + len(tokens), training=encoded.take(slice(held_out, None)), held_out=encoded.take(slice(0, held_out)))


def prompt_of(question: str, task: CharTask) -> str:
    """What the pattern's groups find, joined by colons, without spaces: "12 - 7" -> "12-7="."""
    found = re.search(task.pattern, question)
    if found is None:
        raise UsageError(f"task {task.generator}: question {question!r} is not of the pattern {task.pattern!r}")
    return ":".join(found.groups()).replace(" ", "") + "="


def encode_problems(answers: Mapping[str, str], tokens: Mapping[str, int]) -> Problems:
    """Prompt -> answer, as tokens."""
    prompts = [[tokens[c] for c in prompt] for prompt in answers]
    ended = [[tokens[c] for c in answer] + [END] for answer in answers.values()]
    width = max(map(len, prompts))
    return Problems(prompts=_padded(prompts, left=True), prompt_mask=torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]), answers=_padded(ended, left=False))


def _padded(rows: Sequence[list[int]], *, left: bool) -> Tensor:
    width = max(map(len, rows))
    fill = [[PAD] * (width - len(row)) for row in rows]
    return torch.tensor([more + row if left else row + more for row, more in zip(rows, fill, strict=True)])
