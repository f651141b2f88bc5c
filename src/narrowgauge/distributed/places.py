"""Where in the program a process is: inside a collective, or elsewhere."""

from __future__ import annotations

import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

_TORCH = str(Path(torch.__file__).parent)
# backward waits in C++ for hooks that communicate, e.g. DDP's; torch's and our own code that waits for other ranks
_WAITING = (f"{_TORCH}/distributed/", f"{_TORCH}/autograd/graph.py", str(Path(__file__).parent) + "/")
_WORDS = ("gloo", "nccl", "connection", "timed out", "timeout", "socket")
_LIBRARIES = (_TORCH, sysconfig.get_paths()["stdlib"])


def of_main_thread() -> tuple[bool, str]:
    """(whether the main thread waits for other ranks, "file:line in function" of the program it is in)."""
    frames = sys._current_frames()
    main = frames.get(threading.main_thread().ident or 0)
    own = threading.get_ident()
    waits = any(_waits(frame.f_code.co_filename) for ident, frame in frames.items() if ident != own)
    return waits, "" if main is None else _place(main)


def lost_contact(error: BaseException) -> bool:
    """Whether an error came out of communication, as where another rank has closed its connections."""
    if isinstance(error, dist.DistError):
        return True
    last: TracebackType | None = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    # gloo raises plain RuntimeErrors
    in_communication = last is not None and _waits(last.tb_frame.f_code.co_filename)
    return in_communication and any(word in str(error).lower() for word in _WORDS)


def _waits(file: str) -> bool:
    return file.startswith(_WAITING)


def _place(frame: FrameType) -> str:
    """The innermost frame outside torch and Python's own library; else the innermost."""
    innermost, here = frame, frame
    while here.f_back is not None and here.f_code.co_filename.startswith(_LIBRARIES):
        here = here.f_back
    if here.f_code.co_filename.startswith(_LIBRARIES):
        here = innermost
    path = Path(here.f_code.co_filename)
    return f"{'/'.join(path.parts[-2:])}:{here.f_lineno} in {here.f_code.co_qualname}"
