"""The `warmroute` command."""

import builtins
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from epp.durations import Duration
from epp.errors import ConfigError, WarmrouteError
from epp.runtime.flag_values import REFUSED, Size
from epp.runtime.options import FlagSpec, Options, completed, flags

_WHOLE = re.compile("[-+]?(?:0|[1-9][0-9]{0,18}|0[xX][0-9a-fA-F]{1,16}|0[oO][0-7]{1,21}|0[bB][01]{1,63})")
_TRUE, _FALSE = ("1", "t", "T", "true", "TRUE", "True"), ("0", "f", "F", "false", "FALSE", "False")


class GoCommand(click.Command):
    """A command whose long flags take one dash as well as two."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {name for param in self.get_params(ctx) for name in param.opts}
        end = args.index("--") if "--" in args else len(args)
        flags = [f"-{arg}" if f"-{arg.partition('=')[0]}" in known else arg for arg in args[:end]]
        return super().parse_args(ctx, flags + args[end:])


class GoBool(click.ParamType[bool]):
    """`--flag`, `--flag=true`, `--flag=false`: booleans as Go programs take them."""

    name = "bool"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool:
        if isinstance(value, bool):
            return value
        if value in _TRUE or value in _FALSE:
            return value in _TRUE
        return self.fail(f"{value!r} is not a boolean; write true or false", param, ctx)


class GoInt(click.ParamType[int]):
    """A whole number in 64 bits: decimal, 0x, 0o or 0b."""

    name = "int"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        if _WHOLE.fullmatch(text) and -(2**63) <= (number := int(text, 0)) < 2**63:
            return number
        return self.fail(f"{text!r} is not a whole number in 64 bits", param, ctx)


class GoDuration(click.ParamType[Duration]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Duration:
        if isinstance(value, Duration):
            return value
        try:
            return Duration.parse(value)
        except ValueError as error:
            return self.fail(str(error), param, ctx)


class GoSize(click.ParamType[Size]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Size:
        if isinstance(value, Size):
            return value
        try:
            return Size.parse(value)
        except ValueError as error:
            return self.fail(str(error), param, ctx)


def _option(flag: FlagSpec) -> click.Option:
    # click would put the default, written the Go way, into parentheses.
    text = f"{flag.help}  [default: {flag.shown_default}]" if flag.shown_default else flag.help
    shared: dict[str, Any] = {"help": text, "default": flag.default}
    match flag.kind:
        case builtins.bool:
            shared |= {"type": GoBool(), "is_flag": False, "flag_value": "true"}
        case builtins.int:
            shared["type"] = GoInt()
        case builtins.str:
            shared["type"] = str
        case _ if flag.kind is Duration:
            shared["type"] = GoDuration()
        case _ if flag.kind is Size:
            shared["type"] = GoSize()
        case _:
            shared = {"help": text, "multiple": True}
    return click.Option([*flag.names, flag.field], **shared)


def _refused(flag: str, why: str) -> click.Option:
    """An option that no value makes right: using it says why."""

    def refuse(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
        if value is not None:
            raise click.UsageError(f"{flag}: {why}", ctx)

    return click.Option([flag], hidden=True, expose_value=False, callback=refuse)


def run(action: Callable[[], None]) -> None:
    """Call `action`; what is wrong with the user's input becomes a message, not a trace."""
    try:
        action()
    except ConfigError as error:
        click.echo(f"warmroute: {error}", err=True)
        sys.exit(2)
    except WarmrouteError as error:
        click.echo(f"warmroute: {error}", err=True)
        sys.exit(1)
    except BrokenPipeError:
        raise
    except OSError as error:
        click.echo(f"warmroute: {error.strerror or error}", err=True)
        sys.exit(1)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="warmroute", prog_name="warmroute")
def main() -> None:
    """Endpoint picker for LLM inference behind Envoy."""


def _serve(**values: Any) -> None:
    # gRPC reads it when loaded. Its lines go to stderr past our format; what matters of them is in ours.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from epp.runtime import logs
    from epp.runtime.app import serve, validate
    from epp.runtime.tracing_setup import tracing_setup

    def action() -> None:
        options = Options(**values)
        if problems := tuple(options.problems()):
            raise ConfigError("command line", *problems)
        options = completed(options, os.environ)
        logs.set_up(options.log_format, options.verbosity)
        tracing = tracing_setup(os.environ) if options.tracing else None
        if options.validate_only:
            validate(options, tracing)
        else:
            serve(options, tracing, os.environ)

    run(action)


