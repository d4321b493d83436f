"""What a file was made from, and is bound to: the machine, the model with its adapters, the micro-batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from hilore_cli.errors import UsageError
from hilore_cli.records import Strict


class Machine(Strict):
    """What the figures were measured on."""

    device: str
    cpu: str
    threads: int
    torch: str
    transformers: str
    python: str
    hilore: str


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters of one rank on linears of the decoder layers, with PEFT's words.

    `alpha`: None is twice the rank. `targets`: last parts of the linears' names (q_proj); None is all of them.
    """

    rank: int
    alpha: float | None = None
    dropout: float = 0.0
    targets: tuple[str, ...] | None = None

    @property
    def lora_alpha(self) -> float:
        """What the adapters have."""
        return 2 * self.rank if self.alpha is None else self.alpha

    def check(self) -> None:
        """Raise UsageError for values that PEFT does not take."""
        if self.rank < 1:
            raise UsageError(f"lora rank {self.rank}: must be at least 1")
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise UsageError(f"lora alpha {self.alpha:g}: must be above 0, and finite")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"lora dropout {self.dropout:g}: must be from 0 to under 1")
        if self.targets is not None and not self.targets:
            raise UsageError("lora targets: none is named; name linears such as q_proj,v_proj, or leave them out for all")

    def __str__(self) -> str:
        parts = [f"LoRA of rank {self.rank}"]
        if self.lora_alpha != 2 * self.rank:
            parts.append(f"alpha {self.alpha:g}")
        if self.dropout:
            parts.append(f"dropout {self.dropout:g}")
        return f"{', '.join(parts)} on {'all linears' if self.targets is None else ' and '.join(self.targets)}"


class ModelId(Strict):
    """What a plan is bound to. Two models with equal fingerprints run the same graphs."""

    LATER: ClassVar[set[str]] = {"lora_alpha", "lora_dropout", "lora_targets"}

    source: str = Field(description="preset, folder name or hub id that was profiled; for people, not compared")
    architecture: str
    config_digest: str
    layers: int
    parameters: int
    trainable_digest: str = Field(description="digest of the names, shapes and dtypes of all parameters and of which are trainable")
    dtype: str
    attn_implementation: str
    lora_rank: int | None
    lora_alpha: float | None = Field(default=None, description="for people, as the two below: graph digests tell other graphs. null in older files: twice the rank")
    lora_dropout: float = 0.0
    lora_targets: list[str] | None = Field(default=None, description="last parts of the names of the linears with adapters; null: all linears of the decoder layers")

    @property
    def lora(self) -> Lora | None:
        if self.lora_rank is None:
            return None
        return Lora(rank=self.lora_rank, alpha=self.lora_alpha, dropout=self.lora_dropout, targets=None if self.lora_targets is None else tuple(self.lora_targets))


class BatchId(Strict):
    """The micro-batch that was profiled."""

    source: str
    digest: str
    task: str
    rows: int
    length: int = Field(description="padded tokens of a row: prompt + completion")
    tokens: int = Field(description="rows x length, padding included")
    loss_tokens: int
    group_size: int
