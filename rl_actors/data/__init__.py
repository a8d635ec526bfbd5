"""From a dataset to prompts in token ids, and the order in which they are drawn."""
