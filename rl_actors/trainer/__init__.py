"""The Megatron pool: one actor per rank, LoRA adapters on a frozen base, one optimizer step at a time."""
