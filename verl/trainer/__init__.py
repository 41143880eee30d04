"""Programs: the training loop and the entry points built around it."""
