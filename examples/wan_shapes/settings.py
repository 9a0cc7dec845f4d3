"""Everything a run depends on, in one frozen record that is saved beside its log."""

from dataclasses import asdict, dataclass

Size = tuple[int, int, int]  # frames, height, width in pixels


@dataclass(frozen=True)
class ModelSettings:
    """What every run of this model has in common."""

    seed: int = 0

    vae_base_dim: int = 16
    latent_channels: int = 8
    text_dim: int = 128
    text_layers: int = 2
    heads: int = 4
    head_dim: int = 64
    layers: int = 8
    ffn_dim: int = 1024
    text_slots: int = 48
    text_lengths: tuple[int, ...] = (64, 64, 128, 226, 256, 512)
    weight_decay: float = 0.01

    def as_json(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class Settings(ModelSettings):
    """Defaults are the run that made the shipped weights; `TOY` is the same code in seconds on a CPU."""

    # VAE: first small crops, then larger and longer ones.
    vae_pool_clips: int = 1536  # of each size in `sizes` with 33 frames
    vae_pool_frames: int = 33
    vae_small_crop: Size = (5, 64, 64)
    vae_small_batch: int = 32
    vae_small_steps: int = 5000
    vae_large_crop: Size = (17, 96, 96)
    vae_large_batch: int = 16
    vae_large_steps: int = 2700
    vae_learning_rate: float = 2e-3
    vae_muon_step_size: float = 0.08
    vae_warmup_steps: int = 100
    vae_ema_decay: float = 0.998
    kl_weight: float = 1e-4

    # Latents of clips, encoded once.
    sizes: tuple[tuple[int, int], ...] = ((96, 96), (96, 160), (128, 128))
    size_shares: tuple[float, ...] = (0.46, 0.27, 0.27)
    frame_counts: tuple[int, ...] = (17, 33, 49)
    frame_shares: tuple[float, ...] = (0.25, 0.5, 0.25)
    cached_clips: int = 40960
    clips_per_chunk: int = 128
    captions_per_clip: int = 3
    plain: float = 0.1  # share of clips for the empty caption, in both rounds

    # Transformer and text encoder together.
    tokens_per_step: int = 82944  # 256 clips of 33 frames at 96×96
    transformer_steps: int = 7500
    decay_share: float = 0.35  # of the steps, at the end, over which the learning rate goes to zero
    learning_rate: float = 1e-3
    warmup_steps: int = 200
    ema_decay: float = 0.999
    dropped_captions: float = 0.1  # share of clips, in both rounds
    shorter_clips: float = 0.25  # share of steps with the last 8 frames cut off clips that are not the shortest
    # A second, shorter round, on what the first learns last: outlines at every angle.
    refine_clips: int = 20480
    refine_spinning: float = 0.6  # share of shapes that spin, besides those that happen to
    refine_steps: int = 2600
    refine_learning_rate: float = 6e-4
    refine_decay_share: float = 0.8


TOY = Settings(
    vae_base_dim=8,
    text_dim=32,
    text_layers=1,
    heads=2,
    head_dim=32,
    layers=2,
    ffn_dim=64,
    vae_pool_clips=4,
    vae_pool_frames=9,
    vae_small_crop=(5, 32, 32),
    vae_small_batch=2,
    vae_small_steps=3,
    vae_large_steps=2,
    vae_large_crop=(9, 32, 32),
    vae_large_batch=2,
    vae_warmup_steps=2,
    sizes=((32, 32), (32, 48)),
    size_shares=(0.5, 0.5),
    frame_counts=(9, 17),
    frame_shares=(0.5, 0.5),
    cached_clips=16,
    clips_per_chunk=4,
    captions_per_clip=2,
    plain=0.25,
    tokens_per_step=64,
    transformer_steps=8,
    refine_clips=8,
    refine_steps=4,
    warmup_steps=2,
)
