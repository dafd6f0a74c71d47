"""The command line: `jserve serve | generate | chat | convert | lang | bench`.

Owns argument parsing, the terminal and exit codes (2: a configuration that cannot work, in one
line; 1: a request or engine that failed; 130: interrupted). Flags come from config/; what they do
is the business of server and engine, which are imported only by the command that needs them.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from jserve import __version__
from jserve.bench import arguments
from jserve.config import Config, add_arguments, unknown_option
from jserve.engine.ranges import INT32_MAX, check_ranges
from jserve.engine.syntax import NAMES, syntax_fields
from jserve.errors import ConfigError, JserveError, RequestError
from jserve.tokenizer.stop_regex import check_stop_regexes
from jserve.types import GenerateRequest, Output, SamplingParams


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        parser = _parser()
        if not (sys.argv[1:] if argv is None else argv):
            parser.print_help(sys.stderr)
            return 2
        parsed, unknown = parser.parse_known_args(argv)
        if unknown:
            raise ConfigError(_unknown_argument(unknown[0]))
        parsed.command(parsed)
    except ConfigError as error:
        print(f"jserve: error: {_in_one_line(error)}", file=sys.stderr)
        return 2
    except JserveError as error:
        print(f"jserve: {_in_one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


class Generator(Protocol):
    """What the terminal commands need of `jserve.Engine`."""

    @property
    def tokenizer(self) -> Any: ...

    def generate_stream(self, request: GenerateRequest, /) -> AsyncIterator[Output]: ...


def print_stream(engine: Generator, request: GenerateRequest) -> str:
    """Print the text of one request as it comes, end the line, and return the whole."""

    async def stream() -> str:
        text = ""
        async for output in engine.generate_stream(request):
            print(output.delta, end="", flush=True)
            text = output.text
            if output.finish is not None and output.finish.type == "abort":
                raise JserveError(output.finish.message or "the request was aborted")
        print(flush=True)
        return text

    return asyncio.run(stream())


def chat_loop(engine: Generator, lines: Iterable[str], sampling: SamplingParams) -> None:
    """Answer each line with the conversation so far in mind, until the lines end."""
    messages: list[dict[str, str]] = []
    for line in lines:
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        prompt_ids = engine.tokenizer.apply_chat_template(messages)
        request = GenerateRequest(sampling=sampling, input_ids=prompt_ids, stream=True)
        messages.append({"role": "assistant", "content": print_stream(engine, request)})


def _config(parsed: argparse.Namespace) -> Config:
    """The engine's options among the parsed flags."""
    given = parsed.positional_model
    if given is not None:
        flag = vars(parsed).get("model_path", given)
        if flag != given:
            raise ConfigError(f"the model is {given}, but --model-path {flag}; give one of them")
        parsed.model_path = given
    return Config.from_namespace(parsed)


def _serve(parsed: argparse.Namespace) -> None:
    from jserve.server.app import serve

    serve(_config(parsed))


def _generate(parsed: argparse.Namespace) -> None:
    from jserve.engine.engine import Engine

    config = _config(parsed)
    sampling = _sampling(parsed, max_new_tokens=128)
    with Engine.from_config(config) as engine:
        print_stream(engine, GenerateRequest(sampling=sampling, text=parsed.prompt, stream=True))


def _chat(parsed: argparse.Namespace) -> None:
    from jserve.engine.engine import Engine

    config, sampling = _config(parsed), _sampling(parsed, max_new_tokens=None)
    with Engine.from_config(config) as engine:
        if not engine.tokenizer.has_chat_template:
            raise ConfigError(
                f"--model-path {config.model.model_path} has no chat template; give one with "
                "--chat-template, or use `jserve generate`"
            )
        chat_loop(engine, _terminal_lines(), sampling)


def _convert(parsed: argparse.Namespace) -> None:
    from jserve.engine.convert import convert

    names = ("model_path", "revision", "tokenizer_path", "chat_template")
    config = Config.from_flags(**{name: getattr(parsed, name) for name in names})
    written = convert(config.model, Path(parsed.folder).expanduser(), _show_progress)
    print(f"{written} tensors; serve them with: jserve serve {parsed.folder}")


