"""The simulator's model of a replica's speed, and the calibration file that has it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """One replica's speed. Prefill is served first come, first served; decodes run at the same time.

    TTFT = wait for the prefill queue + own uncached tokens / prefill_rate. A decode step takes
    decode_base_s + decode_per_request_s x requests decoding, and gives each of these one token.
    The defaults have the order of magnitude of an 8B model in bfloat16 on a current GPU.
    """

    prefill_rate: float = 12_000.0
    """Uncached prompt tokens computed per second."""
    decode_base_s: float = 0.012
    """Seconds of a decode step for any batch: reading the weights."""
    decode_per_request_s: float = 0.00025
    """Seconds that each decoding request adds to a step: reading its KV."""

    def __post_init__(self) -> None:
        if not self.prefill_rate > 0.0:
            raise ValueError(f"prefill_rate must be above 0 tokens/s, got {self.prefill_rate}")
        if self.decode_base_s < 0.0 or self.decode_per_request_s < 0.0:
            raise ValueError("decode times must be at least 0 s")
        if self.decode_base_s + self.decode_per_request_s <= 0.0:
            raise ValueError("a decode step must take more than 0 s")

    def prefill_seconds(self, num_uncached: int) -> float:
        """Return the seconds to compute so many prompt tokens."""
        return num_uncached / self.prefill_rate

    def step_seconds(self, num_decoding: int) -> float:
        """Return the seconds of a decode step with so many requests."""
        return self.decode_base_s + self.decode_per_request_s * num_decoding


class CalibrationError(ValueError):
    """An invalid calibration file."""


def read_calibration(path: Path) -> ServiceModel:
    """Read the service model from a file that `benchmarks/calibrate.py` wrote. Raises CalibrationError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Calibration).service
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise CalibrationError(
            f'{path}: expected {{"service": {{"prefill_rate", "decode_base_s", "decode_per_request_s"}}}} '
            f"as benchmarks/calibrate.py writes it: {error}"
        ) from None


@dataclass(frozen=True, slots=True)
class _Calibration:
    service: ServiceModel
