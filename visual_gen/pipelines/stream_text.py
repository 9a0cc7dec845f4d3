"""The texts of many streams in one pool of keys and values, each there once for all streams that show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from visual_gen.models.wan import CausalWanTransformer, PooledText
from visual_gen.pipelines.text import TextRows


@dataclass(eq=False)
class _Text:
    prompt: str | None  # None: given as rows, which nobody else can ask for by name
    rows: TextRows
    users: int = 1


class TextSlots:
    """Slots of a TextPool; one is free again when its last user has given it back.

    encode: a prompt → its one row of text of length text_len; None where prompts come as rows alone.
    """

    def __init__(
        self,
        transformer: CausalWanTransformer,
        slots: int,
        text_len: int,
        encode: Callable[[str], TextRows] | None,
    ) -> None:
        self._transformer, self._encode = transformer, encode
        self._pool = transformer.new_text_pool(slots, text_len)
        self._texts: dict[int, _Text] = {}

    @property
    def used(self) -> int:
        return len(self._texts)

    def rows(self, slots: list[int]) -> PooledText:
        """The text of a batch whose row i reads slots[i]."""
        return self._pool.rows(slots)

    def text(self, slot: int) -> TextRows:
        return self._texts[slot].rows

    def take(self, prompt: str | TextRows) -> int:
        """A slot that holds the K/V of all layers. ValueError, with nothing taken, on a text that cannot be had."""
        if isinstance(prompt, str):
            for slot, text in self._texts.items():
                if text.prompt == prompt:
                    return self.share(slot)
            if self._encode is None:
                raise ValueError(f"the prompt is {prompt!r}, and this engine has no text encoder: give TextRows")
            rows = self._encode(prompt)
        else:
            rows, prompt = prompt, None
        if len(rows.lens) != 1:
            raise ValueError(f"the text has {len(rows.lens)} rows; a stream has one prompt")
        free = next((slot for slot in range(self._pool.slots) if slot not in self._texts), None)
        if free is None:
            raise ValueError(
                f"all {self._pool.slots} text slots are in use by other prompts: close a stream, or make the engine "
                "with more text_slots"
            )
        hidden = rows.hidden[rows.index[0]].to(self._transformer.device)
        self._transformer.write_text(self._pool, free, hidden, rows.lens[0])
        self._texts[free] = _Text(prompt, TextRows(hidden[None].clone(), rows.lens, [0]))
        return free

    def share(self, slot: int) -> int:
        self._texts[slot].users += 1
        return slot

    def keep(self, slots: Sequence[int]) -> None:
        """These, once for each user, are all that is in use."""
        users = Counter(slots)
        self._texts = {slot: replace(text, users=users[slot]) for slot, text in self._texts.items() if slot in users}

    def give(self, *slots: int) -> None:
        for slot in slots:
            text = self._texts[slot]
            text.users -= 1
            if not text.users:
                del self._texts[slot]


def check_text(name: str, prompt: str | TextRows, text_dim: int, text_len: int) -> None:
    """ValueError unless it is a prompt, or one row of text of the model's width and at most text_len."""
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, TextRows):
        raise ValueError(f"{name} is {prompt!r}; it must be a text, or TextRows of one row")
    shape = tuple(prompt.hidden.shape)
    if len(prompt.lens) != 1 or shape[1] > text_len or shape[2] != text_dim:
        raise ValueError(
            f"{name} has {len(prompt.lens)} rows of {shape[1:]}; expected one row of at most {text_len} by {text_dim}"
        )
