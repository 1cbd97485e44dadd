"""lm-evaluation-harness's command line with the model `headmax`: python -m headmax.eval.lm_eval --model headmax ..."""

from __future__ import annotations

from lm_eval.__main__ import cli_evaluate

import headmax.eval.harness  # noqa: F401  registers the model

if __name__ == "__main__":
    cli_evaluate()
