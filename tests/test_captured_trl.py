"""TRL's recipe, run as printed inside a real GRPOTrainer on a tiny model, and read back."""

from __future__ import annotations

import random

import pytest
import torch
from conftest import TINY, build_tiny

from hilore_cli.captured import read_micro_batches, recipe

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install -c constraints.txt trl==1.16.0")

GROUP = 4  # completions per prompt
PROMPTS = ["w5 w6 w7", "w9 w8 w7 w6 w5", "w11", "w21 w22"]


def tiny_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, TINY["vocab_size"]))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="w3")


def trainer_in(folder, **options):
    """One update of two micro-batches of two groups each; rewards are random, so that advantages differ."""
    from datasets import Dataset

    arguments = trl.GRPOConfig(
        output_dir=str(folder), report_to="none", max_steps=1, num_generations=GROUP, per_device_train_batch_size=2 * GROUP,
        gradient_accumulation_steps=2, max_completion_length=12, use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True,
        logging_strategy="no", gradient_checkpointing=False, seed=0,
        generation_kwargs={"suppress_tokens": [0, 1, *range(20, TINY["vocab_size"])]}, **options,  # so that some completions end
    )  # fmt: skip
    rng, model = random.Random(0), build_tiny("llama")
    model.save_pretrained(folder / "model")  # where TRL loads the reference model from
    model.config._name_or_path = str(folder / "model")
    return trl.GRPOTrainer(
        model=model,
        processing_class=tiny_tokenizer(),
        reward_funcs=lambda completions, **_: [rng.random() for _ in completions],
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
    )


def watch_logps(trainer):
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [{}, {"num_iterations": 2, "beta": 0.1, "loss_type": "grpo", "mask_truncated_completions": True, "pad_to_multiple_of": 8}],
    ids=["on-policy", "off-policy"],
)
def test_the_recipe_records_what_trl_trains_on(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    trainer = trainer_in(tmp_path, **options)
    seen, compute_loss = [], trainer._compute_loss

    def watched(model, inputs):
        seen.append({name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)})
        return compute_loss(model, inputs)

    trainer._compute_loss = watched
    logps, gradients = watch_logps(trainer)
    exec(recipe("trl"), {"trainer": trainer})
    trainer.train()
    found = read_micro_batches(tmp_path / "captured.pt")
    assert len(found) == len(seen) == 2
    assert len({int(mb.loss_mask[i].sum()) for mb in found for i in range(mb.rows)}) > 2
    assert len(found) == len(gradients)
    for mb, inputs, logp, gradient in zip(found, seen, logps, gradients, strict=True):
        prompt_columns = inputs["prompt_ids"].shape[1]
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        assert torch.equal(mb.attention_mask, attention)
        assert torch.equal(mb.input_ids * attention, torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1) * attention)
        assert torch.equal(mb.loss_mask[:, prompt_columns:], inputs["completion_mask"].long())
        assert not mb.loss_mask[:, :prompt_columns].any()
        assert torch.equal(mb.advantages[:, prompt_columns:], inputs["advantages"][:, None] * inputs["completion_mask"])
        assert mb.layout == "padded"
        assert mb.meta == {"trainer": "trl", "group_size": GROUP}
        prompts = {tuple(ids[mask == 1].tolist()) for ids, mask in zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)}
        assert mb.group_ids.unique().numel() == len(prompts)  # TRL shuffles: a group may be spread over micro-batches
        assert (mb.loss.num_items_in_batch, mb.loss.current_gradient_accumulation_steps, mb.loss.steps_per_generation) == (int(inputs["num_items_in_batch"]), 2, 2)
        assert (mb.loss.loss_type, mb.loss.beta) == (options.get("loss_type", "dapo"), options.get("beta", 0.0))
        for ours, theirs in (("old_logps", "old_per_token_logps"), ("ref_logps", "ref_per_token_logps")):
            if not options:
                assert getattr(mb, ours) is None
                assert theirs not in inputs
            else:
                assert torch.equal(getattr(mb, ours)[:, prompt_columns:], inputs[theirs] * inputs["completion_mask"])
        counted = mb.loss_mask[:, prompt_columns:].bool()
        exposure = mb.exposure(logps=logp[counted].double())[:, prompt_columns:]
        assert torch.allclose(exposure, gradient.double() * counted, rtol=1e-5, atol=1e-9)
        assert gradient.abs().max() > 1e-3
