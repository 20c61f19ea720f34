"""What went wrong in which rank, reported once."""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_trainer.launch.plan import BAD_INPUT, FAULT
from mm_trainer.launch.rank import RankEnvironment

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def record_failure(environment: RankEnvironment, error: BaseException, exit_code: int) -> None:
    """Leave a rank's error for its launcher, ours or torchrun, in the form that both read."""
    if environment.error_file is None:
        return
    now = time.time()
    data = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "errorCode": exit_code,
            "extraInfo": {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(now))},
        },
        "mm_trainer": {"time": now, "text": str(error)},
    }
    Path(environment.error_file).write_text(json.dumps(data), encoding="utf-8")


def report(failures: Mapping[int, ProcessFailure]) -> int:
    """Print the first failure with its rank; returns the exit code that follows from it."""
    rank, first = min(failures.items(), key=lambda item: _order(item[1]))
    details = _details(first)
    said = f"mm-trainer: rank {rank} failed first"
    if first.exitcode < 0:
        print(f"{said}: it was killed by {signal.Signals(-first.exitcode).name}", file=sys.stderr)
        return FAULT
    if details is None:
        print(f"{said}: it ended with code {first.exitcode} and left no reason", file=sys.stderr)
    elif first.exitcode == BAD_INPUT:
        print(f"{said}\nerror: {details['mm_trainer']['text']}", file=sys.stderr)
    else:
        print(f"{said}:\n{details['message']['extraInfo']['py_callstack']}", file=sys.stderr, end="")
    return BAD_INPUT if first.exitcode == BAD_INPUT else FAULT


def report_restart(failures: Mapping[int, ProcessFailure]) -> None:
    report(failures)
    print("mm-trainer: all ranks are started again", file=sys.stderr)


def _order(failure: ProcessFailure) -> tuple[int, float]:
    """A rank that was killed comes first: the errors of the others, who lost it, may be on record before."""
    details = _details(failure)
    return (0 if failure.exitcode < 0 else 1, details["mm_trainer"]["time"] if details else failure.timestamp)


def _details(failure: ProcessFailure) -> dict[str, Any] | None:
    data = failure.error_file_data
    return data if "mm_trainer" in data else None
