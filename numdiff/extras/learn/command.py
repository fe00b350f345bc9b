"""`numdiff learn`: chapters and puzzles that teach GPU programming, run in the emulator."""

import pathlib
import random

import click

TRIES = 3  # after which --solution shows the solution without --yes


@click.command()
@click.argument("number", metavar="[PUZZLE]", type=click.IntRange(1), required=False)
@click.option("--check", is_flag=True, help="Judge your file of this puzzle.")
@click.option("--hint", is_flag=True, help="Print the hints, one more with each try.")
@click.option("--solution", is_flag=True, help=f"Print a solution, after {TRIES} tries.")
@click.option("--yes", is_flag=True, help="With --solution: print it before that, too.")
@click.option(
    "--counts", is_flag=True, help="With --check: also print what each line of the kernel costs."
)
@click.option(
    "--film",
    is_flag=True,
    help="Write a film of your kernel's run next to your file, a page for a browser.",
)
@click.option(
    "--chapter", metavar="CHAPTER", type=click.IntRange(1), help="Write this chapter as a notebook."
)
@click.option(
    "--run",
    is_flag=True,
    help="With --chapter: run it here instead, and write its figures into the folder.",
)
@click.option(
    "--folder",
    metavar="FOLDER",
    type=click.Path(file_okay=False),
    default=".",
    show_default=True,
    help="The folder of your files.",
)
def learn(number, check, hint, solution, yes, counts, film, chapter, run, folder):
    """Learn GPU programming by chapters and puzzles, without a GPU.

    Without a number it lists the chapters, the puzzles and your stars. With a number it writes that
    puzzle's file into the folder. Fill in the kernel in an editor, then judge it with --check. A
    chapter is a notebook, whose text names the puzzles that go with it.

    \b
    numdiff learn                     list the chapters and the puzzles
    numdiff learn --chapter 1         write 01_threads_and_memory.ipynb
    numdiff learn --chapter 1 --run   run it in the terminal
    numdiff learn 1                   write 01_map.py
    numdiff learn 1 --check           judge it
    numdiff learn 1 --film            write 01_map.html, which shows its run step by step
    """
    from numdiff.errors import UsageError
    from numdiff.lessons import catalogue, progress

    if check + hint + solution + film > 1:
        raise UsageError(
            "--check, --film, --hint and --solution are four commands: give one of them."
        )
    for flag, needs, given in (
        ("--counts", "--check", counts and not check),
        ("--yes", "--solution", yes and not solution),
    ):
        if given:
            raise UsageError(f"{flag} needs {needs}.")
    if run and chapter is None:
        raise UsageError("--run needs --chapter.")
    if chapter is not None:
        if number is not None or check or hint or solution or film:
            raise UsageError("--chapter opens a chapter; a puzzle is another command.")
        (run_chapter if run else write_chapter)(chapter, folder)
        return
    if number is None:
        if check or hint or solution or film:
            raise UsageError("give the number of a puzzle, such as `numdiff learn 1 --check`.")
        list_puzzles(catalogue.puzzles(), progress.load())
        return
    puzzle = catalogue.puzzle(number)
    tries = progress.load().get(number, {}).get("tries", 0)
    if hint:
        hints = puzzle.module.HINTS
        for n, text in enumerate(hints[: tries + 1], 1):
            click.echo(f"{n}. {text}")
        if tries + 1 < len(hints):
            click.echo("The next --check adds another hint.")
    elif solution:
        if tries < TRIES and not yes:
            raise UsageError(
                f"the solution is shown after {TRIES} tries (--check), of which you have made {tries}; "
                "--yes shows it now."
            )
        click.echo(puzzle.solution, nl=False)
    elif check:
        check_file(puzzle, pathlib.Path(folder) / f"{puzzle.name}.py", counts)
    elif film:
        film_file(puzzle, pathlib.Path(folder) / f"{puzzle.name}.py")
    else:
        path = puzzle.copy_to(folder)
        where = "" if folder == "." else f" --folder {folder}"
        click.echo(f"{path}: puzzle {number}, {puzzle.title}")
        click.echo(f"NumPy: {puzzle.specification}")
        click.echo(f"Edit the file, then run: numdiff learn {number} --check{where}")


