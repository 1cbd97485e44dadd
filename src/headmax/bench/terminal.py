"""A measured number as a line of text."""

from __future__ import annotations

from headmax.records import Record


def line(record: Record, width: int = 28) -> str:
    """The case in at least `width` characters, then the number and what is known beside it."""
    text, extra = f"{record.case:{width}} {record.impl:8} {record.metric:36} {record.value:12.5g} {record.unit}", record.extra
    if "roofline" in extra:
        text += f"   {extra['TFLOP/s']:.0f} TFLOP/s, {extra['GB/s']:.0f} GB/s, {extra['roofline']:.0%} of the roofline"
    if "of the bandwidth" in extra:
        text += f"   {extra['of the bandwidth']:.0%} of the bandwidth"
    if extra.get("interval") is not None:
        text += "   95% interval {:.4f} to {:.4f}".format(*extra["interval"])
    return text
