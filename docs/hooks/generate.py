"""Pages that are made from the code: the reference, a page for each kernel file, the measured
tables, the READMEs.

mkdocs runs this script before it builds (the plugin mkdocs-gen-files). SUMMARY.md is the
navigation.
"""

import ast
import os
import pathlib
import re
import sys

import mkdocs_gen_files

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(pathlib.Path(__file__).parent)]

import browser  # noqa: E402
import sections  # noqa: E402

from numdiff import extensions  # noqa: E402
from numdiff.extras.kernel_check import run as check  # noqa: E402
from numdiff.kernels import figures  # noqa: E402
from numdiff.kernels.operation import all_operations  # noqa: E402
from numdiff.lessons import catalogue  # noqa: E402
from numdiff.lessons.chapter import Notebook, chapters  # noqa: E402

PACKAGES = {
    "numdiff": "numdiff",
    "numdiff.nn": "Models and autograd",
    "numdiff.diffusion": "Diffusion and samplers",
    "numdiff.training": "Training",
    "numdiff.data.dataset": "Datasets",
    "numdiff.evaluation": "Evaluation",
    "numdiff.emulator": "The emulator",
    "numdiff.device": "Arrays and launches",
    "numdiff.errors": "Errors",
}
MODULES = {
    "numdiff.nn": ("tensor", "module", "model", "layers", "unet", "dit", "optimizer", "functional"),
    "numdiff.diffusion": ("process", "sampling", "samplers", "schedule", "guidance", "paths"),
    "numdiff.training": ("trainer", "checkpoint", "options"),
    "numdiff.evaluation": ("features", "frechet", "kid", "precision_recall"),
    "numdiff.emulator": ("launch", "faults", "counts", "film"),
    "numdiff.device": ("array", "requires", "specialise", "philox", "arena", "replay"),
    "numdiff.kernels": ("operation.record", "operation.problem"),
}
GUIDES = {
    "numdiff/training": "Training in detail",
    "numdiff/data": "Data in detail",
    "numdiff/nn": "Models in detail",
    "numdiff/extras/convert": "Converting weights in detail",
    "numdiff/diffusion": "Samplers in detail",
    "numdiff/distributed": "Several GPUs in detail",
    "numdiff/evaluation": "Evaluation in detail",
    "numdiff/device": "GPUs and caches in detail",
    "numdiff/emulator": "The emulator in detail",
    "numdiff/benchmark": "Benchmarks in detail",
    "numdiff/kernels": "The kernels in reading order",
    "numdiff/extras": "Extras in detail",
}
# Films that the emulator makes, {file: [(operation, version, caption)]}, and its pictures of
# layouts
FILMS = {
    "softmax": [
        ("softmax", 1, "Version 1: a tree in shared memory, with a barrier for each level."),
        ("softmax", 2, "Version 2: a warp needs no barrier."),
    ],
    "matmul/tiled": [("matmul", 2, "Load a tile, wait, multiply, wait.")],
    "extras/levels/wgmma/double_buffer": [
        ("matmul_level", 2, "TMA copies run while the products of the tile before are computed.")
    ],
    "extras/levels/wgmma/producer_consumer": [
        ("matmul_level", 3, "One warpgroup loads, two multiply.")
    ],
    "extras/levels/wgmma/tma_store": [("matmul_level", 5, "TMA also stores the results.")],
}
LAYOUTS = {
    "matmul/mma": ("fragments", "The fragments of one m16n8k16 product: the elements of lane 5."),
    "extras/levels/wgmma/one_tile": (
        "tile",
        "A tile of float16 in shared memory with the 128-byte swizzle.",
    ),
    "extras/levels/conv2d/shifted_boxes": (
        "box",
        "The boxes that TMA copies for three taps of a 3 × 3 convolution.",
    ),
}
SKIPPED = {"figures", "tuning"}  # folders of kernels without kernels


