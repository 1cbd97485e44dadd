"""Training."""

from headmax.train.config import TrainConfig

__all__ = ["TrainConfig"]
