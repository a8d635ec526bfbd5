"""Reward functions, and the CPU actors that run them.

A reward function takes a prompt and the text of one answer and returns a number:

    def reward(prompt: Prompt, text: str, **kwargs) -> float

`prompt.answer` is the reference answer, `prompt.metadata` holds the row's other columns, `kwargs` come from
`reward.kwargs` of the configuration. It may be `async`. It runs in a process of its own, so it may block; what
it raises ends the run with an error that names the prompt. It must not turn its own failures into a score.
"""
