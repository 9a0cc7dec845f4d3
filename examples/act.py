"""Actions: tokens that one forward attends to and that are never kept. Run: python examples/act.py

One attention layer of random weights, so it shows the mechanism and makes no picture: two players of one world get the
same frames and other actions. Each action changes its own frame, and leaves no trace in the KV cache.
"""

import torch

from attention_backend import AttentionSpec, select_backend
from attention_backend.kv_cache import CachedAttention, Chunk, PagedKVCache

FRAME_TOKENS, HEADS, HEAD_DIM, ACTIONS = 16, 4, 32, ["left", "right", "jump"]
torch.manual_seed(0)
spec = AttentionSpec("self", HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))
attend = CachedAttention(select_backend("auto", spec))
cache = PagedKVCache(
    1, HEADS, HEAD_DIM, FRAME_TOKENS, num_blocks=64, backend=attend.backend, dtype=torch.float32, device="cpu",
    action_capacity=1, max_frames=4,
)  # fmt: skip
to_qkv = torch.nn.Linear(HEADS * HEAD_DIM, 3 * HEADS * HEAD_DIM).requires_grad_(False)
action_tokens = torch.randn(len(ACTIONS), HEADS * HEAD_DIM)


def forward(chunk: Chunk, frame: torch.Tensor, action: str | None = None) -> torch.Tensor:
    """What the frame's tokens [FRAME_TOKENS, …] take from all that the chunk sees, its action included."""
    tokens = frame if action is None else torch.cat([frame, action_tokens[[ACTIONS.index(action)]]])
    q, k, v = to_qkv(tokens).view(-1, 3, HEADS, HEAD_DIM).unbind(1)
    batch = cache.batch([chunk], extra_tokens=[len(tokens) - FRAME_TOKENS])
    return attend(q.contiguous(), k.contiguous(), v.contiguous(), batch.layer(0))[:FRAME_TOKENS]


players = [cache.open_session(recent_frames=4, max_chunk_frames=1) for _ in range(2)]
for number, actions in enumerate([("left", "left"), ("left", "jump"), ("right", "right"), (None, None)]):
    frame, seen = torch.randn(FRAME_TOKENS, HEADS * HEAD_DIM), []
    for player, action in zip(players, actions, strict=True):
        with player.begin(1) as chunk:
            seen.append(forward(chunk, frame, action))  # a denoising forward: the action steers it
            forward(chunk, frame)  # the committing one: what is kept is the frame alone
            chunk.commit()
    difference = (seen[0] - seen[1]).abs().max().item()
    print(f"frame {number}: {actions[0]} and {actions[1]}: the two differ by {difference:.2g}")
for player in players:
    player.close()
