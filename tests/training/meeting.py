"""How the ranks of a job find one another."""

from __future__ import annotations

import time
from pathlib import Path

from slime_core.engines.process import free_port


def meet(path: Path, rank: int) -> int:
    """A port that rank 0 finds free now and tells by this file; one chosen with the job may be taken by now."""
    if rank == 0:
        port = free_port()
        path.with_suffix(".new").write_text(str(port))
        path.with_suffix(".new").rename(path)
        return port
    deadline = time.monotonic() + 1200
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 has not told its port in {path}")
        time.sleep(0.01)
    return int(path.read_text())
