"""LoRA reinforcement learning for Megatron models on Ray: the actor pools and what they do."""
