"""`headmax convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from headmax.cli.options import metavar


def convert(
    source: Annotated[Path, metavar("SOURCE")],
    out: Annotated[Path | None, metavar("[OUT]")] = None,
    /,
    to: Annotated[Literal["headmax", "fla", "hf"] | None, metavar("{headmax,fla}")] = None,
) -> None:
    """Convert a run, or a flash-linear-attention checkpoint, to a model folder.

    The weights stay the same, bit for bit.

    Args:
        source: a run of `headmax train`, or a folder with config.json and safetensors files.
        out: folder to write, new or empty; for a run, SOURCE/hf unless given.
        to: format to write: headmax, the default, or fla for a RetNet, GLA, Gated DeltaNet or Transformer.
    """
    from headmax.models.convert import from_fla, to_fla
    from headmax.train.export import to_hf
    from headmax.train.loading import is_run

    run = is_run(source)
    if out is None and not run:
        raise ValueError(f"convert {source}: name the folder to write, as in `headmax convert {source} OUT`")
    target = source / "hf" if out is None else out
    if to == "fla" and run:
        raise ValueError(f"convert {source} --to fla: this is a run; turn it into a model folder first: `headmax convert {source}`")
    (to_hf if run else to_fla if to == "fla" else from_fla)(source, target)
    print(f"headmax: wrote {target}")
