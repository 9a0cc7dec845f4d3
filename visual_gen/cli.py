"""The `visual-gen` command: arguments in, exit codes out.

Exit codes: 0 done, 1 the run failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from visual_gen.version import __version__


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="visual-gen", description="Video generation with Wan on a choice of attention backends.")
    parser.add_argument("--version", action="version", version=f"visual-gen {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    generate = _command(commands, "generate", "make a video from a prompt, with a report beside it")
    _config_arguments(generate)
    _image_arguments(generate)
    _output_arguments(generate)

    stream = _command(commands, "stream", "make videos of any length, chunk by chunk, many at once, with a report")
    _config_arguments(stream)
    _stream_arguments(stream)

    plan = _command(commands, "plan", "what a configuration costs, without loading weights")
    _config_arguments(plan)
    _image_arguments(plan)
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")
    plan.add_argument(
        "--text-lens",
        type=int,
        nargs="+",
        metavar="N",
        help="text tokens of each row, end token included: those of the prompts, then of the negative prompt",
    )

    plan.add_argument(
        "--memory-gib", type=_positive, metavar="GIB", help="memory of the device, for how many causal streams fit"
    )

    warmup = _command(commands, "warmup", "compile the attention kernels that a configuration will call")
    _config_arguments(warmup)
    _image_arguments(warmup)
    warmup.add_argument("--json", action="store_true", help="print JSON instead of a table")

    convert = _command(commands, "convert", "write a checkpoint of Wan's authors as a diffusers folder")
    convert.add_argument("source", metavar="SOURCE", help="the authors' folder, or a .pt file of a distilled model")
    convert.add_argument("dest", metavar="DEST", help="the folder to write, which there must not be yet")
    convert.add_argument(
        "--base", metavar="FOLDER", help="for a .pt file: the folder whose settings and other parts go with it"
    )
    convert.add_argument(
        "--state-dict", metavar="KEY", help="for a .pt file: which weights in it; otherwise generator_ema, or generator"
    )
    convert.add_argument(
        "--max-shard-gb", type=_positive, default=5.0, metavar="GB", help="largest weight file (10^9 bytes; default 5)"
    )

    backends = _command(commands, "backends", "which attention backends are here, and why the others are not")
    backends.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def _command(commands, name: str, summary: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return command


def _config_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", required=True, metavar="FILE", help="YAML settings; configs/ has some")
    command.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="what to show; given several times, all clips are made in one batch and numbered FILE-0.mp4, …",
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
        help="replace one setting, for example --set generation.num_frames=33",
    )


def _image_arguments(command: argparse.ArgumentParser) -> None:
    for option, end in (("--image", "starts"), ("--last-image", "ends")):
        command.add_argument(
            option,
            action="append",
            metavar="FILE",
            help=f"the picture that the video {end} with, for models that take one; for all prompts, or one for each",
        )


def _output_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--output", metavar="FILE.mp4", help="where the video goes (output.path); replaced if there")
    command.add_argument("--seed", type=int, metavar="N", help="generation.seed; prompt i is made from seed + i")


def _stream_arguments(command: argparse.ArgumentParser) -> None:
    _output_arguments(command)
    command.add_argument("--chunks", type=int, metavar="N", help="stream.chunks: how many chunks each video has")
    command.add_argument("--prompts", metavar="FILE", help="a text file of prompts, one on each line")
    command.add_argument(
        "--sessions", type=int, metavar="N", help="how many videos; above the number of prompts, these come round again"
    )
    command.add_argument(
        "--switch",
        action="append",
        default=[],
        dest="switches",
        metavar="CHUNK:TEXT",
        help="another prompt from that chunk on, counted from 0, in all videos; may be repeated",
    )
    command.add_argument(
        "--recache", metavar="HOW", help="stream.recache: none, or window: what is seen is computed anew at a switch"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(format="visual-gen: %(message)s")  # warnings and worse, on stderr
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("visual-gen: interrupted; nothing half-written was left", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output (head, say) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if arguments.debug:
            traceback.print_exc()
        bad_input = isinstance(error, ValueError | OSError)
        kind = "" if bad_input else f"{type(error).__name__}: "
        for line in str(error).splitlines() or ["no message"]:
            print(f"visual-gen: error: {kind}{line}", file=sys.stderr)
        if not bad_input and not arguments.debug:
            print("visual-gen: --debug shows where it happened", file=sys.stderr)
        return 2 if bad_input else 1


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "generate":
        from visual_gen.commands import generate as command
    elif arguments.command == "stream":
        from visual_gen.commands import stream as command
    elif arguments.command == "plan":
        from visual_gen.commands import plan as command
    elif arguments.command == "warmup":
        from visual_gen.commands import warmup as command
    elif arguments.command == "convert":
        from visual_gen.commands import convert as command
    else:
        from visual_gen.commands import backends as command
    command.run(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
