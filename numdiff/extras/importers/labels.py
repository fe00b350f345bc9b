"""Which class an image file belongs to: by a labels file (.csv, .tsv, .json, .jsonl) or by the
folder that it is in."""

import csv
import json
import posixpath
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...data.names import is_blank, key
from ...errors import UsageError
from .classes import (
    IN_THE_FILES_ORDER,
    WHOLE,
    Labelled,
    check_names,
    is_missing,
    label_text,
    listed,
    number_classes,
)
from .pictures import looks_like_picture
from .source import SHOWN, examples, short

# Found without --labels; the last is NVlabs' name
NAMES = ("labels.csv", "labels.tsv", "labels.json", "labels.jsonl", "dataset.json")
# of Hugging Face's imagefolder, in any folder
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
TABLES, OTHERS = (".csv", ".tsv", ".txt"), (".json", ".jsonl")
FILE_COLUMNS = (
    "file",
    "filename",
    "file_name",
    "filepath",
    "path",
    "image",
    "image_path",
    "image_id",
    "img",
    "name",
    "id",
)
LABEL_COLUMNS = ("label", "labels", "class", "class_name", "category", "target", "y")
SPLITS = ("train", "training", "val", "valid", "validation", "dev", "test", "testing", "eval")
ODD = (
    "thumbnails",
    "thumbs",
    "masks",
    "annotations",
    "labels",
    "cache",
    "tmp",
    "temp",
    "trash",
    "backup",
)
LINE_LETTERS = 1 << 20  # of a table
# of a .json; of ImageNet's 1.3 million images 4 million
MAXIMUM_VALUES, MAXIMUM_COLUMNS = 5_000_000, 10_000
MAXIMUM_LINES = 2_000_000  # of a .jsonl, and of a table beyond two for each image
LINE = re.compile(rf"[^\r\n]{{0,{LINE_LETTERS + 1}}}(?:\r\n|\r|\n|)")


@dataclass
class Table:
    """The contents of a labels file: pairs of a file's name and its label."""

    pairs: Iterable
    classes: list | None = None  # the names of the classes, in the order of their indices
    notes: list = field(default_factory=list)  # sentences; some come with the pairs


# Folders and file names ---------------------------------------------------------------------------


def from_folders(names, order="numbers", folders=(), path=None):
    """The `Labelled` by the topmost level of folders that distinguishes the files; without classes
    where none does.

    folders: the paths of all folders; an empty one next to the class folders is a class, too. path:
    of the folder in which all is, for messages
    """
    prefix = common_folder(names)
    parts = [name[len(prefix) :].split("/") for name in names]
    if all(len(part) == 1 for part in parts):
        return Labelled(notes=[*_note_on_one_folder(prefix, folders)])
    loose = [name for name, part in zip(names, parts, strict=True) if len(part) == 1]
    if loose:
        found = sorted({part[0] for part in parts if len(part) > 1})
        verb = "is" if len(loose) == 1 else "are"
        raise UsageError(
            f"{examples(loose)} {verb} next to the class folders {examples(found)}: move them "
            "into a class folder, or add --labels none."
        )
    found = {part[0] for part in parts}
    empty = sorted(
        {
            folder[len(prefix) :].split("/")[0]
            for folder in folders
            if folder.startswith(prefix) and folder != prefix
        }
        - found
    )
    blank = [name for name in (*found, *empty) if is_blank(name)]
    if blank:
        raise UsageError(
            f"the class folder {blank[0]!r} has a name that cannot be seen: rename it."
        )
    result = number_classes([*(part[0] for part in parts), *empty], order)
    if result.merged:
        raise UsageError(
            f"the class folders {listed(result.merged[0])} differ only in spaces around the name, in "
            "Unicode's form or in .0, so they would be one class: rename or join them."
        )
    result.numbers = result.numbers[: len(parts)]
    if len(empty) == 1:
        result.notes.append(
            f"The class folder {empty[0]} holds no images and is kept as a class, so that the labels "
            "of the others stay: move it elsewhere to leave it out."
        )
    elif empty:
        result.notes.append(
            f"The class folders {examples(empty)} hold no images and are kept as classes, so that the "
            "labels of the others stay: move them elsewhere to leave them out."
        )
    result.notes += _notes_on_odd_folders(sorted(found), prefix, path)
    return result


