"""How a command line tool under a launcher turns a mistake of the user's into one line."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

EXIT_CODE = 2


def why_not_writable(path: Path) -> str | None:
    """Why no file can be written to ``path``, or None: to be asked before an hour of measuring. Writes nothing."""
    folder = path.resolve().parent
    if not folder.is_dir():
        return f"{folder} is not a directory"
    if path.is_dir():
        return f"{path} is a directory"
    if not os.access(path if path.exists() else folder, os.W_OK):
        return f"{path} cannot be written"
    return None


def refuse(program: str, message: str) -> int:
    """Says ``message`` once a host and returns the exit code; to be called before ranks communicate."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{program}: {message}", file=sys.stderr, flush=True)
    else:
        # The launcher ends every rank as soon as one is gone: let the one that has to say something be first.
        time.sleep(20)
    return EXIT_CODE
