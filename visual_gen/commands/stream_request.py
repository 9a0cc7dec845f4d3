"""What one call of `visual-gen stream` asks for: its settings, videos and prompt switches, all checked."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from pathlib import Path

from visual_gen.commands.generate import output_files
from visual_gen.commands.settings import config_from_arguments
from visual_gen.config import ConfigError, RunConfig, StreamConfig, check_stream_settings, check_unicode
from visual_gen.runtime.files import expanded


@dataclass(frozen=True)
class StreamRequest:
    """config: with all prompts, one for each video. files: the video of each. switches: chunk → prompt."""

    config: RunConfig
    stream: StreamConfig
    files: list[Path]
    switches: dict[int, str]

    @property
    def latent_frames(self) -> int:
        """Of each video."""
        return self.config.causal.frames_after(self.stream.chunks)


def stream_request(arguments: argparse.Namespace) -> StreamRequest:
    """Raises ConfigError, ValueError and OSError on whatever is wrong, with nothing loaded or written."""
    if arguments.prompts is not None:
        if arguments.prompt is not None:
            raise ConfigError(f"--prompts {arguments.prompts} and --prompt: give one of the two")
        arguments.prompt = read_prompts(arguments.prompts)
    config = config_from_arguments(arguments)
    check_stream_settings(config)
    stream = config.stream or StreamConfig()
    switches = parse_switches(arguments.switches, stream.chunks)
    prompts = prompts_of_sessions(config.generation.prompts, arguments.sessions)
    if prompts:
        config = config.model_copy(
            update={"generation": config.generation.model_copy(update={"prompt": prompts}), "stream": stream}
        )
    return StreamRequest(config, stream, output_files(config), switches)


def prompts_of_sessions(prompts: tuple[str, ...], sessions: int | None) -> tuple[str, ...]:
    """A prompt for each session; the prompts come round again where there are more sessions."""
    if sessions is None or not prompts:
        return prompts
    if sessions < len(prompts):
        least = f"at least the {len(prompts)} prompts that there are" if sessions > 0 else "at least 1"
        raise ConfigError(f"--sessions {sessions}: wants {least}")
    return tuple(itertools.islice(itertools.cycle(prompts), sessions))


def read_prompts(name: str) -> list[str]:
    """The lines of a UTF-8 text file, empty ones left out."""
    path = expanded(name)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts {name}: is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise type(error)(f"--prompts {name}: cannot be read ({error.strerror})") from None
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts {name}: has no prompt in it; write one on each line")
    return prompts


def parse_switches(texts: list[str], chunks: int) -> dict[int, str]:
    """chunk → prompt of "6:a blue square" and the like; the chunks are some that a stream of so many has."""
    switches: dict[int, str] = {}
    for text in texts:
        number, colon, prompt = text.partition(":")
        chunk = int(number) if number.strip().isascii() and number.strip().isdigit() else None
        if not colon or chunk is None or not prompt.strip():
            raise ConfigError(f'--switch {text}: wants CHUNK:TEXT, for example --switch 6:"a blue square moving up"')
        check_unicode("--switch", prompt)
        if chunk == 0:
            raise ConfigError(f"--switch {text}: chunk 0 has the prompt itself; the first switch can be at chunk 1")
        if chunk >= chunks:
            raise ConfigError(f"--switch {text}: there is no chunk {chunk}; the last of {chunks} is {chunks - 1}")
        if chunk in switches:
            raise ConfigError(f"--switch {text}: chunk {chunk} has a switch already, to {switches[chunk]!r}")
        switches[chunk] = prompt.strip()
    return dict(sorted(switches.items()))
