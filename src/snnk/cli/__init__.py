"""The command line. Each module of this package is one command, unless its name begins with an underscore.

A command's module has

- `command`, a function whose docstring and annotations are the help of the command and of its options,
- `GROUP`, one of the headings in `_options.GROUPS`, under which `snnk --help` lists it,
- `EXAMPLES`, two command lines for the end of its help, and
- `RERUN`, if the same command continues a run that was stopped: what it does then.

`command` imports what it needs when it runs, so that help and completion load neither torch nor transformers. It calls
a public function, prints what that returns, and does nothing else. An error of the user ends in one line on stderr and
exit code 2. The functions behind `estimate` and `reproduce` belong to the experiments, which are no part of the public
names; `demo` calls the command `compress`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Annotated, Any

try:
    import rich  # noqa: F401, needed by every command
    import typer
except ImportError as missing:
    raise SystemExit(f"snnk: the command line needs {missing.name}; install it with: pip install 'snnk[cli]'") from None

import snnk
from snnk._text import one_line
from snnk.cli._options import GROUPS

INTERRUPTED = 130
# Typer carries its own copy of click, so the base class of its usage errors has no public name to import.
UserError: type[Any] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def commands() -> dict[str, ModuleType]:
    """The modules of all commands by name, in the order of `snnk --help`."""
    names = [module.name for module in iter_modules(__path__) if not module.name.startswith("_")]
    found = {name.replace("_", "-"): import_module(f"{__name__}.{name}") for name in names}
    return dict(sorted(found.items(), key=lambda item: (GROUPS.index(item[1].GROUP), item[0])))


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"snnk {snnk.__version__}")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def make_app() -> typer.Typer:
    """The application with all commands."""
    app = typer.Typer(
        name="snnk",
        invoke_without_command=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        help="Scalable neural network kernels: compress and fine-tune transformers, fit tables in closed form.",
        epilog="Start with: snnk demo",
    )
    app.callback()(_root)
    for name, module in commands().items():
        epilog = "\n\n".join(["Examples:", *module.EXAMPLES])  # Typer joins lines without an empty one between them
        app.command(name, rich_help_panel=module.GROUP, epilog=epilog)(module.command)
    return app


def main(args: list[str] | None = None) -> None:
    """Run a command line and exit. The entry point of the script `snnk`."""
    try:
        code = typer.main.get_command(make_app()).main(args=args, prog_name="snnk", standalone_mode=False)
    except UserError as error:
        sys.exit(_fail(error.format_message()))
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except (ValueError, TypeError, OSError, ImportError, MemoryError) as error:
        sys.exit(_fail(str(error)))
    except Exception:
        _tell_torchrun(traceback.format_exc())
        raise
    if code == INTERRUPTED:  # Typer returns it after Ctrl-C
        name = next(iter(sys.argv[1:] if args is None else args), "")
        rerun = getattr(commands().get(name), "RERUN", "starts anew")
        sys.stderr.write(f"snnk: interrupted; the same command {rerun}\n")
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> int:
    worker = f" worker {os.environ.get('RANK')}:" if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    line = f"snnk:{worker} {one_line(message)}"
    sys.stderr.write(f"{line}\n")
    _tell_torchrun(line)
    return 2


def _tell_torchrun(text: str) -> None:
    """Hand the error of a worker to torchrun, whose summary of thirty lines then ends with it."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        more = {"py_callstack": text, "timestamp": str(int(time.time()))}  # the format of torch's ErrorHandler
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": more}}))
