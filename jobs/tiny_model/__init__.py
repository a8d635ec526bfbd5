"""A model of about one million parameters, trained from scratch in a minute, that RL can visibly improve.

`jobs.make_tiny_model` is the command. The parts: `task` (questions and the two ways of answering them),
`tokenizer`, `architecture` (the Hugging Face configurations), `training`, `evaluation`.
"""
