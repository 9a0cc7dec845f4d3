"""Everything a run of the causal model's training depends on, in one frozen record that is saved beside its log."""

from dataclasses import dataclass

from .settings import TOY, ModelSettings


@dataclass(frozen=True)
class CausalSettings(ModelSettings):
    """Defaults are the run that made the shipped weights; `CAUSAL_TOY` is the same code in seconds on a CPU."""

    # A chunk sees itself and the chunks before it within `recent_frames`, all in latent frames.
    frames_per_chunk: int = 3
    recent_frames: int = 12
    chunks: int = 6  # of a clip
    height: int = 96
    width: int = 96

    # Latents of clips, encoded once.
    cached_clips: int = 4096
    clips_per_chunk: int = 64
    captions_per_clip: int = 3
    spinning: float = 0.3  # share of shapes that spin, besides those that happen to
    two_shapes: float = 0.08
    switched: float = 0.35  # share of clips that change on the way
    plain: float = 0.1  # share of clips for the empty prompt

    # Teacher forcing: flow matching of every chunk, with the chunks before it as they are, or nearly so.
    batch: int = 64
    steps: int = 700
    learning_rate: float = 6e-4
    warmup_steps: int = 100
    decay_share: float = 0.7
    ema_decay: float = 0.998
    dropped_captions: float = 0.12  # share of clips that go on under the empty text
    recached: float = 0.25  # share of changed clips whose earlier chunks are read under the later caption
    context_noise: float = 0.15  # the most that a chunk read as context is noised
    noised_contexts: float = 0.4
    own_steps: float = 0.5  # share of steps whose contexts are what the model itself makes of noisy chunks
    own_after: int = 250  # steps, before which what it makes is too far off
    own_contexts: float = 0.7  # share of chunks, in these steps
    own_noise: tuple[float, float] = (0.15, 0.85)

    # Distillation: guidance and a way of many small steps into forwards of one branch at a few noise levels.
    distil_steps: int = 200
    distil_learning_rate: float = 3e-4
    distil_decay_share: float = 0.6
    guidance_scale: float = 4.0
    levels: int = 16  # noise levels of the way that is distilled; a stream's steps are some of them

    # How the exported model is best run.
    stream_steps: int = 4

    @property
    def latent_frames(self) -> int:
        return self.chunks * self.frames_per_chunk

    @property
    def num_frames(self) -> int:
        return 1 + 4 * (self.latent_frames - 1)


_toy = {name: getattr(TOY, name) for name in ModelSettings.__dataclass_fields__}
CAUSAL_TOY = CausalSettings(
    **_toy,
    frames_per_chunk=2,
    recent_frames=4,
    chunks=3,
    height=32,
    width=32,
    cached_clips=16,
    clips_per_chunk=8,
    captions_per_clip=2,
    batch=3,
    steps=6,
    warmup_steps=2,
    own_after=2,
    distil_steps=3,
    levels=4,
    stream_steps=2,
)
