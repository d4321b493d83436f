"""slime: what `--save-debug-train-data` writes, one entry per sample, in one of two shapes.

    {"rollout_data": {"tokens": [...], "response_lengths": [...], ...}, "rank": ...}           one rank, lists of all samples
    {"format_version": 2, "samples": [{"tokens": ..., ...}, ...], "dp_shards": [{...}, ...]}   all data parallel ranks, a dict a sample

N_i tokens of sample i, R_i of them of the response, at its end; masks, advantages and log-probs are (R_i,). Samples are packed.
A shard's `micro_batch_indices` say which of its samples went into one micro-batch. The dump has no loss options: they go beside it
(RECIPE). slime's loss is TRL's token-level "grpo" surrogate (`eps_clip_c` its delta) with a normaliser of its own:
z = m / n_i / samples of the update (n_i: loss tokens of the sample, or of its rollout), or m / tokens of the update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hilore_cli.batches import MicroBatch, from_rows
from hilore_cli.captured import rows
from hilore_cli.errors import ProfileError
from hilore_cli.exposure import TrlLoss

SIGNATURES = ({"rollout_data"}, {"samples", "dp_shards"}, {"tokens", "response_lengths"})
REQUIRED = {"tokens", "response_lengths"}
PER_SAMPLE = {"tokens", "response_lengths", "total_lengths", "loss_masks", "advantages"}
VALUES = {"advantages": "advantages", "old_logps": "log_probs", "ref_logps": "ref_log_probs", "sampling_logps": "rollout_log_probs"}
OPTIONS = {
    "eps_clip": 0.2, "eps_clip_high": None, "eps_clip_c": None, "use_kl_loss": False, "kl_loss_coef": 0.0, "kl_loss_type": "k1",
    "use_unbiased_kl": False, "entropy_coef": 0.0, "calculate_per_token_loss": False, "use_tis": False, "tis_clip": 2.0,
    "tis_clip_low": 0.0, "use_rollout_logprobs": False, "global_batch_size": None, "rollout_temperature": 1.0,
}  # fmt: skip
"""slime's own options that its loss depends on, and their defaults; global_batch_size counts the samples of one update."""

RECIPE = '''\
# slime: start training with this flag, once; every pipeline's last rank writes a file
    --save-debug-train-data captured_{rollout_id}_{rank}.pt
# then put the loss options of your command line beside the dump, for: hilore profile --batch captured.pt
python - captured_0_0.pt captured.pt <<'END'
import sys, torch
loss = {"eps_clip": 0.2, "eps_clip_high": None, "eps_clip_c": None, "use_kl_loss": False, "kl_loss_coef": 0.0, "kl_loss_type": "k1",
        "use_unbiased_kl": False, "entropy_coef": 0.0, "calculate_per_token_loss": False, "use_tis": False,
        "use_rollout_logprobs": False, "global_batch_size": None, "rollout_temperature": 1.0}
inputs = torch.load(sys.argv[1], weights_only=True, map_location="cpu")
torch.save({"hilore_capture": 1, "trainer": "slime", "inputs": inputs, "loss": loss, "meta": {}}, sys.argv[2])
END
'''


def read(inputs: Mapping[str, Any], *, loss: Mapping[str, Any] | None, meta: dict[str, Any]) -> list[MicroBatch]:
    """The micro-batches of all ranks and updates of the dump, in order. Raises ProfileError."""
    if loss is None:
        rows.assume("slime", "the dump has no loss options", "slime's defaults")
    options = {name: rows.scalar(value) for name, value in (loss or {}).items()}
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise ProfileError(f"slime loss options {', '.join(unknown)} are unknown; hilore reads {', '.join(OPTIONS)}")
    wrong = [name for name, value in options.items() if not isinstance(value, str if name == "kl_loss_type" else int | float | None)]
    if wrong or (options.get("global_batch_size") or 1) <= 0:
        raise ProfileError(f"slime loss option {(wrong or ['global_batch_size'])[0]} is not one of slime's values; hilore capture slime shows them")
    options = OPTIONS | options
    found = []
    for shard, samples in _shards(inputs):
        for sample in samples:
            _check_sample(sample)
        micro_batches = _micro_batches(shard, len(samples))
        if micro_batches[0][0] is None and options["global_batch_size"] is None:
            rows.assume("slime", "global_batch_size was not recorded", f"that an update has the {len(samples)} samples of this rank")
        for of_update, indices in micro_batches:
            count = of_update or options["global_batch_size"] or len(samples)
            found.append(_micro_batch([samples[i] for i in indices], options, samples_of_update=count, meta=meta))
    return found


