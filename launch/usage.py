"""Error messages for wrong usage of the command line, one line each: the verb, the wrong text, the expected one or a suggestion, and --help.

Owns the wording. Reads the verbs and their flags from the commands themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import typer

from psgc.diagnostics.spelling import did_you_mean
from psgc.errors import UsageError

# click's UsageError. typer imports the package click or, in newer versions, brings a copy: only its own names lead to the right one.
WRONG_USAGE: Final[Any] = typer.BadParameter.__mro__[1]
Command = Any  # of click


def error_line(error: Any, program: Command, words: Sequence[str]) -> str:
    """The error message for a ``WRONG_USAGE`` of ``program``; the help text if the user gave no verb. words: the command line."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(error.format_message())
    path, command, rest = _asked(program, words)
    fault = _fault(error, command, rest)
    return f"{path}: {fault}{'' if fault.endswith('?') else ';'} see {path} --help"


def is_verb(program: Command, text: str) -> bool:
    """Whether the text is a verb of the program's, as `run` or `bench kernels`."""
    path, _, rest = _asked(program, text.split(" "))
    return path != str(program.name) and not rest


def typed(context: typer.Context) -> dict[str, str]:
    """The flags that a verb was given, by their parameters' names; without those that have their defaults."""
    given = {name: context.get_parameter_source(name) for name in context.params}
    return {
        one.name: one.opts[-1] for one in context.command.params
        if one.name in given and getattr(given[one.name], "name", "") == "COMMANDLINE"
    }  # fmt: skip


def refuse_beside(context: typer.Context, names: Collection[str], why: str) -> None:
    """Raise UsageError if the user gave any of these parameters, because the verb would ignore them."""
    flags = [flag for name, flag in typed(context).items() if name in names]
    if flags:
        raise UsageError(f"{context.command_path.partition(' ')[2]}: {' and '.join(flags)}: {why}")


def _asked(program: Command, words: Sequence[str]) -> tuple[str, Command, Sequence[str]]:
    """The verb at the beginning of ``words``, as typed and as a command, and the rest of the words."""
    path, command = str(program.name), program
    while words and words[0] in _verbs(command):
        path, command, words = f"{path} {words[0]}", _verbs(command)[words[0]], words[1:]
    return path, command, words


def _verbs(command: Command) -> dict[str, Command]:
    return getattr(command, "commands", {})


def _fault(error: Any, command: Command, words: Sequence[str]) -> str:
    kind = type(error).__name__
    if kind == "NoSuchOption":
        flags = [flag for one in command.params for flag in (*one.opts, *one.secondary_opts)]
        return f"no such option {error.option_name}{did_you_mean(error.option_name, flags)}"
    if _verbs(command) and words:
        return f"no such verb {words[0]}{did_you_mean(words[0], list(_verbs(command))) or '; choose one of ' + ', '.join(_verbs(command))}"
    if kind == "MissingParameter":
        return f"{error.param.opts[-1]} is missing: {(error.param.help or '').rstrip('.')}"
    if kind == "BadParameter" and (expected := _expected(error.message)):
        return f"{_typed(words, error.param.opts)}: expected {expected}"
    text = str(error.format_message()).rstrip(".")
    return text[:1].lower() + text[1:]


def _expected(message: str) -> str:
    """What kind of value a flag takes, from click's message; "" if it is not a number."""
    if "integer" in message:
        return "a whole number"
    return "a number" if "number" in message or "float" in message else ""


def _typed(words: Sequence[str], flags: Sequence[str]) -> str:
    """A flag and its value as typed; if it was given several times, the last one."""
    for index in range(len(words) - 1, -1, -1):
        flag, equals, value = words[index].partition("=")
        if flag in flags:
            return f"{flag} {value if equals else next(iter(words[index + 1 :]), '')}"
    return flags[-1]
