"""LoRA files on a pipeline's transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from visual_gen.checkpoint import CONFIG_FILES, resolve_folder
from visual_gen.config import LoRAConfig
from visual_gen.models.wan import WanConfig, WanTransformer
from visual_gen.models.wan.lora_file import LoRAFile
from visual_gen.pipelines.experts import Experts


class LoRAMethods:
    """load_lora and what follows it, for a pipeline with `experts`."""

    experts: Experts

    def load_lora(
        self, path: str | Path, *, name: str | None = None, scale: float = 1.0, transformer: str = "transformer"
    ) -> str:
        """Adds a LoRA file in any of the styles that models.wan.lora_file reads, and returns its name, the file's where
        none is given. transformer: "transformer", or "transformer_2", Wan 2.2's expert for low noise.

        Raises ValueError, before anything is changed, on a file that does not fit, naming every key, and on a name that
        this transformer has loaded already.
        """
        found = self._lora_transformers()
        if transformer not in found:
            raise ValueError(f"this pipeline has no {transformer!r}; it has {', '.join(found)}")
        # On the device, where its additions then stay, also while the weights rest in host memory.
        with self.experts.use(list(found).index(transformer)) as model:
            return model.load_lora(path, name=name, scale=scale)

    def set_lora_scale(self, name: str, scale: float) -> None:
        """Changes the scale of a loaded LoRA, on every transformer that has one of this name."""
        for transformer in self._having(name):
            transformer.set_lora_scale(name, scale)

    def unload_lora(self, name: str | None = None) -> None:
        """Takes a LoRA off again, or all of them; the weights are then what they were, bit for bit."""
        for transformer in self._lora_transformers().values() if name is None else self._having(name):
            transformer.unload_lora(name)

    def fuse_lora(self) -> None:
        """Adds everything that is loaded to the weights, for good."""
        transformers = self.experts.transformers
        loaded = [index for index, transformer in enumerate(transformers) if transformer.lora_scales]
        if not loaded:
            raise ValueError("no LoRA is loaded: load_lora first")
        for index in loaded:
            with self.experts.use(index) as transformer:
                transformer.fuse_lora()

    @property
    def lora_scales(self) -> dict[str, dict[str, float]]:
        """The scales of what is loaded, by name, of each transformer that has any."""
        found = {key: transformer.lora_scales for key, transformer in self._lora_transformers().items()}
        return {key: scales for key, scales in found.items() if scales}

    def _lora_transformers(self) -> dict[str, WanTransformer]:
        return dict(zip(("transformer", "transformer_2"), self.experts.transformers, strict=False))

    def _having(self, name: str) -> list[WanTransformer]:
        transformers = self._lora_transformers().values()
        found = [transformer for transformer in transformers if name in transformer.lora_scales]
        if not found:
            loaded = sorted({one for transformer in transformers for one in transformer.lora_scales})
            raise ValueError(f"no LoRA {name!r} is loaded; loaded are {', '.join(map(repr, loaded)) or 'none'}")
        return found


def check_loras(folder_or_id: str | Path, loras: Sequence[LoRAConfig]) -> None:
    """Raise the ValueError that loading `loras` into the model of this folder would raise, without its weights."""
    models: dict[str, WanTransformer] = {}
    for lora in loras:
        if lora.transformer not in models:
            folder = resolve_folder(folder_or_id, files=CONFIG_FILES)
            config = WanConfig.from_folder(folder / lora.transformer)
            models[lora.transformer] = WanTransformer(config, init_weights=False)
        LoRAFile.open(lora.file, models[lora.transformer])
