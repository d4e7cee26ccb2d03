"""The command line: `dash-attn plan`, `demo` and the other commands. Bad input is one line on stderr and exit code 2."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..viewing.words import complaint
from . import bench, calibrate, demo, diff, doctor, explore, plan, verify
from .parser import Parser

BAD_INPUT = 2
COMMANDS: tuple[Any, ...] = (plan, explore, demo, bench, calibrate, doctor, verify, diff)


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    for name in ("stdout", "stderr"):  # None where it was closed (`>&-`): what we say then goes nowhere
        setattr(sys, name, getattr(sys, name) or open(os.devnull, "w"))  # noqa: SIM115 (as long as the process)
    parser = _parser()
    if not words:
        parser.print_help(sys.stderr)
        return BAD_INPUT
    try:
        arguments = parser.parse_args(words)
    except ValueError as error:
        as_json = words[0] == "diff" and "--json" in words
        return diff.print_error(str(error)) if as_json else _complain(str(error))
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of our output has gone (`| head`): not an error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except (MemoryError, OverflowError, ValueError, OSError, NotImplementedError) as error:  # the last: what a backend cannot do yet
        return _complain(complaint(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in ("matplotlib", "rich", "PIL"):
            raise
        return _complain(f"this needs {package}: pip install 'dash-attn[cli]'")


def _complain(message: str) -> int:
    print(f"dash-attn: error: {message}", file=sys.stderr)
    return BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="dash-attn", description="Schedules for bitwise reproducible attention training.")
    parser.add_argument("--version", action="version", version=f"dash-attn {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        _add_command(commands, command)
    return parser


def _add_command(commands: Any, command: Any) -> None:
    """A module of this folder: its name, HELP and TEXT, perhaps EXAMPLES; `add_arguments` and `run`. Several lines are not wrapped anew."""
    texts = command.TEXT, getattr(command, "EXAMPLES", None)
    layout = argparse.RawDescriptionHelpFormatter if "\n" in "".join(filter(None, texts)) else argparse.HelpFormatter
    name = command.__name__.rpartition(".")[2]
    parser = commands.add_parser(name, help=command.HELP, description=texts[0], epilog=texts[1], formatter_class=layout)
    command.add_arguments(parser)
    parser.set_defaults(run=command.run)


if __name__ == "__main__":
    sys.exit(main())
