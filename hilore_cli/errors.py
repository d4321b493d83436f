"""The exception family and its exit codes.

Inner code raises the fact; the public function adds file, unit and values; the CLI prints one red line and exits with `exit_code`.
"""

from __future__ import annotations

from collections.abc import Sequence


class HiloreError(Exception):
    """Base of everything that hilore raises on purpose: the message is one line that names the thing and the remedy."""

    exit_code = 1


class UsageError(HiloreError):
    """An argument, preset, task, codec or size that does not exist or cannot be read."""

    exit_code = 2


class CaptureError(HiloreError):
    """A layer cannot be captured, or the captured graph is not the one that was expected."""

    exit_code = 3


class MutatingLayerError(CaptureError):
    """A layer writes into a buffer or an input: to recompute it, by a plan or by checkpointing, would write twice."""


class ProfileError(HiloreError):
    """A profile, a micro-batch or a measurement is missing, damaged or meaningless."""

    exit_code = 4


class InfeasibleError(HiloreError):
    """No plan keeps the budgets. Carries what would be feasible (bytes, relative gradient error), and what is heaviest where it binds
    (rows of the account as name and bytes).
    """

    exit_code = 5

    def __init__(
        self,
        message: str,
        *,
        least_peak_bytes: int | None = None,
        least_peak_at_risk_bytes: int | None = None,
        least_risk: float | None = None,
        binding_moment: str | None = None,
        heaviest: Sequence[tuple[str, int]] = (),
    ) -> None:
        super().__init__(message)
        self.least_peak_bytes = least_peak_bytes
        self.least_peak_at_risk_bytes = least_peak_at_risk_bytes
        self.least_risk = least_risk
        self.binding_moment = binding_moment
        self.heaviest = tuple(heaviest)


class PlanMismatchError(HiloreError):
    """A plan does not belong to this model, step, file version or set of budgets."""

    exit_code = 6


class CodecError(HiloreError):
    """A codec is asked for something outside its specification."""

    exit_code = 7


class SolverError(HiloreError):
    """CBC is missing, or answered something that does not hold when it is checked."""

    exit_code = 8


class CheckError(HiloreError):
    """A check failed: committed plans or profiles that do not hold any more, or what hilore doctor found to block."""

    exit_code = 9


def first_line(error: object) -> str:
    """Of a message that is not ours, shortened, for one of ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
