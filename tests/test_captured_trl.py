"""TRL's recipe, run as printed inside a real GRPOTrainer on a tiny model, and read back."""

from __future__ import annotations

import pytest
import torch
from trl_for_tests import GROUP, trainer_in, watch_inputs, watch_logps

from hilore_cli.captured import read_micro_batches, recipe


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [{}, {"num_iterations": 2, "beta": 0.1, "loss_type": "grpo", "mask_truncated_completions": True, "pad_to_multiple_of": 8}],
    ids=["on-policy", "off-policy"],
)
def test_the_recipe_records_what_trl_trains_on(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    trainer = trainer_in(tmp_path, **options)
    seen = watch_inputs(trainer)
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
