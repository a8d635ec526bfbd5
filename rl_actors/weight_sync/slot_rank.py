"""Which adapter ranks vLLM's own LoRA has room for. Pure."""

from __future__ import annotations

SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The slot ranks that vLLM 0.26 has kernels for (`vllm.config.lora.MaxLoRARanks`)."""


def slot_rank(rank: int) -> int | None:
    """The smallest slot that holds adapters of `rank`; None if there is none."""
    return next((allowed for allowed in SLOT_RANKS if allowed >= rank), None)
