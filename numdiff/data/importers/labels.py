"""Which class an image file belongs to: by a labels file (.csv, .tsv, .json) or by the folder that it lies in."""
import csv
import json
import posixpath
import re

from ...errors import UsageError
from .source import number_classes, short

NAMES = ("labels.csv", "labels.tsv", "labels.json", "dataset.json")  # found without --labels; the last is NVlabs' name
FILE_COLUMNS = ("file", "filename", "file_name", "filepath", "path", "image", "image_path", "image_id", "img", "name",
                "id")
LABEL_COLUMNS = ("label", "labels", "class", "class_name", "category", "target", "y")
SHOWN, SHOWN_LETTERS = 3, 80  # names given as examples in a message, and how much of one
LINE_LETTERS = 1 << 20  # of a table
LINE = re.compile(rf"[^\r\n]{{0,{LINE_LETTERS + 1}}}(?:\r\n|\r|\n|)")


def from_folders(names, order="numbers"):
    """(classes, labels) by the topmost level of folders that distinguishes the files; (None, None) without folders."""
    prefix = common_folder(names)
    parts = [name[len(prefix):].split("/") for name in names]
    if all(len(part) == 1 for part in parts):
        return None, None
    loose = [name for name, part in zip(names, parts, strict=True) if len(part) == 1]
    if loose:
        folders = sorted({part[0] for part in parts if len(part) > 1})
        raise UsageError(f"{examples(loose)} lie{'s' * (len(loose) == 1)} beside the class folders {examples(folders)} "
                         "and so belong to no class: move them, or add --labels none.")
    return number_classes([part[0] for part in parts], order)


def from_prefixes(names, order="numbers"):
    """(classes, labels) by what stands before the first _ of each file's name, as in guided-diffusion: cat_001.png."""
    files = [posixpath.basename(name) for name in names]
    without = [name for name in files if "_" not in name]
    if without:
        raise UsageError(f"{examples(without)} ha{'s' if len(without) == 1 else 've'} no _ after a class in the name: "
                         "name the files like cat_001.png, or use another --labels.")
    return number_classes([file.split("_")[0] for file in files], order)


def from_file(names, path, text, base="", order="numbers"):
    """(classes, labels, note or None) for image files by the text of a labels file; `base` is its folder."""
    is_json = path.lower().endswith(".json")
    pairs, classes = _parse_json(path, text) if is_json else _parse_table(path, text, names, base)
    if pairs is None:
        return None, None, None
    find = _Finder(names, base, path)
    values, missing, count = {}, [], 0  # of the names that are no images', only the first are kept
    for name, value in pairs:
        index = find(name)
        if index is None:
            count += 1
            missing.append(name) if count <= SHOWN + 1 else None
        elif values.setdefault(index, value) != value:
            raise UsageError(f"{path} gives {names[index]} two labels, {short(values[index])} and "
                             f"{short(value)}: remove one.")
    if not values:
        raise UsageError(f"{path} names none of the images (it has {examples(missing)}, the images are "
                         f"{examples(names)}): fix the names in it, or add --labels none.")
    without = [name for i, name in enumerate(names) if i not in values]
    if without:
        raise UsageError(f"{path} gives no label to {len(without)} of {len(names)} images ({examples(without)}): "
                         "add them to it, or add --labels none.")
    note = f"{path} also names {count:,} that are not among the images ({examples(missing)})."
    values = [values[i] for i in range(len(names))]
    if classes is None:
        return *number_classes(values, order), note if missing else None
    index = {name: i for i, name in reversed(list(enumerate(classes))) if isinstance(name, (str, int))}
    numbers = [_index_in(classes, index, value, path) for value in values]
    return [str(name) for name in classes], numbers, note if missing else None


def _index_in(classes, index, value, path):
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(classes):
        return value
    if isinstance(value, (str, int)) and value in index:
        return index[value]
    raise UsageError(f"{path} has the label {short(value)}, which is none of its {len(classes)} classes: fix it.")


