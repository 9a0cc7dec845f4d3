"""What a member of the Wan family makes its videos from, beside noise and text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from visual_gen.checkpoint import CheckpointError
from visual_gen.models.wan.config import WanConfig

Need = Literal["no", "optional", "required"]


@dataclass(frozen=True)
class Task:
    """The images that a checkpoint takes, and how their latents enter its transformer.

    condition: None, not at all; "channels", beside the noise, with a mask of the frames that are given; "first_frame",
    in place of the first latent frame, whose tokens are then at timestep 0.
    """

    condition: Literal["channels", "first_frame"] | None = None
    image: Need = "no"
    last_image: Need = "no"

    @classmethod
    def of(cls, wan: WanConfig, *, timestep_per_token: bool) -> Task:
        """timestep_per_token: model_index.json's expand_timesteps, Wan 2.2 TI2V's way."""
        if timestep_per_token:
            return cls("first_frame", image="optional")
        if wan.in_channels == wan.out_channels:
            return cls()
        if wan.pos_embed_seq_len is not None:
            return cls("channels", image="required", last_image="required")
        # With image tokens it has room for those of one image; without (Wan 2.2) a last image is latents alone.
        return cls("channels", image="required", last_image="optional" if wan.image_dim is None else "no")

    def check_images(self, *, image: bool, last_image: bool) -> None:
        """Raise ValueError unless what is given is what the checkpoint takes."""
        self.refuse_unwanted(image=image, last_image=last_image)
        if self.image == "required" and not image:
            raise ValueError(
                "image is missing: this checkpoint makes a video that starts with a given image; give one (image=, or "
                "--image FILE)"
            )
        if self.last_image == "required" and not last_image:
            raise ValueError(
                "last_image is missing: this checkpoint fills in between a first and a last image; give both "
                "(last_image=, or --last-image FILE)"
            )

    def refuse_unwanted(self, *, image: bool, last_image: bool) -> None:
        """Raise ValueError if an image is given that the checkpoint cannot take."""
        if image and self.image == "no":
            raise ValueError(
                "image is given, but this checkpoint makes videos from text alone: leave it out, or use an "
                "image-to-video checkpoint (Wan2.1 I2V, Wan2.2 I2V A14B, Wan2.2 TI2V 5B)"
            )
        if last_image and self.last_image == "no":
            raise ValueError(
                "last_image is given, but this checkpoint takes none: leave it out, or use one that does (Wan2.1 "
                "FLF2V, Wan2.2 I2V A14B)"
            )


def check_streamable(source: str, task: Task, num_transformers: int) -> None:
    """Raise CheckpointError if the checkpoint that `source` names takes an image or has a second transformer."""
    unlike = "has a second transformer (two experts, as in Wan 2.2 A14B)" if num_transformers > 1 else None
    if task.condition is not None:
        unlike = "is made for image-to-video"
    if unlike is not None:
        raise CheckpointError(
            f"{source} {unlike}: a stream is made from text by one transformer; give a text-to-video checkpoint with "
            "one, trained causally"
        )