def page(path, text):
    with mkdocs_gen_files.open(path, "w") as file:
        file.write(text)


def title_of(text):
    return re.sub(r"[.:]$", "", text.strip().splitlines()[0])


def plain(text):
    """Text for a heading or a cell of a table."""
    return text.replace("|", "\\|").replace("[", "\\[").replace("<", "&lt;")


# The reference ------------------------------------------------------------------------------------


def reference():
    lines = []
    for name, title in {**PACKAGES, "numdiff.kernels": "The record of an operation"}.items():
        path, parts = f"reference/{name.replace('.', '-')}.md", MODULES.get(name, ())
        shown = [f"{name}.{part}" for part in parts] or [name]
        page(
            path,
            f"# {title}\n\n`import {name}`\n\n"
            + "\n\n".join(f"::: {each}" for each in shown)
            + "\n",
        )
        lines.append(f"    * [{title}]({path})")
    return lines


# The kernels --------------------------------------------------------------------------------------


def kernel_files():
    """(path, name, module) of the files with kernels, each folder's after its own, then those of
    extensions."""
    folder = ROOT / "numdiff" / "kernels"
    for path in sorted(
        folder.rglob("*.py"),
        key=lambda path: [(part != path.name, part) for part in path.relative_to(folder).parts],
    ):
        parts = path.relative_to(folder).parts
        if parts[0] not in SKIPPED and path.name != "__init__.py":
            yield (
                path,
                (name := "/".join(parts).removesuffix(".py")),
                f"numdiff.kernels.{name.replace('/', '.')}",
            )
    for path in extensions.kernel_files():
        name = path.relative_to(ROOT / "numdiff").as_posix().removesuffix(".py")
        if path.name != "__init__.py":
            yield path, name, f"numdiff.{name.replace('/', '.')}"


def figures_of(module):
    """The versions and the measured figures of the operations that a module declares, as Markdown."""
    text = []
    for record in all_operations():
        if record.module != module or not record.versions:
            continue
        rows = "\n".join(
            f"| {v.number} | {v.name} | {v.requires or 'any'} | {', '.join(v.dtypes or ['all'])} |"
            for v in record.versions
        )
        text.append(
            f"### `{record.call.__name__}`\n\n{sections.as_markdown(record.call.__doc__)}\n\n"
            f"| version | name | compute capability | types |\n| --- | --- | --- | --- |\n{rows}\n"
        )
        measured = figures.lines_of(record.call.__name__)
        if measured:
            text.append("```text\n" + "\n".join(measured) + "\n```\n")
    return "\n".join(text)


def drawn(name):
    """The emulator's pictures for the page of a kernel file, as Markdown."""
    text, up = "", "../" * (name.count("/") + 1)
    for operation, version, caption in FILMS.get(name, ()):
        case = next(
            case for case in check.CASES if case.name == operation and version in case.versions
        )
        path = f"films/{operation}-{version}.html"
        page(path, check.trace_of(case, version).html())
        text += (
            f'<iframe src="{up}{path}" title="{caption}" loading="lazy" style="width:100%;height:640px;border:1px '
            f'solid #8884"></iframe>\n\n*{caption} Arrow keys step, space plays: [full window]({up}{path}).*\n\n'
        )
    if name in LAYOUTS:
        file, caption = LAYOUTS[name]
        with mkdocs_gen_files.open(f"pictures/{file}.png", "wb") as picture:
            picture.write((ROOT / "numdiff" / "emulator" / "images" / f"{file}.png").read_bytes())
        text += f"![{caption}]({up}pictures/{file}.png){{ .wide }}\n\n*{caption}*\n\n"
    return text


