"""`numdiff report`: runs as one page."""

import click

from numdiff_cli.output import echo


@click.command(no_args_is_help=True)
@click.argument("runs", metavar="RUN…", nargs=-1, required=True)
@click.option(
    "--out",
    metavar="FILE.html",
    default="report.html",
    show_default=True,
    help="The page that is written.",
)
@click.option(
    "--serve",
    is_flag=True,
    help="Serve the page instead, and keep it up to date while the runs train; Ctrl-C ends it.",
)
@click.option(
    "--host",
    metavar="ADDRESS",
    default="127.0.0.1",
    show_default=True,
    help="With --serve: the address to listen on; another one lets other machines read the page.",
)
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65535),
    default=8420,
    show_default=True,
    help="With --serve: the port; 0 takes a free one.",
)
@click.option(
    "--outdir",
    metavar="DIR",
    default="runs",
    show_default=True,
    help="Folder in which run numbers are looked up.",
)
def report(runs, out, serve, host, port, outdir):
    """Show runs as one page: curves, samples over the steps, settings.

    RUN is a run folder or the number of a run; several are compared. The page is one file, which a
    browser opens without a network. Drag in a chart to zoom; the icons above it pan, reset and save.

    \b
    numdiff report 0
    numdiff report 0 3 --out compared.html
    numdiff report 3 --serve
    """
    from numdiff.errors import UsageError

    from .report import save_report
    from .runs import find_runs

    context = click.get_current_context()
    given = [
        name
        for name in ("out", "host", "port")
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    found = find_runs(runs, outdir)
    if not serve:
        for name in ("host", "port"):
            if name in given:
                raise UsageError(f"--{name} needs --serve: add it, or leave --{name} out.")
        for note in save_report(out, found):
            echo(f"note      {note}")
        echo(f"report    {out}")
        return
    if "out" in given:
        raise UsageError("--out and --serve exclude each other: give one of them.")
    from .live import serve_report

    serve_report(found, host, port, echo)