def _shards(inputs: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], list[dict[str, Any]]]]:
    """(layout, samples in the rank's own order) of each data parallel rank."""
    if "samples" in inputs:
        samples = _list_of(inputs, "samples", Mapping)
        return [(shard, _samples_of(shard, samples)) for shard in ([{}] if inputs.get("dp_shards") is None else _list_of(inputs, "dp_shards", Mapping))]
    columns = inputs.get("rollout_data", inputs)
    if not isinstance(columns, Mapping) or (missing := sorted(PER_SAMPLE - set(columns))):
        raise ProfileError(f"slime data lack {', '.join(missing) if isinstance(columns, Mapping) else 'rollout_data'}; advantages are there after training only: record with --save-debug-train-data")
    lists = {name: column for name, column in columns.items() if isinstance(column, (list, tuple, Tensor)) and getattr(column, "ndim", 1)}
    count = len(lists.get("total_lengths", ()))
    if wrong := sorted(name for name in PER_SAMPLE if name not in lists or len(lists[name]) != count):
        raise ProfileError(f"slime data: {wrong[0]} is no list of {count} entries, one for each sample of total_lengths; record it again")
    return [(columns, [{name: column[i] for name, column in lists.items() if len(column) == count} for i in range(count)])]


def _list_of(inputs: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    value = inputs.get(name)
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(item, kind) for item in value):
        raise ProfileError(f"slime data: {name} is no list as slime writes it; record it again with: hilore capture slime")
    return list(value)


