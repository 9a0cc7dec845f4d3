"""Score modifiers that FlashAttention-4 compiles into its kernel; imports the kernel package's compiler.

A factory's argument is a constant of the compiled kernel, and the package tells modifiers apart by their source and
the values that they close over.
"""

import functools
import math

import cutlass
import cutlass.cute as cute


@functools.cache
def repeated_last_key(repeats_to: int):
    """Adds log(repeats_to + 1 - length) to the score of each sequence's last key, so that it counts that often.

    A sequence that has repeats_to keys already gets log 1 = 0. Needing no tensor beside the lengths, this keeps the
    kernel's path without bounds checks on such tensors, which costs two divisions less for each score.
    """

    @cute.jit
    def modify(score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        count = cutlass.Float32(repeats_to + 1 - seqlen_info.seqlen_k)
        bias = cute.math.log2(count, fastmath=True) * math.log(2)
        last = cute.full_like(kv_idx, seqlen_info.seqlen_k - 1)
        return score + cute.where(kv_idx == last, cute.full_like(score, bias), cute.full_like(score, 0.0))

    return modify
