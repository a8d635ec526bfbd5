"""The rollout pool: vLLM engines, one actor each, that turn prompts into trajectories.

`samples` is the plain data, `vllm_settings` the settings, `vllm_core` vLLM one step at a time, `engine` the actor
around it, `pool` all engines together, `receiver` how new weights come in.
"""
