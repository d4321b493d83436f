"""Sample completions of a task, score them, and record them as micro-batches for `hilore profile --batch`.

    batches = generate_rollouts(model, tokenizer, task, prompts=32, max_new_tokens=16, temperature=1.0, seed=0)

Sampling is batched, with a KV cache, from the whole distribution (no top-k, no top-p) as GRPO assumes.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hilore_cli.batches import MicroBatch, group_advantages, sampled_micro_batch
from hilore_cli.errors import ProfileError, UsageError
from hilore_cli.exposure import TrlLoss
from hilore_cli.grpo import GrpoConfig, token_logps
from hilore_cli.tasks import Item, Task

SYSTEM_PROMPT = "Answer with one number only."


@dataclass(frozen=True, kw_only=True, eq=False)
class _Group:
    """The completions of one prompt, ids unpadded (end-of-text token included), and their rewards (G,)."""

    item: Item
    prompt_ids: list[int]
    completions: list[list[int]]
    rewards: torch.Tensor

    @property
    def mixed(self) -> bool:
        return bool((self.rewards != self.rewards[0]).any())

    @cached_property
    def advantages(self) -> torch.Tensor:
        return group_advantages(self.rewards, group_size=len(self.rewards))


def generate_rollouts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    *,
    prompts: int,
    group_size: int = 8,
    max_new_tokens: int,
    temperature: float = 1.0,
    seed: int,
    rows_per_micro_batch: int | None = None,
    max_prompt_tokens: int | None = None,
    mixed_only: bool = True,
    system_prompt: str | None = SYSTEM_PROMPT,
    prompts_per_generation: int = 4,
    meta: dict[str, Any] | None = None,
) -> list[MicroBatch]:
    """Sample `group_size` completions for each of the first `prompts` items; return the micro-batches of one update, in item order.

    `mixed_only` drops groups with equal rewards, which have no gradient; `max_prompt_tokens` drops longer prompts before
    they are sampled. Both are counted in each micro-batch's meta. `rows_per_micro_batch` (default: all in one) may
    part a group, as trainers do: advantages are of the whole group. A rest that does not fill a micro-batch makes a smaller last one.
    The loss (TRL's default) counts the tokens of all of them.
    Raises UsageError for sizes that do not fit, ProfileError when no group is left.
    """
    if group_size < 2:
        raise UsageError(f"rollout: a group of {group_size} completion(s) has no advantage; sample at least 2")
    if not 1 <= prompts <= len(task):
        raise UsageError(f"rollout: {prompts} prompts asked of a task with {len(task)} items")
    encoded = [(item, prompt_ids(tokenizer, item, system_prompt)) for item in task.items[:prompts]]
    fitting = [(item, ids) for item, ids in encoded if max_prompt_tokens is None or len(ids) <= max_prompt_tokens]
    if not fitting:
        raise ProfileError(
            f"rollout: all {prompts} prompts are longer than {max_prompt_tokens} token(s); allow longer ones"
        )
    groups: list[_Group] = []
    with _sampling(model, seed=seed):
        for start in range(0, len(fitting), prompts_per_generation):
            part = fitting[start : start + prompts_per_generation]
            groups += _sample_groups(
                model,
                tokenizer,
                task,
                part,
                group_size=group_size,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
            )
    kept = [group for group in groups if group.mixed] if mixed_only else groups
    if not kept:
        raise ProfileError(
            f"rollout: none of {len(groups)} groups has mixed rewards; change the difficulty of task {task.name}, "
            "or sample more prompts"
        )
    record = {
        "task": task.name,
        "task_seed": task.seed,
        "task_options": task.options,
        "model": getattr(model.config, "_name_or_path", ""),
        "seed": seed,
        "group_size": group_size,
        "max_new_tokens": max_new_tokens,
        "max_prompt_tokens": max_prompt_tokens,
        "system_prompt": system_prompt,
        "date": datetime.date.today().isoformat(),
        "prompts_too_long": len(encoded) - len(fitting),
        "groups_sampled": len(groups),
        "groups_mixed": sum(group.mixed for group in groups),
        "groups_dropped": len(groups) - len(kept),
        "mean_reward_sampled": round(float(torch.cat([group.rewards for group in groups]).mean()), 4),
        **(meta or {}),
    }
    loss = TrlLoss(num_items_in_batch=sum(len(ids) for group in kept for ids in group.completions), temperature=temperature)
    rows = [(i, j) for i in range(len(kept)) for j in range(group_size)]
    per_batch = rows_per_micro_batch or len(rows)
    parts = [rows[i : i + per_batch] for i in range(0, len(rows), per_batch)]
    batches = [_micro_batch(kept, part, pad=_pad_id(tokenizer), loss=loss, meta={**record, "micro_batch": i}) for i, part in enumerate(parts)]
    return [with_sampling_logps(model, batch) for batch in batches]


def with_sampling_logps(model: PreTrainedModel, micro_batch: MicroBatch) -> MicroBatch:
    """The micro-batch with the log-probabilities of its tokens under the model that sampled them, by one forward in eval mode."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logps = token_logps(model, micro_batch, GrpoConfig())
    finally:
        model.train(training)
    values = torch.zeros(micro_batch.input_ids.shape)
    values[micro_batch.loss_mask.bool()] = logps.float().cpu()
    return replace(micro_batch, sampling_logps=values)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, item: Item, system_prompt: str | None = SYSTEM_PROMPT) -> list[int]:
    """What the model is asked, in its chat template where it has one."""
    if tokenizer.chat_template is None:
        return tokenizer(item["question"]).input_ids
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    messages.append({"role": "user", "content": item["question"]})
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False).input_ids


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.eos_token_id is None:
        raise UsageError("tokenizer: has no end-of-text token, so no completion could end; use an instruct model")
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