def _note_on_one_folder(prefix, folders):
    """The note for folders that hold no images, where one folder holds all."""
    parts = prefix.split("/")[:-1]
    above = {"/".join(parts[:i]) for i in range(len(parts))}
    others = [
        folder
        for folder in folders
        if posixpath.dirname(folder) in above and not prefix.startswith(folder + "/")
    ]
    if others:
        yield (
            f"All images are in the folder {prefix[:-1]}, so there are no classes; {examples(others)} "
            f"{_plural(others, 'holds', 'hold')} none."
        )


def _notes_on_odd_folders(names, prefix, path):
    if all(name.lower() in SPLITS for name in names):
        first = shlex.quote(posixpath.join(str(path), prefix, names[0]))
        remedy = (
            "import a zip of one"
            if path is None
            else f"run `numdiff data import {first} OUT.h5` for one"
        )
        yield (
            f"The class folders {examples(names)} look like parts of a data set, and not like classes: {remedy} of "
            "them, or add --labels none."
        )
        return
    odd = [name for name in names if name.lower() in ODD]
    if odd:
        yield (
            f"The class {_plural(odd, 'folder', 'folders')} {examples(odd)} may be no "
            f"{_plural(odd, 'class', 'classes')}: move {_plural(odd, 'it', 'them')} elsewhere if so."
        )


def from_prefixes(names, order="numbers"):
    """The `Labelled` by what stands before the first _ of each file's name, as in guided-diffusion:
    cat_001.png."""
    files = [posixpath.basename(name) for name in names]
    without = [name for name in files if is_blank(name.split("_")[0]) or "_" not in name]
    if without:
        raise UsageError(
            f"{examples(without)} ha{'s' if len(without) == 1 else 've'} no _ after a class in the name: "
            "name the files like cat_001.png, or use another --labels."
        )
    return number_classes([file.split("_")[0] for file in files], order)


# Labels files -------------------------------------------------------------------------------------


def from_file(names, path, text, base="", order="numbers"):
    """The `Labelled` of image files by the text of a labels file; `base` is its folder."""
    find = _Finder(names, base, path)
    table = _parsed(path, text, find)
    if table is None:
        return Labelled(
            notes=[f"{path} says that there are no labels, so the images have no classes."]
        )
    values, missing, notes = _assign(
        names, [(path, find, table)], "add them to it, or add --labels none"
    )
    if not values:
        raise UsageError(
            f"{path} names none of the images (it has {missing or 'no line'}, the images are "
            f"{examples(names)}): fix the names in it, or add --labels none."
        )
    values = [values[i] for i in range(len(names))]
    if table.classes is None:
        result = number_classes(values, order)
    else:
        classes = check_names(table.classes, f"`classes` in {path}")
        result = Labelled(classes, _indices_in(classes, values, path), IN_THE_FILES_ORDER)
    result.notes = [*notes, *table.notes, *result.notes, f"The labels are those of {path}."]
    return result


def from_metadata(names, files, order="numbers"):
    """(`Labelled` of image files by Hugging Face's metadata files, paths of those that were read,
    []), or (None, [], notes on why not) where they name no labels. files: (path, text) of each,
    which names files below its folder."""
    tables, notes = [], []
    # folder of a file: indices of the images below it
    below = {path[: path.rfind("/") + 1]: [] for path, _ in files}
    for i, name in enumerate(names):
        end = -1
        while True:
            if name[: end + 1] in below:
                below[name[: end + 1]].append(i)
            if (end := name.find("/", end + 1)) < 0:
                break
    for path, text in files:
        base = path[: path.rfind("/") + 1]
        find = _Finder(names, base, path, below[base])
        table = _parsed(path, text, find, strict=True)
        if isinstance(table, str):
            notes.append(f"{path} is not used for labels, as {table}.")
        else:
            tables.append((path, find, table))
    paths = [path for path, *_ in tables]
    values, _, more = _assign(
        names, tables, "add them to it, or add --labels folders or --labels none"
    )
    if not values:
        return (
            None,
            [],
            notes
            + [f"{path} is not used for labels, as it names none of the images." for path in paths],
        )
    result = number_classes([values[i] for i in range(len(names))], order)
    result.notes = [
        *notes,
        *more,
        *(note for *_, table in tables for note in table.notes),
        *result.notes,
        f"The labels are those of {examples(paths)}; those of the folders come with --labels folders.",
    ]
    return result, paths, []


