"""Arguments of the picker's container, read as the command reads them."""

from collections.abc import Sequence

from epp.cli import main
from epp.runtime.options import Options


def options(arguments: Sequence[str]) -> Options:
    """Raises click.UsageError where a flag is unknown or its value no value."""
    serve = main.commands["serve"]
    context = serve.make_context("serve", list(arguments))
    return Options(**context.params)
