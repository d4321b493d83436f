"""A pretrained model with LoRA on a task of tasks.py: rollouts and judging by hilore's own sampler (rollout.py).

Sampling draws from torch's generator, seeded for every rollout: one draw a token of the vocabulary, so that runs with the same seed share
their random numbers. The held-out problems are judged by their scorer on sampled text; greedy is the limit of a temperature near zero.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hilore_cli.batches import MicroBatch
from hilore_cli.errors import UsageError
from hilore_cli.models import load_model, load_tokenizer
from hilore_cli.provenance import Lora
from hilore_cli.quality.game import Accuracy, Rollout, loss_of, seed_of, split_updates, widen
from hilore_cli.quality.settings import Setting, TextGameSpec
from hilore_cli.rollout import generate_rollouts, prompt_ids
from hilore_cli.tasks import Task, load_task
from hilore_cli.workbench import Progress

GREEDY_TEMPERATURE = 1e-5
"""Tokens whose logits differ by 1e-4 are e^10 apart."""
DRAWN = 8
"""Problems drawn for each that is kept: some are too long, some come twice, some are held out."""
JUDGED_GROUP = 2
"""Completions of each held-out problem, the least that the sampler makes."""


class TextGame:
    """Game of a TextGameSpec."""

    def __init__(self, setting: Setting, *, device: torch.device) -> None:
        self.spec: TextGameSpec = setting.game
        self.recipe = setting.recipe
        self.tokenizer = load_tokenizer(self.spec.model)
        self.held_out = self._draw(setting.problems, seed=0)
        self.model = load_model(self.spec.model, lora=Lora(rank=self.spec.lora_rank), device=device)
        self.source = self.spec.model

    def warm_up(self, progress: Progress) -> None:
        """The adapters start as they are made: their output is zero."""
        progress("warming up", 1, 1)

    def sample(self, seed: int) -> Rollout:
        recipe, spec = self.recipe, self.spec
        task = self._draw(recipe.prompts, seed=1 + seed, apart_from=self.held_out)
        sampled = self._generate(task, seed=seed, group_size=recipe.group_size, temperature=1.0, rows=recipe.rows)
        loss = loss_of(recipe, tokens=sum(batch.loss_tokens for batch in sampled))
        width = spec.max_prompt_tokens + spec.max_new_tokens
        parts = [widen(replace(batch, loss=loss, old_logps=batch.sampling_logps), width) for batch in sampled]
        return Rollout(updates=split_updates(parts, recipe), reward=_mean_reward(sampled))

    def evaluate(self) -> Accuracy:
        greedy, sampled = (_mean_reward(self._generate(self.held_out, seed=seed_of(0, 0), group_size=JUDGED_GROUP, temperature=heat)) for heat in (GREEDY_TEMPERATURE, 1.0))
        return Accuracy(greedy=greedy, sampled=sampled)

    def _draw(self, count: int, *, seed: int, apart_from: Task | None = None) -> Task:
        """`count` different problems of no more than the prompt's tokens, others for every seed. Raises UsageError where there are not so many."""
        drawn = load_task(self.spec.task, seed=seed, size=DRAWN * count, **self.spec.options)
        held_out = {item["question"] for item in apart_from.items} if apart_from else set()
        fitting = {item["question"]: item for item in drawn.items if item["question"] not in held_out and len(prompt_ids(self.tokenizer, item)) <= self.spec.max_prompt_tokens}
        if len(fitting) < count:
            raise UsageError(f"task {self.spec.task}: {len(fitting)} of {DRAWN * count} problems are new and within {self.spec.max_prompt_tokens} tokens, {count} are needed; ask for fewer with --problems")
        return replace(drawn, items=tuple(fitting.values())[:count])

    def _generate(self, task: Task, *, seed: int, group_size: int, temperature: float, rows: int | None = None) -> list[MicroBatch]:
        spec = self.spec
        return generate_rollouts(self.model, self.tokenizer, task, prompts=len(task), group_size=group_size, max_new_tokens=spec.max_new_tokens, max_prompt_tokens=spec.max_prompt_tokens, temperature=temperature, seed=seed, rows_per_micro_batch=rows, mixed_only=False)


def _mean_reward(batches: list[MicroBatch]) -> float:
    return float(torch.cat([batch.rewards for batch in batches]).mean())
