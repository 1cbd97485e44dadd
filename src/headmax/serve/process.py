"""`headmax serve` in a process of its own."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def server_process(*arguments: object, environment: Mapping[str, str] | None = None) -> Iterator[tuple[subprocess.Popen, str]]:
    """The process and its address, on a port that was free; it is killed in the end. ValueError says why it does not start."""
    command = [sys.executable, "-m", "headmax_cli", "serve", *map(str, arguments), "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert server.stderr is not None
    try:
        output = []
        for line in server.stderr:
            output.append(line)
            if address := re.search(r"on (http://\S+:\d+)", line):
                break
        else:
            raise ValueError("".join(output).strip())
        reading = threading.Thread(target=lambda: [None for _ in server.stderr or ()], daemon=True)
        reading.start()
        yield server, address[1]
    finally:
        server.kill()
        server.wait()
        server.stderr.close()
