"""`jserve lang explain`: from a file with programs to the picture of one.

Owns finding the program, its arguments and a backend for a run; pictures are explain.py's.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from jserve.errors import ConfigError, JserveError
from jserve.lang.backends.endpoint import RuntimeEndpoint
from jserve.lang.explain import as_html, as_text
from jserve.lang.program import SglFunction
from jserve.lang.record import Step
from jserve.lang.settings import global_config


def explain(parsed: argparse.Namespace) -> None:
    """Print the tree of a program; with --url of a run. Raises ConfigError, BackendError, what ends
    the run, and JserveError for a program of which nothing can be known without one."""
    program = _program(Path(parsed.file), parsed.function)
    arguments = _arguments(program, parsed.args)
    if parsed.html is not None:
        _write(parsed.html, "a", "")  # what a run costs is not lost to a wrong path
    if parsed.url:
        steps, prefix_len = _run(program, arguments, parsed)
    else:
        steps, prefix_len = _trace(program, arguments)
    print(as_text(program.__name__, steps, prefix_len), end="")
    if parsed.html is not None:
        _write(parsed.html, "w", as_html(program.__name__, steps, prefix_len))


def _write(path: str, mode: str, page: str) -> None:
    """Raises ConfigError."""
    try:
        with Path(path).open(mode, encoding="utf-8") as file:
            file.write(page)
    except OSError as error:
        raise ConfigError(f"--html {path}: {error.strerror}") from None


def _trace(program: SglFunction, arguments: dict[str, Any]) -> tuple[list[Step], int]:
    """As `_run`, of the program without a model, as far as that goes."""
    traced = _bound(program, arguments).trace()
    if (reason := traced.ended) is not None:
        hint = "" if traced.hung else "; --args gives arguments their values, --url shows a run"
        if traced.steps == [reason]:
            raise JserveError(f"{reason.site}: {reason.text}{hint}")
        print(f"jserve: the picture ends where the trace ended{hint}", file=sys.stderr)
    if not arguments:
        return traced.steps, len(traced.prefix)
    return traced.steps, 0 if traced.hung else len(program.trace().prefix)


def _bound(program: SglFunction, arguments: dict[str, Any]) -> SglFunction:
    """With arguments of whatever name: some are those of `run` itself, too."""
    bound = program.bind_arguments | arguments
    return SglFunction(program.func, bound, program.num_api_spec_tokens)


def _run(
    program: SglFunction, arguments: dict[str, Any], parsed: argparse.Namespace
) -> tuple[list[Step], int]:
    """The steps, and how many characters begin every run."""
    missing = [name for name in program.required if name not in arguments]
    if missing:
        raise ConfigError(f"--args lacks {', '.join(missing)}: a run needs every argument")
    backend = RuntimeEndpoint(parsed.url, api_key=parsed.api_key)
    sampling = {"max_new_tokens": parsed.max_new_tokens, "temperature": parsed.temperature}
    sampling = {name: value for name, value in sampling.items() if name not in program.arg_names}
    try:
        state = _bound(program, arguments).run(backend=backend, **sampling)
        if (error := state.error()) is not None:
            raise error
        return state.steps, len(program.trace(backend=backend).prefix)
    finally:
        backend.shutdown()


def _arguments(program: SglFunction, text: str) -> dict[str, Any]:
    """Those that --args gives. Raises ConfigError."""
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--args is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"--args must be a JSON object, got {text}")
    if unknown := given.keys() - set(program.arg_names):
        known = ", ".join(program.arg_names) or "no arguments"
        raise ConfigError(f"--args: {program.__name__} takes {known}, not {min(unknown)}")
    return given


def _program(path: Path, name: str | None) -> SglFunction:
    """The program of that name, or the only one. Raises ConfigError."""
    defined = _defined(path)
    programs = {key: value for key, value in defined.items() if isinstance(value, SglFunction)}
    known = ", ".join(programs) or "none"
    if name is not None:
        if name not in programs:
            raise ConfigError(f"{path} has no program {name}; it has: {known}")
        return programs[name]
    if len(programs) != 1:
        raise ConfigError(f"{path} has these programs: {known}; choose one with --function")
    return next(iter(programs.values()))


def _defined(path: Path) -> dict[str, Any]:
    """What a file defines when it is imported, as a program of its own folder. Raises ConfigError
    for whatever it raises."""
    before = global_config.default_backend
    sys.path.insert(0, str(path.parent))
    try:
        path.open("rb").close()  # run_path would take a folder for a package
        return runpy.run_path(str(path), run_name="jserve_program")
    except SyntaxError as error:
        where = f"{error.filename or path}:{error.lineno}" if error.lineno else f"{path}"
        raise ConfigError(f"{where}: {error.msg}") from None
    except (Exception, SystemExit) as error:  # of the file's own code: anything
        raise ConfigError(_told(path, error)) from error
    finally:
        sys.path.remove(str(path.parent))
        global_config.default_backend = before


def _told(path: Path, error: BaseException) -> str:
    """In one line, with the file's own line where it came through one."""
    if isinstance(error, OSError) and error.filename == str(path):
        return f"{path}: {error.strerror}"
    own = [at for at in traceback.extract_tb(error.__traceback__) if at.filename == str(path)]
    where = f"{path}:{own[-1].lineno}" if own else f"{path}"
    return f"{where}: {type(error).__name__}: {' '.join(str(error).split())}"
