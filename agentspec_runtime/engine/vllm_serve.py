"""vLLM's own `serve` command: its parser, and what it runs. Importing this imports vLLM (ten seconds)."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final, cast

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.logger import configure_logging_from_args
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

__all__ = ["VllmServe"]

_NO_MODEL: Final = "no-model-named"


class VllmServe:
    """The `serve` subcommand, as `vllm.entrypoints.cli.main` would set it up."""

    def __init__(self) -> None:
        # The same as that main does first; forked workers are not safe with every accelerator.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        self._command = ServeSubcommand()

    def given(self, arguments: Sequence[str]) -> dict[str, object]:
        """Only what the arguments (and a YAML file they name) set, by vLLM's own names."""
        parser, _ = self._parser_without_defaults
        # vLLM insists on a model here; whether the user named one is what we want to know.
        named = _names_model(arguments)
        namespace = parser.parse_args(["serve", *([] if named else [_NO_MODEL]), *arguments])
        found: dict[str, object] = vars(namespace)
        del found["subparser"]
        if not named:
            del found["model_tag"]
        return found

    def without(self, arguments: Sequence[str], dests: Sequence[str]) -> list[str]:
        """The arguments less those that set one of `dests`, each of which takes one value."""
        _, serve_parser = self._parser
        flags = {
            flag
            for action in serve_parser._actions  # noqa: SLF001 - as above
            if action.dest in dests
            for flag in action.option_strings
        }
        kept: list[str] = []
        skip = False
        for argument in arguments:
            if skip:
                skip = False
                continue
            name, equals, _ = argument.partition("=")
            stem = name.split(".", 1)[0]
            if stem.startswith("--"):
                stem = "--" + stem[2:].replace("_", "-")
            if stem in flags:
                skip = not equals
            else:
                kept.append(argument)
        return kept

    def batch_limits(self, given: Mapping[str, object]) -> tuple[int, int]:
        """Tokens and requests that a step may have at most, vLLM's defaults where nothing is given."""
        workers = [given.get(f"{kind}_parallel_size", 1) for kind in ("pipeline", "tensor")]
        defaults = EngineArgs.get_batch_defaults(math.prod(int(str(size)) for size in workers))
        names = ("max_num_batched_tokens", "max_num_seqs")
        tokens, requests = (
            int(str(given.get(name) or of[UsageContext.OPENAI_API_SERVER]))
            for name, of in zip(names, defaults, strict=True)
        )
        return tokens, requests

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """All settings, with vLLM's defaults."""
        parser, _ = self._parser
        return cast("argparse.Namespace", parser.parse_args(["serve", *arguments]))

    def check(self, parsed: argparse.Namespace) -> None:
        """Set up vLLM's logging, and let vLLM refuse what it can refuse now."""
        configure_logging_from_args(parsed)
        self._command.validate(parsed)

    def run(self, parsed: argparse.Namespace) -> None:
        """Serve until told to stop."""
        self._command.cmd(parsed)

    @cached_property
    def _parser(self) -> tuple[FlexibleArgumentParser, FlexibleArgumentParser]:
        """The parser of `vllm` and, in it, that of `vllm serve`."""
        parser = FlexibleArgumentParser(prog="agentspec serve [MODEL] [own options] --")
        subparsers = parser.add_subparsers(dest="subparser")
        return parser, self._command.subparser_init(subparsers)

    @cached_property
    def _parser_without_defaults(self) -> tuple[FlexibleArgumentParser, FlexibleArgumentParser]:
        parser, serve_parser = VllmServe()._parser  # noqa: SLF001 - another one of this class
        for action in serve_parser._actions:  # noqa: SLF001 - argparse has no public way to list them
            action.default = argparse.SUPPRESS
        return parser, serve_parser


def _names_model(arguments: Sequence[str]) -> bool:
    """Whether a model stands first, as vLLM wants it, or after its deprecated `--model`."""
    if arguments and not arguments[0].startswith("-"):
        return True
    return any(argument == "--model" or argument.startswith("--model=") for argument in arguments)
