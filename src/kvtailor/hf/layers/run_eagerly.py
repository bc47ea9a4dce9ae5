"""What a compiled model runs as it stands: torch.compile must not trace into a cache.

A cache counts, locks and reads addresses of tensors. torch.compile would specialise on all of that, compile it anew at
each token, and hand the C++ kernels tensors without storage, which ends the process. So it compiles what stands around.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame

__all__ = ["run_eagerly"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
# None while nothing is compiled. A torch that does not tell may be compiling.
_compiler_at_work: Callable[[], object] = getattr(eval_frame, "get_eval_frame_callback", lambda: True)
_WHY = "kvtailor's cache is no part of a graph: compile the model without fullgraph=True"


def run_eagerly(function: _Function) -> _Function:
    """Make a function that torch.compile calls and does not compile, and all that it calls with it.

    What torch makes of it costs a decoded token 4 us a call, and does nothing while nothing is compiled: then the
    function itself is called.
    """
    disabled = torch.compiler.disable(function, reason=_WHY)

    # Marked as what it wraps is, so torch.compile takes either for a function that it must not enter.
    @wraps(disabled)
    def eager(*args: Any, **kwargs: Any) -> Any:
        return (function if _compiler_at_work() is None else disabled)(*args, **kwargs)

    return cast(_Function, eager)
