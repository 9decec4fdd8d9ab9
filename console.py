"""What a script shows its user: bad input as one line, streams that outlast their reader, flags and help.

Out of scope: what the flags mean (settings.py, finetune.py, infer.py).
"""

import argparse
import contextlib
import os
import re
import signal
import sys
import textwrap

import torch.distributed as dist

from common import InputError


class Output:
    """A text stream that outlasts its reader: what cannot be written is lost, or an OSError if is_needed."""
    def __init__(self, stream, is_needed=False):
        self.stream, self.is_needed = stream or open(os.devnull, "w"), is_needed  # None: the shell closed it

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:  # from here on all goes nowhere, what is still in the buffer too
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self.stream.fileno())
            if self.is_needed:
                raise


@contextlib.contextmanager
def exit_on_bad_input(script, needs_output=False, hint=""):
    """Print bad input as one line and exit with code 2, after Ctrl-C a hint and 130. Wrap a main() in it.

    Bad input is an InputError, an OSError or a size that exceeds the memory. In the block stdin takes any
    bytes and stdout any text; a stdout that cannot be written ends only a script that needs_output.
    """
    sys.stdin, out = sys.stdin or open(os.devnull), Output(sys.stdout, needs_output)
    with contextlib.suppress(AttributeError):  # a notebook's cannot
        out.reconfigure(errors="backslashreplace")
        sys.stdin.reconfigure(errors="replace")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(Output(sys.stderr)):
        try:
            yield
        except (InputError, OSError, MemoryError, RuntimeError, KeyboardInterrupt) as error:
            reason, code = " ".join((str(error) or type(error).__name__).split()), 2
            is_known = re.search("allocate|out of memory|overflowed|gloo", reason)  # gloo: another rank ended
            if isinstance(error, RuntimeError) and not is_known:
                raise
            if isinstance(error, KeyboardInterrupt):
                reason, code = f"Interrupted. {hint}".strip(), 130
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process is ending: once is enough
            print(f"{script}: {reason}", file=sys.stderr)
            raise SystemExit(code) from None
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@contextlib.contextmanager
def blame_input(source=""):
    """Raise a plain ValueError of the block as InputError: the user's `source`, a flag or file, caused it."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{source}: {error}" if source else str(error)) from error


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keep the line breaks of descriptions, and print every default that is a value."""

    def _get_help_string(self, action):
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def at_least(minimum, kind=int, maximum=None):
    """Return an argparse type: a number of kind from minimum to maximum; default: 2^31 - 1, of float 1e38."""
    def number(text):
        last = maximum or (2**31 - 1 if kind is int else 1e38)
        with contextlib.suppress(ValueError):
            if minimum <= kind(text) <= last:  # NaN is not
                return kind(text)
        raise argparse.ArgumentTypeError(f"expected {kind.__name__} from {minimum} to {last}, got {text}")
    return number


def wrap(text):
    """Return text in lines of 80 columns, all but the first indented."""
    return textwrap.fill(text, 80, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def add_device_flags(flag):
    """Add --device, --dtype and --compile by flag, the add_argument of an argparse group."""
    flag("--device", default="auto", metavar="NAME", help="cpu, cuda, or auto: CUDA if present")
    flag("--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
         help="dtype of matrix products; auto: bfloat16 where the device has it in hardware")
    flag("--compile", action=argparse.BooleanOptionalAction,
         help="compile the encoder with torch.compile (default: on CUDA only)")
