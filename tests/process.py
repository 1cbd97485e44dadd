"""What belongs to the whole process."""

import logging
import os
import warnings
from typing import Any

import torch


def state() -> dict[str, Any]:
    """To be compared with what it is later."""
    return {
        "warnings": list(warnings.filters),
        "environment": dict(os.environ),
        "random numbers": torch.get_rng_state().tolist(),
        "levels": {name: logging.getLogger(name).level for name in ("headmax", "lm_eval", "datasets", "evaluate")},
        "recompilations": torch._dynamo.config.recompile_limit,
        "threads": torch.get_num_threads(),
    }
