"""What `numdiff kernels list` and `numdiff kernels show` print: operations, their versions and
their figures."""

import inspect

from ...errors import UsageError, near_miss
from ...kernels.figures import lines_of
from ...kernels.operation import all_operations


def record_of(name):
    """The record of this name, or of this function; a `UsageError` for a name that no operation
    has."""
    known, short = (
        {record.name: record for record in all_operations()},
        name.removesuffix("_forward"),
    )
    if short not in known:
        raise UsageError(
            f"there is no operation {name!r}{near_miss(name, known)}: numdiff kernels list prints them."
        )
    return known[short]


def description(name):
    """Text about the operation of this name: signature, what it does, where it stands, versions,
    measured figures."""
    record = record_of(name)
    lines = [
        f"{record.call.__name__}{inspect.signature(record.call)}",
        "",
        inspect.getdoc(record.call),
        "",
        f"file       {record.module.replace('.', '/')}.py",
    ]
    if record.backward:
        lines.append(f"backward   {record.backward.name}")
    if record.versions:
        width = max(len(version.name) for version in record.versions)
        lines += ["", "versions"] + [
            f"  {version.number}  {version.name:{width}}  "
            + ", ".join(
                filter(
                    None,
                    [
                        version.requires and f"compute capability {version.requires}",
                        version.dtypes and " and ".join(version.dtypes),
                    ],
                )
            )
            for version in record.versions
        ]
    measured = lines_of(record.call.__name__)
    return "\n".join(line.rstrip() for line in [*lines, "", *(measured or ["not measured yet"])])
