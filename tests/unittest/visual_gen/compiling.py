"""For tests of compiled blocks: what counts their graphs, in place of the compiler."""

import functools
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from visual_gen import compilation
from visual_gen.models.wan import WanTransformer


@contextmanager
def counted_graphs(backend="eager"):
    """Within, compile_blocks takes this backend; gives its counter, whose frame_count is the number of graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compile_blocks = functools.partialmethod(WanTransformer.compile_blocks, backend=counter)
    with mock.patch.object(WanTransformer, "compile_blocks", compile_blocks), ExitStack() as stack:
        if backend != "inductor":  # then no compiler is needed
            stack.enter_context(mock.patch.object(compilation, "cpu_problem", lambda: None))
        yield counter
    torch._dynamo.reset()
