"""Types of values that options have: choices in any case, and numbers that messages write as one
types them."""

import click

from numdiff.setting import say, say_limit
from numdiff.sizes import as_size


class Choice(click.Choice):
    """One of several words, in upper or lower case; the value is the word as it stands among them."""

    # click's own case_sensitive=False would also show them in lower case
    def convert(self, value, param, ctx):
        if isinstance(value, str) and value not in self.choices:
            value = next(
                (choice for choice in self.choices if choice.casefold() == value.casefold()), value
            )
        return super().convert(value, param, ctx)


class Number(click.FloatRange):
    """A number within a range."""

    name = "number"

    def convert(self, value, param, ctx):
        try:
            number = float(value)
        except ValueError:
            self.fail(f"{value!r} is not a valid {self.name}.", param, ctx)
        below = self.min is not None and (
            number <= self.min if self.min_open else number < self.min
        )
        above = self.max is not None and (
            number >= self.max if self.max_open else number > self.max
        )
        if below or above:
            self.fail(f"{say(number)} is not in the range {self._describe_range()}.", param, ctx)
        return number

    def _describe_range(self):  # as click's, which help shows, but 1 and not 1.0, and 5.96046e-08
        low, high = "<" if self.min_open else "<=", "<" if self.max_open else "<="
        if self.max is None:
            return f"x{low.replace('<', '>')}{say_limit(self.min)}"
        return (
            f"{'' if self.min is None else say_limit(self.min) + low}x{high}{say_limit(self.max)}"
        )


class Size(click.ParamType):
    """A side in pixels, or HxW: an int, or (height, width), each from 1 to a maximum."""

    name = "size"

    def __init__(self, most):
        self.most = most

    def convert(self, value, param, ctx):
        if not isinstance(value, str):
            return value
        sides = value.lower().replace("×", "x").split("x")
        if len(sides) > 2 or not all(side.strip().isdecimal() for side in sides):
            self.fail(
                f"{value!r} is no size: give a whole number, or HxW, such as 256x384.", param, ctx
            )
        if not all(len(side) < 9 and 1 <= int(side) <= self.most for side in sides):
            self.fail(f"{value} is not in the range 1<=x<={self.most}.", param, ctx)
        return as_size((int(sides[0]), int(sides[-1])))