def kernel_pages():
    lines, shown = [], {""}
    for path, name, module in kernel_files():
        text = path.read_text(encoding="utf-8")
        docstring = ast.get_docstring(ast.parse(text)) or name
        code = re.sub(r'\A(?:r|)""".*?"""\n', "", text, flags=re.DOTALL)
        head, _, rest = docstring.partition("\n")
        declared = figures_of(module)
        page(
            f"kernels/{name}.md",
            "".join(
                [
                    f"# {plain(title_of(head))}\n\n`{module.replace('.', '/')}.py`\n\n",
                    f"{sections.as_markdown(rest)}\n\n{drawn(name)}",
                    f"## Versions and figures\n\n{declared}\n" * bool(declared),
                    f"## Source\n\n```python\n{code.rstrip()}\n```\n",
                ]
            ),
        )
        *folders, leaf = name.split("/")
        for depth in range(1, len(folders) + 1):
            if (folder := "/".join(folders[:depth])) not in shown:
                shown.add(folder)
                lines.append(f"    {'    ' * (depth - 1)}* {folders[depth - 1]}")
        lines.append(f"    {'    ' * len(folders)}* [{leaf}](kernels/{name}.md)")
    return lines


# The chapters -------------------------------------------------------------------------------------


def repository():
    """ "owner/name" on GitHub, from the setting `extra.repository` of mkdocs.yml; "" if there is none."""
    return mkdocs_gen_files.config["extra"].get("repository") or ""


WIDE = "---\nhide:\n  - toc\n---\n\n"  # a page whose code has lines of up to 120 columns


def buttons(notebook, folder):
    """Write a notebook next to its page; returns the buttons that open it.

    Colab opens notebooks from GitHub only. It finds them on the branch gh-pages, to which the site
    is published.
    """
    name, path = repository(), f"{folder}/{notebook.name}.ipynb"
    page(
        path,
        notebook.notebook(
            name and f"https://github.com/{name}@{os.environ.get('GITHUB_SHA', 'main')}"
        ),
    )
    text = f"[Download the notebook]({notebook.name}.ipynb){{ .md-button download }}"
    if name:
        text = (
            f"[Open in Colab](https://colab.research.google.com/github/{name}/blob/gh-pages/{path})"
            f"{{ .md-button .md-button--primary }} {text}"
        )
    return text


def chapter_pages():
    """Each chapter with what it prints and draws when the site is built, and as a notebook."""
    lines = []
    for number, chapter in chapters().items():
        path, count, text, runs = f"chapters/{chapter.name}", 0, [], number in browser.CHAPTERS
        for cell, printed, drawn_here in chapter.run():
            if not cell.code:
                text.append(prose_of(cell))
            if len(text) == 1:
                text.append(
                    f"{buttons(chapter, 'chapters')}\n\nOr write it into a folder: "
                    f"`numdiff learn --chapter {number}`."
                )
                text += [browser.chapter_note()] * runs
            shown = []
            if printed:
                shown.append(f"```text\n{printed.rstrip()}\n```")
            for ending, figure in drawn_here:
                count += 1
                page(f"{path}-{count}.{ending}", figure)
                file = f"{chapter.name}-{count}.{ending}"
                shown.append(
                    f"![Figure {count}: drawn by the cell above]({file})"
                    if ending == "svg"
                    else f'<iframe src="{file}" title="Film {count}" width="100%" height="760"></iframe>'
                )
            if cell.code:
                code = [f"```python\n{cell.text}\n```", *shown]
                text += browser.cell(code) if runs else code
        page(f"{path}.md", WIDE + "\n\n".join(text) + "\n")
        lines.append(f"    * [{number}. {chapter.title}]({path}.md)")
    return lines


def notebook_pages():
    """The notebooks of docs/notebooks/, which are not run when the site is built."""
    lines = []
    for file in sorted((ROOT / "docs" / "notebooks").glob("*.py")):
        notebook = Notebook(file)
        text = [
            f"```python\n{cell.text}\n```" if cell.code else cell.text for cell in notebook.cells
        ]
        page(
            f"notebooks/{notebook.name}.md",
            WIDE + "\n\n".join([text[0], buttons(notebook, "notebooks"), *text[1:]]) + "\n",
        )
        lines.append(f"    * [{notebook.title}](notebooks/{notebook.name}.md)")
    return lines


