"""Head gates while a text is generated: its tokens are read once more, beside the steps, which do not tell of gates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from headmax.analysis.gates import layers_of
from headmax.generate.prefill import Reader
from headmax.serve.job import Ended, Event, Job, NewGates

Tell = Callable[[Job, Event], None]


@dataclass(eq=False)
class GateReading:
    """A text, the tokens of it that are still to be read, and its end once that has come."""

    reader: Reader
    new: list[int] = field(default_factory=list)
    ended: Ended | None = None


class GateReadings:
    """For one thread. Each turn reads what is new of one text, in turns: others wait for one small forward pass at most."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.under_way: dict[Job, GateReading] = {}

    def begin(self, job: Job, reader: Reader) -> None:
        """From a prompt on that `reader` has read."""
        self.under_way[job] = GateReading(reader)

    def token(self, job: Job, token: int) -> None:
        self.under_way[job].new.append(token)

    def end(self, job: Job, event: Ended) -> None:
        """To be told after the gates of the last token."""
        self.under_way[job].ended = event

    def drop(self, job: Job) -> None:
        self.under_way.pop(job, None)

    def next(self) -> Job | None:
        """The job whose turn it is."""
        return next((job for job, watch in self.under_way.items() if watch.new or watch.ended is not None), None)

    def read(self, job: Job) -> None:
        """What is new of a job's text; it is the last in line then."""
        watch = self.under_way.pop(job)
        if watch.new:
            reader, count = watch.reader, len(watch.new)
            reader.text = torch.cat([reader.text, torch.tensor(watch.new)])
            watch.new = []
            reader.read(count)
            self.tell(job, gates_of(reader, count))
        if watch.ended is not None:
            self.tell(job, watch.ended)
        else:
            self.under_way[job] = watch


def gates_of(reader: Reader, count: int) -> NewGates:
    """Of the last `count` tokens that were read."""
    assert reader.gates is not None
    return NewGates(reader.position - count, layers_of(reader.model, reader.gates, "this model"))
