"""Which class an image file belongs to: by a labels file (.csv, .tsv, .json) or by the folder that it lies in."""
import csv
import io
import json
import posixpath

from ...errors import UsageError
from .source import number_classes

NAMES = ("labels.csv", "labels.tsv", "labels.json", "dataset.json")  # found without --labels; the last is NVlabs' name
FILE_COLUMNS = ("file", "filename", "file_name", "filepath", "path", "image", "image_path", "image_id", "img", "name",
                "id")
LABEL_COLUMNS = ("label", "labels", "class", "class_name", "category", "target", "y")
SHOWN = 3  # names given as examples in a message


def from_folders(names):
    """(classes, labels) by the topmost folder that tells the files apart; (None, None) where there are no folders."""
    prefix = common_folder(names)
    parts = [name[len(prefix):].split("/") for name in names]
    if all(len(part) == 1 for part in parts):
        return None, None
    loose = [name for name, part in zip(names, parts, strict=True) if len(part) == 1]
    if loose:
        folders = sorted({part[0] for part in parts if len(part) > 1})
        raise UsageError(f"{examples(loose)} lie{'s' * (len(loose) == 1)} beside the class folders {examples(folders)} "
                         "and so belong to no class: move them, or add --labels none.")
    return number_classes([part[0] for part in parts])


def from_file(names, path, text, base=""):
    """(classes, labels, note or None) for image files by a labels file whose text this is; `base` is its folder."""
    is_json = path.lower().endswith(".json")
    pairs, classes = _parse_json(path, text) if is_json else _parse_table(path, text, names, base)
    if pairs is None:
        return None, None, None
    find = _Finder(names, base, path)
    values, missing = {}, []
    for name, value in pairs:
        index = find(name)
        if index is None:
            missing.append(name)
        elif values.setdefault(index, value) != value:
            raise UsageError(f"{path} gives {names[index]} two labels, {values[index]!r} and {value!r}: remove one.")
    if not values:
        raise UsageError(f"{path} names none of the images (it has {examples(missing)}, the images are "
                         f"{examples(names)}): mend the names in it, or add --labels none.")
    without = [name for i, name in enumerate(names) if i not in values]
    if without:
        raise UsageError(f"{path} gives no label to {len(without)} of {len(names)} images ({examples(without)}): "
                         "add them to it, or add --labels none.")
    note = f"{path} also names {len(missing):,} that are not among the images ({examples(missing)})."
    values = [values[i] for i in range(len(names))]
    if classes is None:
        return *number_classes(values), note if missing else None
    return [str(name) for name in classes], [_index_in(classes, v, path) for v in values], note if missing else None


def _index_in(classes, value, path):
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(classes):
        return value
    if value in classes:
        return classes.index(value)
    raise UsageError(f"{path} has the label {value!r}, which is none of its {len(classes)} classes: mend it.")


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
            raise UsageError(f"{self.path} names {name!r}, and several images are called so: write their folders too.")
        return self.loose.get(key)


def _parse_json(path, text):
    """(pairs of file name and label, classes or None); (None, None) where the file says that there are no labels."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid JSON ({error}): mend it, or add --labels none.") from None
    classes = None
    if isinstance(data, dict) and "labels" in data and not isinstance(data["labels"], (str, int)):
        data, classes = data["labels"], data.get("classes")
        if classes is not None and not isinstance(classes, list):
            raise UsageError(f"`classes` in {path} must be a list of names: mend it.")
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
    raise UsageError(f"{path} does not have a form that numdiff knows: use {{\"a.png\": \"cat\", …}} or "
                     "{\"labels\": [[\"a.png\", 3], …]}.")


def _parse_table(path, text, names, base):
    """(pairs of file name and label, None) of a table with the separator , ; or tab, with or without a heading."""
    lines = text.splitlines()
    separator = max(",;\t", key=lines[0].count) if lines else ","
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=separator))
    except csv.Error as error:
        raise UsageError(f"{path} is not a table of text ({error}): mend it, or add --labels none.") from None
    rows = [row for row in rows if any(cell.strip() for cell in row)]
    if not rows:
        raise UsageError(f"{path} is empty: write a line `file,label` for every image, or add --labels none.")
    file, label = 0, 1
    if _Finder(names, base, path)(rows[0][0]) is None:  # a heading
        file, label = _columns([cell.strip().lower() for cell in rows.pop(0)])
    pairs = []
    for row in rows:
        if label is None or len(row) <= max(file, label):
            raise UsageError(f"{path} has a line without a label, {separator.join(row)!r}: write `file,label` on each.")
        pairs.append((row[file], row[label]))
    return pairs, None


def _columns(heading):
    """Which columns hold the file and the label; the second None where there is but one column."""
    file = next((heading.index(word) for word in FILE_COLUMNS if word in heading), 0)
    rest = [i for i in range(len(heading)) if i != file]
    label = next((heading.index(word) for word in LABEL_COLUMNS if word in heading), rest[0] if rest else None)
    return file, label


def common_folder(names):
    """The folder, with its slash, that all the files lie in, however deep; "" where it is the root."""
    if not names:
        return ""
    folder = posixpath.commonpath([posixpath.dirname("/" + name) for name in names])[1:]
    return folder + "/" if folder else ""


def examples(names):
    """The first few names, as words of a sentence."""
    names = [str(name) for name in names]
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
