"""A llama over characters: warm-up on right answers, sampling with Gumbel noise, and exact judging of held-out problems.

An answer is right when it equals the only right one, end included. So one forward over the held-out problems with their right answers tells
both accuracies exactly: greedily solved are those whose every token is the likeliest, and the chance that a sample is right is the product of
its tokens' probabilities. Nothing is sampled to judge.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig, PreTrainedModel

from hilore_cli.batches import MicroBatch, group_advantages
from hilore_cli.models import prepare_to_train, with_random_weights
from hilore_cli.quality.game import Accuracy, Rollout, loss_of, seed_of, split_updates
from hilore_cli.quality.problems import END, PAD, Problems, draw_problems
from hilore_cli.quality.settings import CharGameSpec, Recipe, Setting
from hilore_cli.workbench import Progress

JUDGED_AT_ONCE = 1000


class CharGame:
    """Game of a CharGameSpec."""

    def __init__(self, setting: Setting, *, device: torch.device) -> None:
        self.spec: CharGameSpec = setting.game
        self.recipe = setting.recipe
        drawn = draw_problems(self.spec.task, held_out=setting.problems)
        self.training, self.held_out = drawn.training.to(device), drawn.held_out.to(device)
        self.model = build_model(self.spec, vocabulary=drawn.vocabulary).to(device)
        self.vocabulary = drawn.vocabulary
        self.source = f"llama of {self.spec.layers} layers on {self.spec.task.generator}"

    def warm_up(self, progress: Progress) -> None:
        warm_up(self.model, self.training, self.spec, progress=progress)

    def sample(self, seed: int) -> Rollout:
        recipe, rng = self.recipe, torch.Generator().manual_seed(seed)
        chosen = torch.randint(len(self.training), (recipe.prompts,), generator=rng)
        noise = gumbel_noise(self.training.answers.shape[1], recipe.prompts * recipe.group_size, self.vocabulary, rng=rng)
        return roll_out(self.model, self.training.take(chosen.to(self.model.device)), noise.to(self.model.device), recipe)

    def evaluate(self) -> Accuracy:
        return judge(self.model, self.held_out)


def build_model(spec: CharGameSpec, *, vocabulary: int) -> PreTrainedModel:
    """Random weights, the same each time; everything trains."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        max_position_embeddings=128,
        initializer_range=spec.initial_std,
        tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=END,
    )
    return prepare_to_train(with_random_weights(config), lora=None, seed=0)


# ---------------------------------------------------------------------------------------------------------------- warm-up


def warm_up(model: nn.Module, problems: Problems, spec: CharGameSpec, *, progress: Progress) -> None:
    """Supervised steps on right answers, AdamW at a constant rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.warm_learning_rate, weight_decay=0.0)
    rng = torch.Generator().manual_seed(seed_of(0, 0))
    for step in range(spec.warm_steps):
        progress("warming up", step, spec.warm_steps)
        batch = problems.take(torch.randint(len(problems), (spec.warm_rows,), generator=rng).to(problems.prompts.device))
        logps = answer_logits(model, batch).log_softmax(2).gather(2, batch.answers[..., None]).squeeze(2)  # (N,T)
        loss = -(logps * batch.counted).sum() / batch.counted.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def answer_logits(model: nn.Module, problems: Problems) -> Tensor:
    """(N,T,V) fp32 logits of the right answer's tokens, each after the right ones before it."""
    ids = torch.cat((problems.prompts, problems.answers), dim=1)
    mask = torch.cat((problems.prompt_mask, problems.counted), dim=1)
    first = problems.prompts.shape[1] - 1
    return model(input_ids=ids, attention_mask=mask).logits[:, first:-1].float()


@torch.no_grad()
def judge(model: nn.Module, problems: Problems) -> Accuracy:
    """Exact accuracies: see the module's head."""
    training = model.training
    model.eval()
    greedy = sampled = 0.0
    for start in range(0, len(problems), JUDGED_AT_ONCE):
        part = problems.take(slice(start, start + JUDGED_AT_ONCE))
        logps = answer_logits(model, part).log_softmax(2)
        padding = part.counted == 0
        greedy += float(((logps.argmax(2) == part.answers) | padding).all(1).sum())
        of_answer = logps.gather(2, part.answers[..., None]).squeeze(2).masked_fill(padding, 0.0)
        sampled += float(of_answer.double().sum(1).exp().sum())
    model.train(training)
    return Accuracy(greedy=greedy / len(problems), sampled=min(sampled / len(problems), 1.0))


# --------------------------------------------------------------------------------------------------------------- rollouts


def gumbel_noise(tokens: int, rows: int, vocabulary: int, *, rng: torch.Generator) -> Tensor:
    """(T,B,V): argmax(logits + noise) is a sample of softmax(logits), and the noise does not depend on the logits."""
    return -torch.log(-torch.log(torch.rand(tokens, rows, vocabulary, generator=rng)))


def roll_out(model: PreTrainedModel, problems: Problems, noise: Tensor, recipe: Recipe) -> Rollout:
    """`group_size` completions of each problem, scored, as micro-batches with the log-probabilities of their sampling."""
    asked = problems.take(torch.arange(len(problems), device=problems.prompts.device).repeat_interleave(recipe.group_size))
    tokens, counted, logps = sample_answers(model, asked, noise)
    rewards = (tokens == asked.answers).all(1).float()
    advantages = group_advantages(rewards, group_size=recipe.group_size)
    before = torch.zeros_like(asked.prompts)
    counted = counted.long()
    batch = MicroBatch(
        input_ids=torch.cat((asked.prompts, tokens), dim=1),
        attention_mask=torch.cat((asked.prompt_mask, counted), dim=1),
        loss_mask=torch.cat((before, counted), dim=1),
        advantages=torch.cat((before, advantages[:, None] * counted), dim=1),
        group_ids=torch.arange(len(problems), device=tokens.device).repeat_interleave(recipe.group_size),
        loss=loss_of(recipe, tokens=int(counted.sum())),
        rewards=rewards,
        old_logps=torch.cat((before, logps * counted), dim=1),
        meta={"group_size": recipe.group_size},
    ).to("cpu")
    parts = [batch.take_rows(torch.arange(start, start + recipe.rows)) for start in range(0, batch.rows, recipe.rows)]
    return Rollout(updates=split_updates(parts, recipe), reward=float(rewards.mean()))


@torch.no_grad()
def sample_answers(model: PreTrainedModel, asked: Problems, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (B,T), PAD after the end; which of them were sampled, bool (B,T); and their log-probabilities (B,T)."""
    training = model.training
    model.eval()  # checkpointing, where it is on, would drop the cache
    cache = DynamicCache(config=model.config)
    ids, mask = asked.prompts, asked.prompt_mask
    live = torch.ones(len(asked), dtype=torch.bool, device=ids.device)
    tokens, counted, logps = [], [], []
    for gumbel in noise:
        logits = model(ids, mask, None, cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()  # by position: transformers 5 renames past_key_values
        token = torch.where(live, (logits + gumbel).argmax(1), PAD)
        tokens.append(token)
        counted.append(live)
        logps.append(logits.log_softmax(1).gather(1, token[:, None]).squeeze(1))
        live = live & (token != END)
        ids, mask = token[:, None], F.pad(mask, (0, 1), value=1)
    model.train(training)
    return torch.stack(tokens, dim=1), torch.stack(counted, dim=1), torch.stack(logps, dim=1)
