"""The paper's evaluation, on lm-evaluation-harness, in three stages with a file each: requests, scores, metrics."""