def prose_of(cell):
    """A cell's text for the site: a line of puzzles becomes a list, and files of kernels link to
    their pages."""

    def puzzles(found):
        return '!!! tip "Now solve"\n\n' + "\n".join(
            f"    * {puzzle_link(catalogue.puzzle(int(n)))}" for n in re.findall(r"\d+", found[1])
        )

    text = re.sub(r"^Puzzles?: (.*)$", puzzles, cell.text, flags=re.MULTILINE)
    return re.sub(r"`numdiff/(?:kernels/)?([\w/]+)\.py`", kernel_link, text)


def puzzle_link(puzzle):
    """A puzzle's command, and its page if it has one."""
    title = f"{puzzle.number}\\. {plain(puzzle.title)}"
    if puzzle.number in browser.PUZZLES:
        title = f"[{title}](../learn/{puzzle.name}.md)"
    return f"{title} (`numdiff learn {puzzle.number}`)"


def kernel_link(found):
    known = any(name == found[1] for _, name, _ in kernel_files())
    return f"[{found[0]}](../kernels/{found[1]}.md)" if known else found[0]


# Measured tables and pages that stand next to the code --------------------------------------------


def results():
    text = [
        "# Measured kernels\n\nEvery version of every operation at a model's shapes, from "
        "`numdiff/kernels/figures/`. `numdiff bench kernels --of files` measures them again on your GPU.\n"
    ]
    for card in figures.cards():
        text.append(
            f"## {card['card']}\n\n{card['date']}, PyTorch {card['torch']}. A star marks the version that the "
            "operation chooses.\n\n| problem | version | µs | rate | of the roof | of the library |\n"
            "| --- | --- | --- | --- | --- | --- |"
        )
        for name, rows in card["problems"].items():
            for number, row in rows.items():
                rate = f"{row['tflops']:g} TFLOP/s" if "tflops" in row else f"{row['gb_s']:,g} GB/s"
                roof = f"{row['roof']} % of {row['bound']}" if "roof" in row else ""
                library = "{} % of {}".format(*row["library"]) if "library" in row else ""
                text.append(
                    f"| {name} | {number}{'*' * row.get('chosen', False)} | {row['us']:,g} | {rate} | {roof} | "
                    f"{library} |"
                )
                name = ""
        text.append("")
    page("results.md", "\n".join(text))