class _Finder:
    """Finds the image that a labels file means: by its path, or by its name alone, with or without the suffix."""

    def __init__(self, names, base, path):
        self.path = path
        self.exact = {name: i for i, name in enumerate(names)}
        self.base = base
        self.loose = {}  # name alone -> index, or None where several images have it
        for i, name in enumerate(names):
            file = posixpath.basename(name)
            for key in {file, posixpath.splitext(file)[0], posixpath.splitext(name[len(base):])[0]}:
                self.loose[key] = i if self.loose.get(key, i) == i else None

    def __call__(self, name):
        name = posixpath.normpath(str(name).strip().replace("\\", "/"))
        for key in (self.base + name, name):
            if key in self.exact:
                return self.exact[key]
        key = name if name in self.loose else posixpath.basename(name)
        if key in self.loose and self.loose[key] is None:
            raise UsageError(f"{self.path} names {short(name)}, and several images have this name: add their folders.")
        return self.loose.get(key)


def _parse_json(path, text):
    """(pairs of file name and label, classes or None); (None, None) if the file says that there are no labels."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid JSON ({error}): fix it, or add --labels none.") from None
    classes = None
    if isinstance(data, dict) and "labels" in data and not isinstance(data["labels"], (str, int)):
        data, classes = data["labels"], data.get("classes")
        if classes is not None and not isinstance(classes, list):
            raise UsageError(f"`classes` in {path} must be a list of names: fix it.")
    if data is None:
        return None, None
    if isinstance(data, dict):
        return list(data.items()), classes
    if isinstance(data, list) and all(isinstance(row, (list, tuple)) and len(row) == 2 for row in data):
        return [tuple(row) for row in data], classes
    if isinstance(data, list) and data and all(isinstance(row, dict) for row in data):
        keys = list(data[0])
        file, label = _columns([key.lower() for key in keys])
        if label is not None and all(keys[file] in row and keys[label] in row for row in data):
            return [(row[keys[file]], row[keys[label]]) for row in data], classes
    raise UsageError(f"{path} does not have a format that numdiff knows: use {{\"a.png\": \"cat\", …}} or "
                     "{\"labels\": [[\"a.png\", 3], …]}.")


def _parse_table(path, text, names, base):
    """(pairs of file name and label, None) of a table with the separator , ; or tab, with or without a heading."""
    return _rows(path, text, _Finder(names, base, path)), None


def _rows(path, text, find):
    separator = max(",;\t", key=LINE.match(text)[0].count) if text.strip() else ","
    unread = [0]  # letters since the last row

    def lines():
        for line in LINE.finditer(text):
            unread[0] += len(line[0])
            if unread[0] > LINE_LETTERS:
                raise csv.Error(f"a line of more than {LINE_LETTERS:,} letters")
            yield line[0]

    heading, file, label = None, 0, 1
    try:
        for row in csv.reader(lines(), delimiter=separator):
            unread[0] = 0
            if not any(cell.strip() for cell in row):
                continue
            if heading is None:
                heading = find(row[0]) is None
                if heading:
                    file, label = _columns([cell.strip().lower() for cell in row])
                    continue
            if label is None or len(row) <= max(file, label):
                raise UsageError(f"{path} has a line without a label, {short(separator.join(row))}: write `file,label` "
                                 "on each.")
            yield row[file], row[label]
    except csv.Error as error:
        raise UsageError(f"{path} is not a table of text ({error}): fix it, or add --labels none.") from None
    if heading is None:
        raise UsageError(f"{path} is empty: write a line `file,label` for every image, or add --labels none.")


def _columns(heading):
    """Which columns hold the file and the label; the second is None if there is only one column."""
    file = next((heading.index(word) for word in FILE_COLUMNS if word in heading), 0)
    rest = [i for i in range(len(heading)) if i != file]
    label = next((heading.index(word) for word in LABEL_COLUMNS if word in heading), rest[0] if rest else None)
    return file, label


def common_folder(names):
    """The deepest folder, with its slash, that contains all the files; "" for the root."""
    if not names:
        return ""
    folder = posixpath.commonpath([posixpath.dirname("/" + name) for name in names])[1:]
    return folder + "/" if folder else ""


def examples(names):
    """The first few names as part of a sentence."""
    shown = [str(name)[:SHOWN_LETTERS] for name in names[:SHOWN]]
    return ", ".join(shown) + (", …" if len(names) > SHOWN else "")