def film_file(puzzle, path):
    from numdiff.errors import printable
    from numdiff.lessons.judge import film_of

    film, message = film_of(puzzle, path, random.randrange(1 << 30))
    click.echo(printable(message))
    if film is None:
        raise SystemExit(1)
    page = path.with_suffix(".html")
    film.save(page)
    click.echo(f"film in {page}: open it in a browser")


def write_chapter(number, folder):
    from numdiff.lessons.chapter import chapter as find

    chapter = find(number)
    click.echo(f"{chapter.copy_to(folder)}: chapter {number}, {chapter.title}")
    click.echo(
        "Open it in Jupyter, VS Code or Colab; or read it here: "
        f"numdiff learn --chapter {number} --run"
    )


def run_chapter(number, folder):
    from numdiff.files import write_text
    from numdiff.lessons.chapter import chapter as find

    chapter, count = find(number), 0
    for cell, printed, figures in chapter.run():
        click.echo(
            cell.text
            if not cell.code
            else "\n".join(f"    {line}" for line in cell.text.splitlines())
        )
        click.echo(f"\n{printed}" if printed else "")
        for ending, figure in figures:
            count += 1
            path = pathlib.Path(folder) / f"{chapter.name}-{count}.{ending}"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, figure, "the figure")
            click.echo(f"[figure: {path}]\n")


def list_puzzles(puzzles, known):
    from numdiff.lessons.chapter import chapters

    for number, chapter in chapters().items():
        named = f" (puzzles {', '.join(map(str, chapter.puzzles))})" if chapter.puzzles else ""
        click.echo(f"chapter {number}  {chapter.title}{named}")
    click.echo("Read one: numdiff learn --chapter 1 --run\n")
    width = len(str(max(puzzles)))
    for number, puzzle in puzzles.items():
        stars = known.get(number, {}).get("stars", 0)
        click.echo(f"{number:{width}}  {'*' * stars:3}  {puzzle.title}")
    got = sum(known.get(number, {}).get("stars", 0) for number in puzzles)
    following = next((n for n in puzzles if not known.get(n, {}).get("stars")), None)
    click.echo(
        f"{got} of {3 * len(puzzles)} stars."
        + (f" Next: numdiff learn {following}" if following else "")
    )


def check_file(puzzle, path, counts):
    from numdiff.errors import printable
    from numdiff.lessons import catalogue, progress
    from numdiff.lessons.judge import judge
    from numdiff.lessons.on_device import gpu_line

    verdict = judge(puzzle, path, random.randrange(1 << 30))
    entry = progress.record(puzzle.number, verdict.stars) if path.is_file() else {"tries": 0}
    stars = (
        "not solved"
        if not verdict.stars
        else "1 star"
        if verdict.stars == 1
        else f"{verdict.stars} stars"
    )
    click.echo(f"puzzle {puzzle.number}, {stars} ({verdict.seconds:.1f} s)")
    click.echo(printable(verdict.message))
    if counts and verdict.recorder is not None:
        click.echo(verdict.recorder.table(brief=True))
    if not verdict.stars:
        click.echo(
            f"Hints: numdiff learn {puzzle.number} --hint"
            + (
                f"; a solution: numdiff learn {puzzle.number} --solution"
                if entry["tries"] >= TRIES
                else ""
            )
        )
        raise SystemExit(1)
    if line := gpu_line(puzzle, path):
        click.echo(printable(line))
    if puzzle.number + 1 in catalogue.puzzles():
        click.echo(f"Next: numdiff learn {puzzle.number + 1}")