def _assign(names, tables, remedy):
    """({index of an image: label}, examples of other names, notes) by (path, finder, `Table`)s; {}
    where they name no image.

    A `UsageError` where an image has two labels or none.
    """
    # of the names that are no images', only the first are kept
    values, missing, count, paths = {}, [], 0, []
    for path, find, table in tables:
        paths.append(path)
        for name, value in table.pairs:
            index = find(name)
            if index is None:
                count += 1
                missing.append(name) if count <= SHOWN + 1 else None
            elif is_missing(value):
                raise UsageError(
                    f"{path} has no label for {names[index]} ({short(value)}): write a word or a number, "
                    "or add --labels none."
                )
            elif _differ(values.setdefault(index, value), value):
                raise UsageError(
                    f"{path} gives {names[index]} two labels, {short(values[index])} and "
                    f"{short(value)}: remove one."
                )
    path = examples(paths)
    if not values:
        return values, examples(missing), []
    without = [name for i, name in enumerate(names) if i not in values]
    if without:
        also = (
            f"; it names {examples(missing)}, which {_plural(missing, 'is', 'are')} not there"
            if missing
            else ""
        )
        raise UsageError(
            f"{path} gives no label to {len(without)} of {len(names)} images ({examples(without)}{also}): "
            f"{remedy}."
        )
    return (
        values,
        "",
        [f"{path} also names {count:,} that are not among the images ({examples(missing)})."][
            :count
        ],
    )


def _differ(a, b):
    return (
        a is not b
        and (type(a) is not type(b) or a != b)
        and key(label_text(a)) != key(label_text(b))
    )


def _indices_in(classes, values, path):
    """The index of each label in the names that the file itself lists; labels are indices, or
    names."""
    texts = [key(label_text(value)) for value in values]
    distinct = dict.fromkeys(texts)
    by_name = {key(name): i for i, name in enumerate(classes)}
    by_index = {
        text: int(text.split(".")[0])
        for text in distinct
        if WHOLE.fullmatch(text) and len(text) < 19
    }
    by_index = {text: i for text, i in by_index.items() if 0 <= i < len(classes)}
    names, indices = (all(text in found for text in distinct) for found in (by_name, by_index))
    unclear = [
        text
        for text in distinct
        if by_name.get(text, i := by_index.get(text)) != i and i is not None
    ]
    if unclear and names == indices:
        raise UsageError(
            f"{path} has the label {_shown(unclear[0])}, which is the name of one of its classes and the "
            "index of another: give the names as labels, and choose names that are no numbers."
        )
    known = {**by_name, **by_index} if indices else {**by_index, **by_name}
    unknown = [text for text in distinct if text not in known]
    if unknown:
        raise UsageError(
            f"{path} has the label {_shown(unknown[0])}, which is none of its {len(classes)} classes: fix "
            "it."
        )
    return [known[text] for text in texts]


def _shown(text):
    return text if WHOLE.fullmatch(text) else short(text)


class _Finder:
    """Finds the image that a labels file means: by its path, by the end of its path, or by its name
    alone, with or without the suffix."""

    def __init__(self, names, base, path, indices=None):
        """indices: of the images that may be meant, all by default."""
        self.path, self.base, self.names = path, key(base), names
        self.common = len(common_folder(names) if indices is None else base)
        self.spelled, self.spelled_base = {}, base
        # key -> index, or list of the indices of several images
        self.exact, self.files, self.stems = {}, {}, {}
        for i in range(len(names)) if indices is None else indices:
            name = names[i]
            self.spelled[name], name = i, key(name)
            file = posixpath.basename(name)
            for found, text in (
                (self.exact, name),
                (self.files, file),
                (self.stems, posixpath.splitext(file)[0]),
            ):
                if text in found:
                    found[text] = [
                        *(found[text] if isinstance(found[text], list) else [found[text]]),
                        i,
                    ]
                else:
                    found[text] = i

    def __call__(self, name):
        for spelled in (f"{self.spelled_base}{name}", name):
            if spelled in self.spelled:
                return self.spelled[spelled]
        name = key(posixpath.normpath(key(name).replace("\\", "/")))
        for found in (
            self.exact.get(self.base + name),
            self.exact.get(name),
            self._by_end(self.files, name, False),
            self._by_end(self.stems, name, True),
        ):
            if isinstance(found, list):
                raise UsageError(
                    f"{self.path} names {short(name)}, and several images have this name: add their "
                    "folders."
                )
            if found is not None:
                return found
        return None

    def _by_end(self, table, name, stem):
        """The index of the image, or a list of several, whose path ends in `name`, or in whose path
        `name` ends."""
        found = table.get(posixpath.basename(name))
        if found is None:
            return None
        found = [
            i
            for i in (found if isinstance(found, list) else [found])
            if any(
                _ends(key(posixpath.splitext(path)[0] if stem else path), name)
                for path in (self.names[i], self.names[i][self.common :])
            )
        ]
        return found[0] if len(found) == 1 else found or None


