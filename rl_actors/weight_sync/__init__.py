"""Merged LoRA weights, moved from the trainer's shards straight into the engines' shards."""
