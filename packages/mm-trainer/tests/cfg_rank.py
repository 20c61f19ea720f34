"""A stand-in for a rank: fails or waits as it is told, without importing torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from mm_trainer.errors import InputError
from mm_trainer.launch.failures import record_failure
from mm_trainer.launch.rank import RankEnvironment


def main(behaviour: str, folder: Path) -> None:
    rank = RankEnvironment.read()
    assert rank is not None
    mark = folder / f"rank{rank.rank}.{rank.restarts}"
    mark.write_text(f"{rank.world_size} {rank.supervised}")
    match behaviour:
        case "fault" | "bad_input":
            if rank.rank == 1:
                kind = RuntimeError if behaviour == "fault" else InputError
                code = 1 if behaviour == "fault" else 2
                try:
                    raise kind("rank one's reason")
                except (RuntimeError, InputError) as error:
                    record_failure(rank, error, code)
                sys.exit(code)
            time.sleep(60)
        case "killed":
            if rank.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        case "restart":
            if rank.restarts == 0 and rank.rank == 1:
                sys.exit(1)
        case "graceful":
            stopped: list[int] = []
            signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
            (folder / f"ready{rank.rank}").touch()
            while not stopped:
                time.sleep(0.02)
            (folder / f"saved{rank.rank}").touch()
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (folder / f"ready{rank.rank}").touch()
            time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