def _ends(a, b):
    """Whether one path is the end of the other."""
    a, b = "/" + a.lstrip("/"), "/" + b.lstrip("/")
    return a.endswith(b) or b.endswith(a)


# Parsing ------------------------------------------------------------------------------------------


def _parsed(path, text, find, strict=False):
    """The `Table` of a labels file; None if it says that there are no labels.

    strict: a file without columns for files and labels is none; the result is then a string that
    says so
    """
    ending = posixpath.splitext(path)[1].lower()
    if ending in TABLES:
        return _parse_table(path, text, find, strict)
    return (_parse_lines if ending == ".jsonl" else _parse_json)(path, text, strict)


class _Twice(ValueError):
    """A name stands twice in one object."""


def _object(pairs):
    found = {}
    for name, value in pairs:
        if name in found and repr(found[name]) != repr(value):
            raise _Twice(
                f"{short(name)} stands twice in it, with {short(found[name])} and {short(value)}"
            )
        found[name] = value
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _loads(path, text):
    # an empty list of two letters takes 64 bytes
    if sum(text.count(mark) for mark in ",[{") > MAXIMUM_VALUES:
        raise UsageError(
            f"{path} has more than {MAXIMUM_VALUES:,} values: write the labels as labels.csv."
        )
    try:
        return DECODER.decode(text)
    except _Twice as error:
        raise UsageError(f"{path} gives two labels: {error}; remove one.") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is not valid JSON ({error}): fix it, or add --labels none."
        ) from None


class _Lines:
    """The objects of a text with one on each line, parsed again by each iteration, as all would
    take much memory."""

    def __init__(self, path, text):
        self.path, self.text = path, text

    def __iter__(self):
        for number, line in enumerate(LINE.finditer(self.text), 1):
            if line[0].strip():
                row = _loads(f"line {number:,} of {self.path}", line[0])
                if not isinstance(row, dict):
                    raise _unknown_form(self.path)
                yield row


def _parse_lines(path, text, strict):
    """JSON, one object a line."""
    if not text.strip():
        raise UsageError(f"{path} is empty: write a line for every image, or add --labels none.")
    if max(map(text.count, "\r\n")) > MAXIMUM_LINES:
        raise UsageError(
            f"{path} has more than {MAXIMUM_LINES:,} lines: write the labels as labels.csv."
        )
    table = _parse_rows(path, _Lines(path, text), strict)
    if table is None:
        raise _unknown_form(path)
    return table


def _parse_json(path, text, strict):
    data, classes = _loads(path, text), None
    if isinstance(data, dict) and "labels" in data and not isinstance(data["labels"], (str, int)):
        data, classes = data["labels"], data.get("classes")
        if classes is not None and not isinstance(classes, list):
            raise UsageError(f"`classes` in {path} must be a list of names: fix it.")
    if data is None:
        return None
    if isinstance(data, dict):
        return Table(data.items(), classes)
    if isinstance(data, list) and all(isinstance(row, list) and len(row) == 2 for row in data):
        odd = [
            row[0] for row in data if isinstance(row[0], bool) or not isinstance(row[0], str | int)
        ]
        if odd:
            raise UsageError(
                f"{path} has {short(odd[0])} where the name of a file should be: fix it."
            )
        return Table(data, classes)
    rows = isinstance(data, list) and data and all(isinstance(row, dict) for row in data)
    table = _parse_rows(path, data, strict) if rows else None
    if table is None:
        raise _unknown_form(path)
    if not isinstance(table, str):
        table.classes = classes
    return table


def _unknown_form(path):
    return UsageError(
        f'{path} does not have a format that numdiff knows: use {{"a.png": "cat", …}} or '
        '{"labels": [["a.png", 3], …]}.'
    )


def _parse_rows(path, rows, strict):
    """The `Table` of objects, each of one file, which are iterated twice; None if it is none."""
    keys = {}
    for row in rows:
        keys.update(dict.fromkeys(row))
        if len(keys) > MAXIMUM_COLUMNS:
            return None
    keys = list(keys)
    columns = _columns(path, [name.strip().lower() for name in keys], strict)
    if isinstance(columns, str):
        return columns
    file, label, notes = columns
    if label is None:
        return None

    def pairs():
        for row in rows:
            name = row.get(keys[file])
            if isinstance(name, bool) or not isinstance(name, str | int):
                raise UsageError(
                    f"{path} has {short(name)} where the name of a file should be: fix it."
                )
            yield name, row.get(keys[label])

    return Table(pairs(), None, notes)


