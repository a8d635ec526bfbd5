"""Pure functions from rewards and log-probabilities to advantages, losses and batches: no Ray, no Megatron."""
