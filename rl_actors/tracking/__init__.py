"""What shows a run: one `Tracker` that writes, draws and reports every training step.

`Tracker` is all a driver needs. The other modules can be read on their own: `records` (the numbers of a step, on
disk), `trace` (when what ran), `console`, `wandb`, `ray_metrics`, `stage_times` and `summary`.
"""
