"""Runs an unchanged DeepSpeed script with the extension registered.

    deepspeed --module ds_lazyreduce.run train.py --deepspeed_config config.json
    deepspeed --module ds_lazyreduce.run -m package.train --deepspeed_config config.json

The script sees ``sys.argv``, ``sys.path[0]``, ``__name__`` and ``__file__`` as if started without this shim.
Only ``deepspeed`` has been imported already, so what must be set before that import is set by the caller.
"""

# ruff: noqa: E402 - sys.path is put in order before anything but sys is imported
from __future__ import annotations

import sys

# `python -m` has put the working directory in front, from where nothing that the shim imports shall come.
# (`python -P` has not.)
_CWD_IN_FRONT = __name__ == "__main__" and not getattr(sys.flags, "safe_path", False)
if _CWD_IN_FRONT:
    _CWD = sys.path.pop(0)

import importlib.util
import os
import runpy
import types
from typing import NamedTuple

from .refusal import refuse

USAGE = "usage: deepspeed --module ds_lazyreduce.run SCRIPT.py|-m MODULE [ARGUMENT ...]"


class Target(NamedTuple):
    """What to run: a script's path or a module's name, and the arguments it shall see."""

    name: str
    is_module: bool
    arguments: list[str]


class TargetError(Exception):
    """There is nothing to run; the message is for the user."""


def parse_command(arguments: list[str]) -> Target:
    """Split the shim's own arguments into the target and the target's arguments.

    With ``--module`` the launcher starts ``python -m ds_lazyreduce.run --local_rank=N train.py ...``. The
    rank moves behind the script and before its arguments, where the launcher itself would have put it.

    Raises:
        TargetError: no target is given.
    """
    rank, rest = [], list(arguments)
    while rest and rest[0].startswith(("--local_rank", "--local-rank")):
        taken = 1 if "=" in rest[0] else 2  # --local_rank=N or --local_rank N
        rank, rest = rank + rest[:taken], rest[taken:]
    is_module = rest[:1] == ["-m"]
    rest = rest[is_module:]
    if not rest or rest[0].startswith("-"):
        raise TargetError(f"no script given{f', got {rest[0]}' if rest else ''} ({USAGE})")
    return Target(rest[0], is_module, rank + rest[1:])


def check_target(target: Target) -> None:
    """Raises :class:`TargetError` if the script or module does not exist. Imports a module's package."""
    if not target.is_module:
        if not os.path.isfile(target.name):
            raise TargetError(f"no such file: {target.name}")
        return
    try:
        found = importlib.util.find_spec(target.name) is not None
    except ModuleNotFoundError as error:
        if not f"{target.name}.".startswith(f"{error.name}."):
            raise  # the package exists, and something that it imports does not
        found = False
    if not found:
        raise TargetError(f"no module named {target.name}")


def add_search_path(target: Target) -> None:
    """Put in front of ``sys.path`` what Python would have: a script's directory, or for a module the working one."""
    if _CWD_IN_FRONT:
        sys.path.insert(0, _CWD if target.is_module else os.path.dirname(os.path.realpath(target.name)))


def run_target(target: Target) -> None:
    """Run the target as ``__main__`` in this process, as ``python SCRIPT`` or ``python -m MODULE`` would."""
    sys.argv = [target.name, *target.arguments]
    if target.is_module:
        runpy.run_module(target.name, run_name="__main__", alter_sys=True)
    else:
        _run_script(target.name)


def _run_script(path: str) -> None:
    # Not runpy.run_path: it makes argv[0] and __file__ the same string, while for a script argv[0] is as
    # typed and __file__ absolute; and its __main__ is gone when atexit functions run.
    main_module = types.ModuleType("__main__")
    main_module.__file__ = os.path.abspath(path)
    sys.modules["__main__"] = main_module
    with open(path, "rb") as file:
        code = compile(file.read(), main_module.__file__, "exec", dont_inherit=True)
    exec(code, main_module.__dict__)


def main() -> None:
    """Entry point of ``python -m ds_lazyreduce.run``; exits with 2 if there is nothing to run."""
    try:
        target = parse_command(sys.argv[1:])
        add_search_path(target)
        check_target(target)
    except TargetError as error:
        sys.exit(refuse("ds_lazyreduce.run", str(error)))

    from . import register

    register()
    run_target(target)


if __name__ == "__main__":
    main()
