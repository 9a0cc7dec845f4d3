"""Actions: tokens that the frames of a chunk see, and that are never kept. Run: python examples/act.py

Two players begin in one world; one of them acts. The embedding of the actions is random and was never trained, nor was
the layer that reads what comes out for them: an action changes the video a little, but it does not steer it yet. For
that, both must be trained together with the model. A difference of 1 is rounding: tokens lie elsewhere in the batch.
"""

import sys

import numpy as np
import torch

from visual_gen import FrameStream, StreamEngine, load_config
from visual_gen.runtime.video import VideoWriter

ACTIONS = ["left", "right", "jump"]
engine = StreamEngine.from_pretrained(
    sys.argv[1] if len(sys.argv) > 1 else "wan-shapes-causal",
    causal=load_config("configs/wan_shapes_stream.yaml").causal,
    height=96,
    width=96,
    max_sequence_length=64,
    max_streams=2,
    action_capacity=2,  # tokens that a stream may have beside those of its frames
)
hidden_size = engine.transformer.config.hidden_size
torch.manual_seed(0)
embed, to_reward = torch.nn.Embedding(len(ACTIONS), hidden_size), torch.nn.Linear(hidden_size, 1)

prompt = "a red circle moving right on a navy background"
idle, player = (FrameStream(engine, engine.open(prompt, seed=0), engine.vae) for _ in range(2))
with VideoWriter("outputs/act-idle.mp4", fps=16) as idle_video, VideoWriter("outputs/act.mp4", fps=16) as video:
    for actions in ([], ["left"], ["right", "jump"], []):
        tokens = embed(torch.tensor([ACTIONS.index(action) for action in actions])) if actions else None
        player.stream.set_extra(tokens)
        engine.step(until="chunk")
        # Of the chunk's last denoising forward: [branches, actions, hidden_size].
        rewards = to_reward(player.stream.extra_output[0]).flatten().tolist() if actions else []
        (theirs,), (frames,) = idle.take(), player.take()
        idle_video.append(theirs)
        video.append(frames)
        difference = np.abs(frames.astype(int) - theirs).max()
        told = ", ".join(f"{action} {reward:.2f}" for action, reward in zip(actions, rewards, strict=True))
        print(f"rewards: {told or 'none'}; the videos differ by up to {difference} of 255")
engine.close()
