"""A look inside: the gates of a model on a text, and a training run as a picture."""