def guides():
    """The READMEs, with links to other files of the repository as plain text."""
    lines, known = (
        [],
        {f"{folder}/README.md": f"guides/{folder.replace('/', '-')}.md" for folder in GUIDES},
    )
    for folder, title in GUIDES.items():
        path = ROOT / folder / "README.md"

        def link(found, path=path):
            text, target = found.groups()
            place, _, anchor = target.partition("#")
            if re.match(r"https?:", target):
                return found[0]
            if not place:
                return found[0]
            full = (path.parent / place).resolve()
            full = full / "README.md" if full.is_dir() and (full / "README.md").exists() else full
            inside = full.relative_to(ROOT).as_posix() if full.is_relative_to(ROOT) else place
            if inside in known:
                return f"[{text}]({known[inside].removeprefix('guides/')})"
            return text if text.startswith("`") else f"{text} (`{inside}`)"

        text = path.read_text(encoding="utf-8")
        text = re.sub(r"!\[[^\]]*\]\([^)]*\)\n?", "", text)  # pictures: the tutorials have them
        parts = re.split(r"(```.*?```)", text, flags=re.DOTALL)
        text = "".join(
            part if i % 2 else re.sub(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", link, part)
            for i, part in enumerate(parts)
        )
        page(f"guides/{folder.replace('/', '-')}.md", text)
        lines.append(f"    * [{title}](guides/{folder.replace('/', '-')}.md)")
    return lines


def logs():
    """Links to the logs of experiments, whose links to files of the repository become plain text."""
    lines = []
    for path in sorted((ROOT / "docs" / "log").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        text = re.sub(
            r"\[([^\[\]]*)\]\(((?!https?:|#|\.\./lessons|\w+\.md)[^)\s]+)\)", r"\1 (`\2`)", text
        )
        page(f"log/{path.name}", re.sub(r"!\[[^\]]*\] \(`[^`]*`\)\n?", "", text))
        lines.append(f"    * [{title_of(text.lstrip('# '))}](log/{path.name})")
    return lines


def pictures():
    for name in ("samples.png", "samples-dit.png", "samples-tiny.png", "ladder.png"):
        with mkdocs_gen_files.open(f"pictures/{name}", "wb") as file:
            file.write((ROOT / "data" / name).read_bytes())


def browser_files():
    """What the pages that run in the browser load, if it can be had."""
    if browser.why_not() is None:
        for path, data in browser.published().items():
            with mkdocs_gen_files.open(path, "wb") as file:
                file.write(data)


def puzzle_pages():
    """The first puzzles, each with an editor that runs in the browser."""
    lines = []
    for number in browser.PUZZLES:
        puzzle = catalogue.puzzle(number)
        text = puzzle.docstring.partition("\n")[2].strip()
        text = re.sub(r"^NumPy: (.*)$", r"In NumPy: `\1`", text, flags=re.MULTILINE)
        page(
            f"learn/{puzzle.name}.md",
            WIDE
            + "\n\n".join(
                [
                    f"# {number}. {plain(puzzle.title)}",
                    text,
                    browser.puzzle(number),
                    next_of(number),
                ]
            )
            + "\n",
        )
        lines.append(f"    * [{number}. {plain(puzzle.title)}](learn/{puzzle.name}.md)")
    return lines


def next_of(number):
    """The line under a puzzle that leads on."""
    if number + 1 in browser.PUZZLES:
        following = catalogue.puzzle(number + 1)
        return f"[Next: {number + 1}. {plain(following.title)}]({following.name}.md)"
    return f"Puzzles {number + 1} to 30 need [numdiff to be installed](../how-to/learn.md)."


def written(folder):
    return [
        f"    * [{title_of((ROOT / 'docs' / folder / name).read_text(encoding='utf-8').lstrip('# '))}]"
        f"({folder}/{name})"
        for name in ORDER[folder]
    ]


ORDER = {
    "tutorials": (
        "first-run.md",
        "own-pictures.md",
        "presets.md",
        "trouble.md",
        "first-kernel.md",
        "reading-order.md",
    ),
    "how-to": (
        "learn.md",
        "film.md",
        "sample.md",
        "report.md",
        "serve.md",
        "forecast.md",
        "resume.md",
        "fine-tune.md",
        "autoencoder.md",
        "several-gpus.md",
        "evaluate.md",
        "convert.md",
        "benchmark.md",
        "check-kernels.md",
        "test-without-gpu.md",
        "python.md",
        "add-an-operation.md",
    ),
}


def main():
    browser_files()
    pictures()
    results()
    nav = [
        "* [numdiff](index.md)",
        "* Tutorials",
        *written("tutorials"),
        *notebook_pages(),
        "* How to",
        *written("how-to"),
        "* Chapters",
        *chapter_pages(),
        "* Puzzles in the browser",
        *puzzle_pages(),
        "* Guides",
        *guides(),
        "* Kernels",
        "    * [Measured figures](results.md)",
        *kernel_pages(),
        "* Reference",
        *reference(),
        "* [Glossary](glossary.md)",
        "* [Lessons](lessons.md)",
        "* Logs",
        *logs(),
    ]
    page("SUMMARY.md", "\n".join(nav) + "\n")


main()
