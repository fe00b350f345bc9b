"""Docstrings as Markdown: the sections of the project's docstrings (MATHEMATICS, SHAPES, …) become
headed blocks."""

import re

try:
    from griffe import Extension
except ImportError:  # the pages of the kernels need `as_markdown` alone
    Extension = object

SECTION = re.compile(r"^([A-Z][A-Z ,]{2,})(?: {2,}(.*))?\n((?:(?: {4}.*)?\n)+)", re.MULTILINE)
BLOCK = re.compile(r"(?:(?<=\n\n)|\A)((?: {4}.*\n(?:\n(?= {4}))?)+)")


def as_markdown(text):
    """A docstring with its sections as headed blocks of text, and brackets that are no links."""

    def section(found):
        name, first, body = found.groups()
        lines = [line[4:] for line in body.rstrip().splitlines()]
        if not any(re.search(r"\S {3,}\S", line) for line in lines) and name != "MATHEMATICS":
            return (
                f"\n**{name.capitalize()}**\n\n" + prose([*filter(None, [first]), *lines]) + "\n\n"
            )
        return (
            f"\n**{name.capitalize()}**\n\n```text\n"
            + "\n".join(filter(None, [first, *lines]))
            + "\n```\n\n"
        )

    text = SECTION.sub(section, f"{text.strip()}\n")
    parts = re.split(r"(```.*?```)", text, flags=re.DOTALL)
    for i in range(0, len(parts), 2):
        parts[i] = BLOCK.sub(
            lambda found: "```text\n" + re.sub(r"(?m)^ {4}", "", found[1]) + "```\n", parts[i]
        )
    parts = re.split(r"(```.*?```|`[^`\n]*`)", "".join(parts), flags=re.DOTALL)
    return "".join(
        part
        if i % 2
        else part.replace("[", "\\[").replace("*", "\\*")
        if "**" not in part
        else part.replace("[", "\\[")
        for i, part in enumerate(parts)
    )


def prose(lines):
    """Lines of a section as Markdown: a list where lines hang under the first of each item, else a
    paragraph."""
    items, hangs = [], any(line.startswith(" ") for line in lines)
    for line in lines:
        if items and (line.startswith(" ") or not hangs):
            items[-1] += f" {line.strip()}"
        else:
            items.append(line.strip())
    return items[0] if len(items) == 1 else "\n".join(f"* {item}" for item in items)


class Sections(Extension):
    """Rewrites the docstring of every object that the reference shows."""

    def on_instance(self, *, node=None, obj=None, **_):
        if obj is not None and obj.docstring and not getattr(obj.docstring, "is_markdown", False):
            obj.docstring.value = as_markdown(obj.docstring.value)
            obj.docstring.is_markdown = True
