"""A look inside: the gates of a model on a text, the paper's theorems as experiments, its figures from records."""