def _samples_of(shard: Mapping[str, Any], samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """slime sorts the samples of all ranks; `partition` (else `sample_indices`) says which are the shard's, in its order."""
    rank = shard.get("data_parallel_rank")
    if any(not isinstance(sample.get(key), int | None) for sample in [shard, *samples] for key in ("data_parallel_rank", "rollout_position", "sample_index")):
        raise ProfileError("slime data: ranks and positions are no integers; record it again with: hilore capture slime")
    for column, key in (("partition", "rollout_position"), ("sample_indices", "sample_index")):
        if shard.get(column) is not None and all(sample.get(key) is not None for sample in samples):
            mine = {sample[key]: sample for sample in samples if sample.get("data_parallel_rank") == rank}
            wanted = _list_of(shard, column, int)
            if not set(wanted) <= set(mine):
                raise ProfileError(f"slime data: {column} of rank {rank} names samples that are not there; record it again")
            return [mine[position] for position in wanted]
    found = [sample for sample in samples if sample.get("data_parallel_rank") == rank]
    if not found:
        raise ProfileError(f"slime data: there are no samples of rank {rank}; record it again with: hilore capture slime")
    return found


def _micro_batches(shard: Mapping[str, Any], count: int) -> list[tuple[int | None, list[int]]]:
    """(samples of the update, None: unknown; indices into the rank's samples) of each micro-batch; one of all where it is not recorded."""
    if shard.get("micro_batch_indices") is None:
        return [(None, list(range(count)))]
    indices = _list_of(shard, "micro_batch_indices", list)
    flat = [i for chosen in indices for i in chosen]
    if not all(isinstance(i, int) for i in flat) or sorted(flat) != list(range(count)):
        raise ProfileError(f"slime data: micro_batch_indices do not cover the {count} samples of their rank once; record it again")
    if shard.get("num_microbatches") is None or shard.get("global_batch_sizes") is None:
        return [(None, chosen) for chosen in indices]
    numbers, sizes = _list_of(shard, "num_microbatches", int), _list_of(shard, "global_batch_sizes", int)
    of_update = [size for number, size in zip(numbers, sizes, strict=False) for _ in range(number)]
    if len(of_update) != len(indices):
        raise ProfileError(f"slime data: num_microbatches count {len(of_update)} micro-batches, micro_batch_indices {len(indices)}; record it again")
    return list(zip(of_update, indices, strict=True))


def _check_sample(sample: Mapping[str, Any]) -> None:
    if missing := sorted(PER_SAMPLE - set(sample)):
        raise ProfileError(f"slime data lack {', '.join(missing)}; record them with: hilore capture slime")
    present = [name for name in ("tokens", "loss_masks", *VALUES.values()) if sample.get(name) is not None]
    if deep := [name for name in present if rows.numbers(sample, name).ndim != 1]:
        raise ProfileError(f"slime data: a sample's {deep[0]} are no list of one value a token; record it again with: hilore capture slime")
    lengths = {name: len(sample[name]) for name in present}
    total, response = (int(rows.per_row(sample, name, 1)) for name in ("total_lengths", "response_lengths"))
    if lengths.pop("tokens") != total or not 0 <= response < total:
        raise ProfileError(f"slime data: a sample has {len(sample['tokens'])} tokens, total length {total} and response length {response}; they do not belong together")
    for name, length in lengths.items():
        if length != response:
            raise ProfileError(f"slime data: a sample's {name} have {length} values for a response of {response} tokens; with context parallelism record with a slime that gathers them (format 2)")


def _micro_batch(samples: list[dict[str, Any]], options: Mapping[str, Any], *, samples_of_update: int, meta: dict[str, Any]) -> MicroBatch:
    present = {name: key for name, key in VALUES.items() if all(sample.get(key) is not None for sample in samples)}
    if options["use_rollout_logprobs"] and "sampling_logps" in present:
        present["old_logps"] = present["sampling_logps"]
    unpadded = []
    for sample in samples:
        response = int(sample["response_lengths"])
        prompt = len(sample["tokens"]) - response
        mask = rows.zeros_and_ones(rows.numbers(sample, "loss_masks")[None], "loss_masks")[0]
        values = {name: rows.numbers(sample, key).float() for name, key in present.items()}
        if options["use_tis"]:
            if not {"old_logps", "sampling_logps"} <= set(values):
                raise ProfileError("slime data: use_tis needs log_probs and rollout_log_probs; record them, or set use_tis to False if it was off")
            values["is_weights"] = (values["old_logps"] - values["sampling_logps"]).exp().clamp(options["tis_clip_low"], options["tis_clip"])
        values["normaliser"] = mask * _weight(sample, mask, options) / samples_of_update
        unpadded.append(
            {
                "ids": rows.token_ids(rows.numbers(sample, "tokens"), "tokens").tolist(),
                "loss_mask": [0] * prompt + mask.tolist(),
                **{name: torch.cat([torch.zeros(prompt), value]) for name, value in values.items()},
            }
        )
    return from_rows(unpadded, loss=_loss(options), layout="packed", width=max(len(row["ids"]) for row in unpadded), meta=meta)


def _weight(sample: Mapping[str, Any], mask: Tensor, options: Mapping[str, Any]) -> float:
    """1/n: of the sample's loss tokens, or of its rollout's where slime counts those."""
    if options["calculate_per_token_loss"]:
        raise ProfileError("slime: calculate_per_token_loss divides by the tokens of the whole update, which hilore does not sum up; record own tensors with a normaliser (hilore capture own)")
    counted = mask.sum() if sample.get("rollout_mask_sums") is None else rows.per_row(sample, "rollout_mask_sums", 1)
    return 1.0 / max(float(counted), 1.0)


def _loss(options: Mapping[str, Any]) -> TrlLoss:
    if options["use_kl_loss"] and options["kl_loss_coef"] and options["kl_loss_type"] not in ("k3", "low_var_kl"):
        raise ProfileError(f"slime: kl_loss_type {options['kl_loss_type']} is not one that hilore reads (k3, low_var_kl); record through own tensors (hilore capture own)")
    return TrlLoss(
        loss_type="grpo",
        epsilon=options["eps_clip"],
        epsilon_high=options["eps_clip_high"],
        delta=options["eps_clip_c"],
        beta=options["kl_loss_coef"] if options["use_kl_loss"] else 0.0,
        use_bias_correction_kl=options["use_unbiased_kl"],
        entropy_coef=options["entropy_coef"],
        temperature=options["rollout_temperature"],
    )
