"""Gates of a model on a text, and figures of training runs."""
