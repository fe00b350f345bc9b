"""Prints the lower bounds of setup.cfg as pip's constraints: each dependency at the lowest version
that it allows.

    python .ci/lowest.py > lowest.txt && pip install -c lowest.txt -e .
"""

import configparser
import pathlib
import re

BOUND = re.compile(
    r"(?P<name>[\w.-]+)(\[\w,]+\])?\s*(>=|==)\s*(?P<version>[\d.]+?)(?P<any>\.\*)?\s*(,.*|;.*)?"
)


def lowest(path="setup.cfg"):
    """{name: version} of the requirements that have a lower bound; of `==0.30.*` that is 0.30.0."""
    config = configparser.ConfigParser()
    config.read(path, encoding="utf-8")
    lines = [config["options"]["install_requires"], *config["options.extras_require"].values()]
    found = (BOUND.fullmatch(line.strip()) for line in "\n".join(lines).splitlines())
    return {
        match["name"]: match["version"] + (".0" if match["any"] else "") for match in found if match
    }


if __name__ == "__main__":
    for name, version in lowest(pathlib.Path(__file__).resolve().parents[1] / "setup.cfg").items():
        print(f"{name}=={version}")