def _explain(parsed: argparse.Namespace) -> None:
    from jserve.lang.command import explain

    explain(parsed)


def _bench(parsed: argparse.Namespace) -> None:
    from jserve.bench.commands import COMMANDS

    run = COMMANDS[parsed.benchmark]
    if parsed.benchmark == "serving":
        run(parsed)
    else:
        run(parsed, _config(parsed))


def _show_progress(done: int, total: int) -> None:
    """On a line of its own that a person sees grow."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r{done} of {total} tensors", end=end, file=sys.stderr, flush=True)


def _terminal_lines() -> Iterable[str]:
    """Lines of standard input, asked for with a prompt when a person types them."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    print("Ctrl-D ends the chat.", file=sys.stderr)
    while True:
        try:
            yield input("> ")
        except EOFError:
            return


class _Parser(argparse.ArgumentParser):
    """One line for an error, and no abbreviated flags."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_formatter, **settings)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=32, width=100)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="jserve",
        description="Serve open language models on TPU, GPU and CPU.",
    )
    parser.add_argument("--version", action="version", version=f"jserve {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serve = _add_command(
        commands, "serve", "answer HTTP requests (OpenAI's and SGLang's API)", _serve
    )
    add_arguments(serve)
    generate = _add_command(commands, "generate", "continue one prompt", _generate)
    generate.add_argument("--prompt", required=True, metavar="TEXT", help="what to continue")
    chat = _add_command(commands, "chat", "talk with the model in the terminal", _chat)
    for command in (generate, chat):
        _add_sampling(command)
        add_arguments(command, skip=("server",))
        command.set_defaults(log_level="error")
    _add_convert(commands)
    about = "programs in the frontend language"
    lang = commands.add_parser("lang", help=about, description="See docs/language.md.")
    _add_explain(lang.add_subparsers(title="commands", metavar="COMMAND", required=True))
    bench = commands.add_parser("bench", help="measure speed", description="Measure speed.")
    _add_benchmarks(bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True))
    return parser


def _add_convert(commands: Any) -> None:
    about = "write a model as an Orbax checkpoint, with all that serving it needs"
    convert = commands.add_parser("convert", help=about, description=about)
    convert.add_argument("model_path", metavar="MODEL", help="what --model-path takes elsewhere")
    convert.add_argument("folder", metavar="FOLDER", help="a new one, or empty")
    convert.add_argument("--revision", metavar="TEXT", help="branch, tag or commit on the hub")
    convert.add_argument(
        "--tokenizer-path", metavar="TEXT", help="directory or hub id [the model's]"
    )
    convert.add_argument("--chat-template", metavar="TEXT", help="Jinja file or text [the model's]")
    convert.set_defaults(command=_convert)


def _add_explain(commands: Any) -> None:
    about = "show a program's tree: constant text, generations, branches, constraints"
    explain = commands.add_parser("explain", help=about, description=about)
    explain.add_argument("file", metavar="PROGRAM.PY", help="a file that defines programs")
    explain.set_defaults(command=_explain)
    text, integer, number = {"metavar": "TEXT"}, {"metavar": "INT"}, {"metavar": "FLOAT"}
    explain.add_argument("--function", help="which of them [the only one]", **text)
    explain.add_argument("--args", default="{}", help="arguments by name, as JSON", **text)
    explain.add_argument("--url", help="run it there, show what was reused and computed", **text)
    explain.add_argument("--api-key", help="of that server", **text)
    explain.add_argument("--max-new-tokens", type=int, default=64, help="of a run [64]", **integer)
    explain.add_argument("--temperature", type=float, default=0.0, help="of a run [0]", **number)
    explain.add_argument("--html", help="write the picture as a page, too", metavar="FILE")


def _add_benchmarks(benchmarks: Any) -> None:
    for name, (about, add_flags) in arguments.BENCHMARKS.items():
        if name == "serving":  # of a server that runs already: no flags of an engine
            command = benchmarks.add_parser(name, help=about, description=about)
            command.set_defaults(command=_bench)
        else:
            command = _add_command(benchmarks, f"{name}", about, _bench, "bench ")
        command.set_defaults(benchmark=name)
        add_flags(command)
        if name != "serving":
            add_arguments(command, skip=("server",))
            command.set_defaults(log_level="error")


def _add_command(
    commands: Any, name: str, about: str, run: Any, group: str = ""
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=about, description=about, usage=f"jserve {group}{name} MODEL [flags]"
    )
    command.add_argument(
        "positional_model", nargs="?", metavar="MODEL", help="the same as --model-path"
    )
    command.set_defaults(command=run)
    return command


def _in_one_line(error: JserveError) -> str:
    """A value that it repeats may hold anything."""
    return "\\n".join(str(error).splitlines())


def _unknown_argument(argument: str) -> str:
    if not argument.startswith("--"):
        return f"unexpected argument {argument}"
    name = argument.removeprefix("--").partition("=")[0].replace("-", "_")
    return unknown_option(name, [flag.name for flag in _SAMPLING])


@dataclasses.dataclass(frozen=True, slots=True)
class _SamplingFlag:
    name: str
    kind: type
    about: str


_SAMPLING = (
    _SamplingFlag("max_new_tokens", int, "longest answer"),
    _SamplingFlag("temperature", float, "0: the likeliest token [0]"),
    _SamplingFlag("top_p", float, "draw from this much probability [1]"),
    _SamplingFlag("top_k", int, "draw from so many tokens; -1: all [-1]"),
    _SamplingFlag("min_p", float, "least probability, relative to the likeliest [0]"),
    _SamplingFlag("frequency_penalty", float, "for each time a token was generated [0]"),
    _SamplingFlag("presence_penalty", float, "for tokens that were generated [0]"),
    _SamplingFlag("repetition_penalty", float, "divides logits of generated tokens [1]"),
    _SamplingFlag("sampling_seed", int, "the same seed draws the same text [random]"),
)


_SYNTAX = {
    "--json-schema": "a JSON schema",
    "--regex": "a regular expression that the whole answer matches",
    "--ebnf": "a grammar with the rule root",
    "--structural-tag": "free text with tagged JSON in it, as JSON",
}


def _text(given: Any) -> Any:
    """A flag's value, read from the file that it names after an @."""
    if not isinstance(given, str) or not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{given[1:]} cannot be read: {error}") from error


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for flag in _SAMPLING:
        group.add_argument(
            "--" + flag.name.replace("_", "-"),
            type=flag.kind,
            metavar=flag.kind.__name__.upper(),
            help=flag.about,
        )
    for flag, what in (("--stop", "TEXT"), ("--stop-regex", "REGEX")):
        group.add_argument(flag, action="append", metavar=what, help="end there; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end token")
    group = parser.add_argument_group("syntax of the answer, one of")
    for flag, about in _SYNTAX.items():
        group.add_argument(flag, metavar="TEXT", help=f"{about}; @FILE reads it from there")
    group.add_argument("--choices", action="append", metavar="TEXT", help="one of these; repeat it")
    group.add_argument("--json-object", action="store_true", help="any JSON object")


def _sampling(parsed: argparse.Namespace, max_new_tokens: int | None) -> SamplingParams:
    """The sampling flags that were given, over greedy decoding of up to `max_new_tokens`."""
    flags = vars(parsed)
    given = {flag.name: flags[flag.name] for flag in _SAMPLING if flags[flag.name] is not None}
    defaults = {"max_new_tokens": max_new_tokens, "temperature": 0.0}
    syntax = {name: _text(flags[name]) for name in NAMES}
    try:  # before a model is loaded; of which no range here depends
        sampling = SamplingParams(
            **defaults | given,
            **syntax_fields(syntax),
            stop=tuple(parsed.stop or ()),
            stop_regex=tuple(parsed.stop_regex or ()),
            ignore_eos=parsed.ignore_eos,
        )
        check_ranges(sampling, INT32_MAX)
        check_stop_regexes(sampling.stop_regex)
    except RequestError as error:
        flag = "" if error.param is None else f"--{error.param.replace('_', '-')}: "
        raise ConfigError(f"{flag}{error}") from None
    return sampling


if __name__ == "__main__":
    sys.exit(main())
