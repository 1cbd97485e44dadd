"""The paper's evaluation, on lm-evaluation-harness: requests, then scores, then metrics, each a file of its own."""
