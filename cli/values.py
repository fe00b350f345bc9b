"""Types of values that options have: choices in any case, and numbers that messages write as one types them."""
import click

from numdiff.settings import say


class Choice(click.Choice):
    """One of several words, in upper or lower case; the value is the word as it stands among them."""

    def convert(self, value, param, ctx):  # click's own case_sensitive=False would also show them in lower case
        if isinstance(value, str) and value not in self.choices:
            value = next((choice for choice in self.choices if choice.casefold() == value.casefold()), value)
        return super().convert(value, param, ctx)


class Number(click.FloatRange):
    """A number within a range."""

    name = "number"

    def __init__(self, min=None, max=None, min_open=False, max_open=False):
        low, high = (limit if limit is None or limit % 1 else int(limit) for limit in (min, max))  # 1, and not 1.0
        super().__init__(low, high, min_open, max_open)

    def convert(self, value, param, ctx):
        try:
            number = float(value)
        except ValueError:
            self.fail(f"{value!r} is not a valid {self.name}.", param, ctx)
        below = self.min is not None and (number <= self.min if self.min_open else number < self.min)
        above = self.max is not None and (number >= self.max if self.max_open else number > self.max)
        if below or above:
            self.fail(f"{say(number)} is not in the range {self._describe_range()}.", param, ctx)
        return number
