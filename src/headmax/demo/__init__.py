"""make demo: one tiny backbone trained three times on associative recall."""
