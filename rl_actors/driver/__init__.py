"""The driver actor: it pipelines rollout, reward, logprob, update and sync, and bounds staleness."""