@contextmanager
def _sampling(model: PreTrainedModel, *, seed: int) -> Iterator[None]:
    """Eval mode, no gradients, random state seeded; all of it restored."""
    training = model.training
    devices = [model.device] if model.device.type == "cuda" else []
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            yield
    finally:
        model.train(training)


def _sample_groups(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    part: Sequence[tuple[Item, list[int]]],
    *,
    group_size: int,
    max_new_tokens: int,
    temperature: float,
) -> list[_Group]:
    pad = _pad_id(tokenizer)
    width = max(len(ids) for _, ids in part)
    input_ids = torch.tensor([[pad] * (width - len(ids)) + ids for _, ids in part])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for _, ids in part])
    sampled = model.generate(
        input_ids=input_ids.repeat_interleave(group_size, 0).to(model.device),
        attention_mask=mask.repeat_interleave(group_size, 0).to(model.device),
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        eos_token_id=tokenizer.eos_token_id,
        use_cache=True,
    )[:, width:].tolist()
    completions = [_up_to_end(ids, tokenizer.eos_token_id) for ids in sampled]
    groups = []
    for i, (item, prompt_ids) in enumerate(part):
        mine = completions[i * group_size : (i + 1) * group_size]
        texts = tokenizer.batch_decode(mine, skip_special_tokens=True)
        rewards = torch.tensor([task.score(text, item) for text in texts])
        groups.append(_Group(item=item, prompt_ids=prompt_ids, completions=mine, rewards=rewards))
    return groups


def _up_to_end(ids: list[int], end: int) -> list[int]:
    """The end-of-text token is sampled too, so it is a loss token; what follows is padding."""
    return ids[: ids.index(end) + 1] if end in ids else ids


def _micro_batch(groups: Sequence[_Group], rows: Sequence[tuple[int, int]], *, pad: int, loss: TrlLoss, meta: dict[str, Any]) -> MicroBatch:
    """Put some completions of the groups together; `rows` names them as (group, completion of it)."""
    return sampled_micro_batch(
        prompts=[groups[i].prompt_ids for i, _ in rows],
        completions=[groups[i].completions[j] for i, j in rows],
        rewards=torch.stack([groups[i].rewards[j] for i, j in rows]),
        advantages=torch.stack([groups[i].advantages[j] for i, j in rows]),
        group_ids=[i for i, _ in rows],
        loss=loss,
        pad_token_id=pad,
        meta={**meta, "questions": [groups[i].item["question"] for i in sorted({i for i, _ in rows})]},
    )
