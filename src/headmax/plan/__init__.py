"""What a training run would take: memory, step time, days, GPU-hours."""
