"""The real GRPOTrainer on tiny models: built, watched, and run to figures that two runs can be compared by.

Sampling and data order are seeded, rewards are a function of the completion: two runs of equal trainers are bitwise equal.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import TINY, build_tiny
from torch import Tensor
from transformers import set_seed

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install -c constraints.txt trl==1.16.0")

GROUP = 4  # completions per prompt
PROMPTS = [" ".join(f"w{5 + (3 * i + j) % 15}" for j in range(1 + i % 5)) for i in range(16)]
"""Of 1 to 5 tokens. Four updates are one epoch: TRL 1.16 draws the order of the next one from where the last left off, which a resumed run cannot know."""
CAPS = [12, 7, 16, 5]
"""Most new tokens of each update's completions, so that lengths change at every generation."""


def tiny_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, TINY["vocab_size"]))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="w3")


def reward_of(completions: Sequence[str], **_: Any) -> list[float]:
    """Between 0 and 1, alike in every run, and hardly ever equal within a group."""
    return [zlib.crc32(completion.encode()) / 2**32 for completion in completions]


def trainer_in(folder, *, model: torch.nn.Module | None = None, peft_config: Any = None, **options: Any):
    """One update of two micro-batches of two groups each, unless `options` (of GRPOConfig) say otherwise; `model`: a llama."""
    from datasets import Dataset

    defaults = {
        "output_dir": str(folder), "report_to": "none", "max_steps": 1, "num_generations": GROUP, "per_device_train_batch_size": 2 * GROUP,
        "gradient_accumulation_steps": 2, "max_completion_length": 12, "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True,
        "logging_strategy": "no", "gradient_checkpointing": False, "seed": 0,
        "generation_kwargs": {"suppress_tokens": [0, 1, *range(20, TINY["vocab_size"])]},  # so that some completions end
    }  # fmt: skip
    model = model or build_tiny("llama")
    model.save_pretrained(folder / "model")  # where TRL loads the reference model from
    model.config._name_or_path = str(folder / "model")
    return trl.GRPOTrainer(
        model=model,
        processing_class=tiny_tokenizer(),
        reward_funcs=reward_of,
        args=trl.GRPOConfig(**{**defaults, **options}),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        eval_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS[:2]]),
        peft_config=peft_config,
    )


def vary_lengths(trainer, caps: Sequence[int] = CAPS) -> None:
    """Cap the completions of each generation anew, by the update that it is for (so that a resumed run sees the same)."""
    inner = trainer._generate_single_turn

    def capped(*args, **kwargs):
        cap = caps[trainer.state.global_step % len(caps)]
        trainer.generation_config.max_new_tokens = trainer.generation_kwargs["max_new_tokens"] = cap
        return inner(*args, **kwargs)

    trainer._generate_single_turn = capped


def watch_logps(trainer) -> tuple[list[Tensor], list[Tensor]]:
    """Lists that get each micro-batch's log-probs (B,T) and the gradients that autograd sends into them."""
    logps, gradients, inner = [], [], trainer._get_per_token_logps_and_entropies

    def watched(*args, **kwargs):
        found = inner(*args, **kwargs)
        if found[0].requires_grad:
            logps.append(found[0].detach())
            found[0].register_hook(gradients.append)
        return found

    trainer._get_per_token_logps_and_entropies = watched
    return logps, gradients


def watch_inputs(trainer) -> list[dict[str, Tensor]]:
    """A list that gets the tensors of each training micro-batch."""
    seen, compute_loss = [], trainer._compute_loss

    def watched(model, inputs):
        if model.training:
            seen.append({name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor)})
        return compute_loss(model, inputs)

    trainer._compute_loss = watched
    return seen


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a training run left behind, and what each of its micro-batches did."""

    log: list[dict[str, Any]]  # every logged figure that is no clock's: loss, grad_norm, kl, entropy, rewards, lengths
    parameters: dict[str, Tensor]
    shapes: list[tuple[int, int]]  # of each micro-batch: rows, padded columns
    products: list[int]  # matrix products in each micro-batch's backward
    noted: list[Any]  # what `note` said after each micro-batch


def run(trainer, *, note: Callable[[], Any] = lambda: None, **arguments: Any) -> Run:
    """Train from TRL's seed on, and count the matrix products of every backward with torch's profiler."""
    products: list[int] = []
    noted: list[Any] = []
    inputs, backward = watch_inputs(trainer), trainer.accelerator.backward

    def counted(loss, **kwargs):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorder:
            backward(loss, **kwargs)
        products.append(sum(event.name in ("aten::mm", "aten::addmm") for event in recorder.events()))
        noted.append(note())

    trainer.accelerator.backward = counted
    set_seed(trainer.args.seed)  # as the trainer did when it was built, perhaps before another one ran
    try:
        trainer.train(**arguments)
    finally:
        trainer.accelerator.backward = backward
    return Run(
        log=[{name: value for name, value in entry.items() if not any(word in name for word in ("time", "second", "flos"))} for entry in trainer.state.log_history],
        parameters={name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()},
        shapes=[(len(each["prompt_ids"]), each["prompt_ids"].shape[1] + each["completion_ids"].shape[1]) for each in inputs],
        products=products,
        noted=noted,
    )


def differing_parameters(found: Run, expected: Run) -> list[str]:
    assert list(found.parameters) == list(expected.parameters)
    return [name for name, value in expected.parameters.items() if not torch.equal(found.parameters[name], value)]
