"""Released models' sizes without their weights: a config.json and a tokenizer, enough for `model.random_weights`."""
