"""`headmax demo`: a small model trained three times, on Python's source (code) or on associative recall (recall)."""