def _parse_table(path, text, find, strict):
    """The `Table` of text with the separator , ; or tab, with or without a heading."""
    notes = []
    rows = _rows(path, text, find, strict, notes)
    first = next(rows, None)  # the heading is judged now, the other lines as they are read
    if isinstance(first, str):
        return first

    def pairs():
        if first is not None:
            yield first
        yield from rows

    return Table(pairs(), None, notes)


def _rows(path, text, find, strict, notes):
    """Pairs of file and label; or one string that says why the table has none."""
    first = LINE.match(text)[0]
    separator = "\t" if path.lower().endswith(".tsv") else max(",;\t", key=first.count)
    unread = [0]  # letters since the last row

    def lines():
        most = MAXIMUM_LINES + 2 * len(find.names)
        for number, line in enumerate(LINE.finditer(text)):
            if number > most:
                raise UsageError(
                    f"{path} has more than {most:,} lines for {len(find.names):,} images: check it."
                )
            unread[0] += len(line[0])
            if unread[0] > LINE_LETTERS:
                raise csv.Error(f"a line of more than {LINE_LETTERS:,} letters")
            yield line[0]

    heading, file, label, width = None, 0, 1, 2
    try:
        for row in csv.reader(
            lines(), delimiter=separator, skipinitialspace=separator != "\t", strict=True
        ):
            unread[0] = 0
            if not any(cell.strip() for cell in row):
                continue
            if heading is None:
                heading = strict or _is_heading(row, find)
                if heading:
                    columns = _columns(path, [cell.strip().lower() for cell in row], strict)
                    if isinstance(columns, str):
                        yield columns
                        return
                    file, label, width = columns[0], columns[1], len(row)
                    notes += columns[2]
                    continue
            if any(cell.strip() for cell in row[width:]):
                raise UsageError(
                    f"{path} has a line of {len(row)} columns, {short(separator.join(row))}, and {width} "
                    f"are {'in its heading' if heading else 'expected without a heading'}: write a text "
                    f"that holds {separator!r} in quotes, or add a heading such as `file,label`."
                )
            if (
                label is None
                or len(row) <= max(file, label)
                or is_missing(row[label])
                or is_missing(row[file])
            ):
                what = (
                    "file name"
                    if label is not None and len(row) > file and is_missing(row[file])
                    else "label"
                )
                raise UsageError(
                    f"{path} has a line without a {what}, {short(separator.join(row))}: write "
                    "`file,label` on each."
                )
            yield row[file], row[label]
    except csv.Error as error:
        raise UsageError(
            f"{path} is not a table of text ({error}): fix it, or add --labels none."
        ) from None
    if heading is None:
        raise UsageError(
            f"{path} is empty: write a line `file,label` for every image, or add --labels none."
        )


def _is_heading(row, find):
    words = {cell.strip().lower() for cell in row}
    if words.intersection(FILE_COLUMNS) and words.intersection(LABEL_COLUMNS):
        return True
    return find(row[0]) is None and not looks_like_picture(row[0].strip(), b"")


def _columns(path, heading, strict=False):
    """(column of the file, column of the label or None if there is only one column, notes).

    strict: both must have known names; else the result is a string that says which is missing
    """
    file = next((heading.index(word) for word in FILE_COLUMNS if word in heading), None)
    labels = [
        heading.index(word)
        for word in LABEL_COLUMNS
        if word in heading and heading.index(word) != file
    ]
    if strict and (file is None or not labels):
        missing = "file_name" if file is None else "label"
        return f"it has no column {missing} (its columns are {examples(heading)})"
    file = 0 if file is None else file
    rest = [i for i in range(len(heading)) if i != file]
    if len(labels) > 1:
        return (
            file,
            labels[0],
            [
                f"{path} has several columns that may hold labels; they are read from "
                f"{heading[labels[0]]!r}, and not from {examples([heading[i] for i in labels[1:]])}."
            ],
        )
    if labels:
        return file, labels[0], []
    if len(rest) > 1:
        raise UsageError(
            f"{path} has the columns {examples(heading)}, none of which is called label: call the one "
            "with the labels so."
        )
    return (
        file,
        rest[0] if rest else None,
        [f"The first line of {path}, {examples(heading)}, is taken for a heading."],
    )


def _plural(names, one, several):
    return one if len(names) == 1 else several


def common_folder(names):
    """The deepest folder, with its slash, that contains all the files; "" for the root."""
    if not names:
        return ""
    folder = posixpath.commonpath([posixpath.dirname("/" + name) for name in names])[1:]
    return folder + "/" if folder else ""
