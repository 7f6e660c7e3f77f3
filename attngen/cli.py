"""The command line. A command's module is imported when that command runs, so that ``attngen --help`` is quick."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import click

from attngen.errors import AttngenError, CallError, DiskFullError, NoKernelError, SettingError, SpecError, suggest
from attngen.files import FULL, cause, failed_write
from attngen.glyphs import ERRORS

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

#: Name of each command, and what it does. Its module is ``attngen.commands.NAME``, or in the laboratory.
COMMANDS: dict[str, str] = {
    "new": "Write a commented spec to start from.",
    "spec": "Print a spec for FlexAttention's functions, or for a model.",
    "check": "Check specs without compiling: names, masks, shapes, budgets.",
    "build": "Compile the kernels of a spec.",
    "list": "List the kernels that are built and found.",
    "show": "Show a kernel: source, PTX, SASS, resources.",
    "explain": "Explain the plan of a spec: tiles, memory, bands, efficiency.",
    "verify": "Compare built kernels with the float64 reference.",
    "bench": "Benchmark kernels against the attention libraries that are installed.",
    "tune": "Find the fastest tile, stages and warps for this GPU.",
    "package": "Make a wheel of a spec's kernels.",
    "doctor": "Say what works on this machine and what is missing.",
    "cache": "Show the cache, check it, or empty it.",
}

#: Commands of the laboratory, by module.
_LAB = {name: f"attngen.lab.commands.{name}" for name in ("bench", "tune", "verify")}

_BUILD = "pip install 'attngen[build]'"

#: Modules that only some commands need, and how to get them.
EXTRAS: dict[str, str] = {
    **dict.fromkeys(("pydantic", "yaml", "jinja2", "triton", "hatchling"), _BUILD),
    "torch": "install the build of torch for your GPU",
    "matplotlib": "pip install 'attngen[bench]'",
}

EXIT_FAILURE = 1  # it did not work
EXIT_USAGE = 2  # the request is wrong: a bad spec, as well as click's own bad options


_ARGUMENTS = "attngen.arguments"


class LazyGroup(click.Group):
    """A group that knows the names and help of its commands and imports a command to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = import_module(_LAB.get(cmd_name, f"attngen.commands.{cmd_name}")).command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it; for an unknown command with the nearest one."""
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command '{args[0]}'{suggest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names of commands and of options; no command is imported for its help."""
        from click.shell_completion import CompletionItem

        names = [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """As click does it; what is printed has colors as the environment wants them."""
        return super().make_context(info_name, args, parent, **{"color": _colors(), **extra})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the arguments as given: an error may come before the command has parsed its own."""
        ctx.meta[_ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; print attngen's errors and warnings without tracebacks, and as JSON, too, with ``--json``."""
        as_json = self._wants_json(ctx, ctx.meta[_ARGUMENTS])
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _print_warning
                return super().invoke(ctx)
        except AttngenError as error:
            self._fail(ctx, error, as_json, code=exit_code(error))
        except OSError as error:  # a full disk, or a file of somebody else's, may show itself anywhere
            if error.filename is None:
                raise
            told = AttngenError(f"{error.filename}: {cause(error)}")
            if error.errno in FULL:
                told = DiskFullError(failed_write(error))
            self._fail(ctx, told, as_json)
        except KeyboardInterrupt as stop:  # its text says what is kept, if there is anything
            click.echo(err=True)  # ends the line in which a terminal shows ^C
            self._fail(ctx, AttngenError(str(stop) or "stopped"), as_json)
        except click.ClickException as error:
            if as_json:
                _print_json([AttngenError(error.format_message()).to_dict()])
            raise
        except ModuleNotFoundError as error:
            # attngen is installed without the extra that the command needs
            missing = (error.name or "").partition(".")[0]
            if missing not in EXTRAS:
                raise
            self._fail(ctx, AttngenError(f"this needs {missing}, which is not installed; {EXTRAS[missing]}"), as_json)

    def _fail(self, ctx: click.Context, error: AttngenError, as_json: bool, code: int = EXIT_FAILURE) -> NoReturn:
        """Print an error, as JSON too if that is asked for, and end the command."""
        print_error(error)
        if as_json:
            _print_json([each.to_dict() for each in error.each or (error,)])
        ctx.exit(code)

    def _wants_json(self, ctx: click.Context, arguments: Sequence[str]) -> bool:
        """Whether a command is given ``--json`` as a flag; ``bench`` may also be given the name of a file with it."""
        command: click.Command | None = self
        for place, argument in enumerate(arguments):
            if isinstance(command, click.Group) and not argument.startswith("-"):
                command = command.get_command(ctx, argument)
            elif argument == "--":
                return False
            elif argument == "--json" and command is None:  # an unknown command, whose options are unknown as well
                return True
            elif argument == "--json" and command is not None:
                options = [option for option in command.params if "--json" in option.opts]
                flag = any(isinstance(option, click.Option) and option.is_flag for option in options)
                return flag or (bool(options) and not any(map(is_report, arguments[place + 1 : place + 2])))
        return False


def is_report(argument: str) -> bool:
    """Whether what follows ``--json`` of ``bench`` is the name of its file, not another option or the spec."""
    return not argument.startswith("-") and not argument.endswith((".yaml", ".yml"))


def exit_code(error: AttngenError) -> int:
    """Return the exit code of a command that ended with ``error``."""
    asked_wrongly = isinstance(error, SpecError | SettingError | CallError) and not isinstance(error, NoKernelError)
    return EXIT_USAGE if asked_wrongly else EXIT_FAILURE


def exit_code_of(errors: Iterable[AttngenError]) -> int:
    """Return the exit code after several errors: that of a failure if any is one; 0 if there are none."""
    return min(map(exit_code, errors), default=0)


def _print_json(errors: Sequence[Mapping[str, Any]]) -> None:
    from attngen.commands.output import print_json

    print_json({"errors": list(errors)})


def _colors() -> bool | None:
    """Whether output has colors, by NO_COLOR, FORCE_COLOR, CLICOLOR_FORCE and CLICOLOR; None: on a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR") or os.environ.get("CLICOLOR_FORCE", "0") not in ("", "0"):
        return True
    return False if os.environ.get("CLICOLOR") == "0" else None


def print_error(error: AttngenError) -> None:
    """Print an error to stderr, in red on a terminal."""
    click.secho(str(error), fg="red", err=True, color=_colors())


def _print_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a Python warning to stderr: its message, without the line of code that raised it."""
    from attngen.commands.output import warn

    warn(str(message))


def _print_version(ctx: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked:
        from attngen import __version__

        click.echo(f"attngen {__version__}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
              help="Print the version.")  # fmt: skip
def group() -> None:
    """Generate attention kernels from specs: from masks and scores in YAML to cubins that need no compiler to run."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits 0, 1 (it failed, or nobody reads its output) or 2 (the request is wrong)."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the caller closed it
            setattr(sys, name, _nowhere())
        elif hasattr(stream, "reconfigure"):  # a message may quote what the terminal's encoding lacks
            stream.reconfigure(errors=ERRORS)
    try:
        try:
            group(arguments, prog_name="attngen")
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:
            raise
        sys.stdout = _nowhere()  # what is left of the output fails again at the end of the program
        if not isinstance(error, BrokenPipeError):
            print_error(AttngenError(f"the output cannot be written: {cause(error)}"))
        sys.exit(EXIT_FAILURE)


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")