main.add_command(
    GoCommand(
        "serve",
        callback=_serve,
        params=[*map(_option, flags()), *(_refused(flag, why) for flag, why in REFUSED.items())],
        help="Run the endpoint picker: the ext-proc service that Envoy asks for every request.",
        short_help="Run the endpoint picker.",
    )
)


@main.group()
def config() -> None:
    """Work with EndpointPickerConfig files."""


@config.command("check")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--allow-experimental-plugins",
    type=GoBool(),
    is_flag=False,
    flag_value="true",
    default=False,
    help="Allow plugins that are alpha.",
)
def config_check(file: Path, allow_experimental_plugins: bool) -> None:
    """Say what is wrong with FILE, or print the effective configuration and where each value comes from."""
    from epp.config.check import effective
    from epp.runtime.app import read_config

    def action() -> None:
        loaded = read_config(
            Options(config_file=str(file), allow_experimental_plugins=allow_experimental_plugins)
        )
        click.echo(effective(loaded))

    run(action)


@config.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of the file, with the parameters of every plugin type that is installed."""
    from epp.config.json_schema import json_schema
    from epp.config.registry import built_in_registry

    run(lambda: click.echo(json.dumps(json_schema(built_in_registry()), indent=2)))


@main.command()
@click.option(
    "--admin", default="http://127.0.0.1:9091", show_default=True, help="Admin address of a running picker."
)
@click.option(
    "--file", "file", type=click.Path(path_type=Path), help="A recorded decision, or a list of them (JSON)."
)
@click.option("--request-id", help="Only this request.")
@click.option("--last", type=click.IntRange(min=1), default=1, show_default=True, help="How many decisions.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: what --file reads.")
def explain(admin: str, file: Path | None, request_id: str | None, last: int, as_json: bool) -> None:
    """Why this endpoint: a table per endpoint, filter and scorer."""
    from epp.runtime.explanations import fetch, read
    from epp.scheduling.explain import render_table

    def action() -> None:
        found = read(file) if file else fetch(admin, last, request_id)
        if request_id is not None:
            found = [each for each in found if each.request_id == request_id]
        if not found:
            which = f"request {request_id}" if request_id else "any request"
            raise WarmrouteError(f"no decision is kept for {which}; a picker keeps the last ones only")
        if as_json:
            click.echo(msgspec.json.format(msgspec.json.encode(found[:last])).decode())
            return
        click.echo("\n\n".join(render_table(each) for each in found[:last]))

    run(action)


@main.command()
@click.option(
    "--workload", type=click.Path(path_type=Path), help="Workload file; default: the one of the examples."
)
@click.option("--seed", type=int, help="Seed of the workload, in place of the file's.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there.")
@click.option("--picture", type=click.Path(path_type=Path), default=Path("out/demo.png"), show_default=True)
@click.option("--trace", type=click.Path(path_type=Path), help="Play this trace (Mooncake format) instead.")
@click.option("--trace-speed-up", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True)
@click.option(
    "--trace-limit", type=click.IntRange(min=1), default=800, show_default=True, help="First lines only."
)
@click.option("--envoy", type=click.Path(path_type=Path), help="Envoy binary; default: search.")
@click.option("--keep", is_flag=True, help="Keep everything running afterwards.")
def demo(workload: Path | None, picture: Path, **rest: Any) -> None:
    """Round robin against Warmroute: 8 simulated engines behind a real Envoy."""
    from rich.console import Console

    from epp.lab.demo import DEMO_WORKLOAD, DemoOptions
    from epp.lab.demo import demo as play_demo

    options = DemoOptions(workload=workload or DEMO_WORKLOAD, picture=picture, **rest)
    status = 0

    def action() -> None:
        nonlocal status
        status = play_demo(options, Console())

    run(action)
    sys.exit(status)


if __name__ == "__main__":
    main(prog_name="warmroute")
