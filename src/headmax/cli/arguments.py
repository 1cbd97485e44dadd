"""What several commands ask of their arguments."""

from __future__ import annotations


def check_device(device: str, needed_by: str = "") -> None:
    """ValueError where this machine has no such device."""
    from headmax.train.parallel import find_device

    find_device(device, f"{needed_by} needs a CUDA GPU" if needed_by else f"--device {device}")


def at_least(least: int, **numbers: int | tuple[int, ...] | None) -> None:
    """ValueError names the first option that is below; one that was not given is not."""
    for name, given in numbers.items():
        several = given if isinstance(given, tuple) else () if given is None else (given,)
        if any(number < least for number in several):
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {' '.join(map(str, several))}")


def count(name: str, text: str) -> int:
    """A number of tokens: 500000, 15e9, 0.5M or 15B."""
    scale = {"K": 10**3, "M": 10**6, "B": 10**9}.get(text[-1:].upper(), 1)
    try:
        number = float(text.rstrip("kKmMbB") if scale > 1 else text) * scale
    except ValueError as error:
        raise ValueError(f"--{name} must be a number such as 500000, 15e9, 0.5M or 15B, got {text!r}") from error
    if not 1 <= number < 1e18:
        raise ValueError(f"--{name} must be between 1 and 1e18, got {text}")
    return round(number)
