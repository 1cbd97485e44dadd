"""Training. `headmax.train.trainer.fit` trains; these are its settings."""

from headmax.train.config import (
    CheckpointConfig,
    ComputeConfig,
    EvalConfig,
    LogConfig,
    OptimConfig,
    ParallelConfig,
    ScheduleConfig,
    TrainConfig,
)

__all__ = ["CheckpointConfig", "ComputeConfig", "EvalConfig", "LogConfig", "OptimConfig", "ParallelConfig", "ScheduleConfig", "TrainConfig"]
