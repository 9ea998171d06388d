"""What a running autograd pass will reach."""

from __future__ import annotations

from typing import Literal

import torch


def reached_leaves() -> Literal["all", "some", "none"]:
    """Within an output's gradient hook: which leaves under that output get a gradient in the running pass.

    "all": of a ``loss.backward()``, which is a micro-step even where it reaches no parameter of ours; the first leaf
    found answers for all. "some": of a backward that names its inputs. "none": of a ``torch.autograd.grad``, which
    is no backward pass to us: it yields no gradient of a parameter, and other ranks need not run it.
    """
    node = torch._C._current_autograd_node()
    todo = [] if node is None else [node]
    seen, leaves = set(todo), 0
    while todo:
        node = todo.pop()
        if not node.next_functions:
            leaves += 1
            try:
                if torch._C._will_engine_execute_node(node):
                    return "all" if leaves == 1 else "some"
            except RuntimeError:  # torch's answer for a leaf whose gradient torch.autograd.grad was asked for
                return "none"
        found = [function for function, _ in node.next_functions if function is not None and function not in seen]
        seen.update(found)
        todo += found
    return "none"
