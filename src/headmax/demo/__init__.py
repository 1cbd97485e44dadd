"""`headmax demo`: one small model trained three times, on Python's own source (code) or on associative recall (recall)."""
