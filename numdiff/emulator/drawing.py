"""A picture of rectangles, lines and text, as SVG or PNG: what pictures.py and still.py draw with.

Coordinates are pixels from the upper left corner, y downwards; colours are "#rrggbb".
"""

import functools
from html import escape

from .writing import WRITERS

INK, PALE, GRID = "#1b1f24", "#6b7280", "#c9ced6"
FAULT = "#c0392b"
# Eight colours that most colour-blind readers can distinguish, too, light enough for dark text.
COLOURS = ("#8ecae6", "#ffd166", "#a3d9a5", "#f4a6b7", "#cdb4f0", "#d8cfa0", "#9fe0d6", "#f6b98c")
FONTS = (
    ("DejaVuSans.ttf", "Arial.ttf", "LiberationSans-Regular.ttf"),
    ("DejaVuSans-Bold.ttf", "Arial Bold.ttf", "LiberationSans-Bold.ttf"),
)


class Picture:
    """A list of shapes; `svg()` gives it as text, `png(path)` and `save(path)` write it to a file."""

    def __init__(self, width, height):
        self.width, self.height = int(width), int(height)
        self.shapes = []

    def rectangle(
        self, x, y, width, height, fill=None, stroke=None, thickness=1.0, hatch=None, tip=None
    ):
        """hatch: colour of slanting lines over it; tip: what an SVG viewer shows under the pointer."""
        self.shapes.append(
            ("rectangle", (x, y, width, height), fill, stroke, thickness, hatch, tip)
        )

    def line(self, x0, y0, x1, y1, stroke=INK, thickness=1.0, tip=None):
        self.shapes.append(("line", (x0, y0, x1, y1), stroke, thickness, tip))

    def circle(self, x, y, radius, fill, tip=None):
        self.shapes.append(("circle", (x, y, radius), fill, tip))

    def text(self, x, y, text, size=12, anchor="middle", bold=False, colour=INK):
        """One line of text, its middle at height y; anchor: "start", "middle" or "end" of the text
        is at x."""
        self.shapes.append(("text", (x, y), str(text), size, anchor, bold, colour))

    # SVG ------------------------------------------------------------------------------------------

    def svg(self):
        """The picture as the text of an SVG file."""
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" font-family="DejaVu Sans, Arial, sans-serif">',
            f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>',
        ]
        for colour in sorted({s[5] for s in self.shapes if s[0] == "rectangle" and s[5]}):
            parts.append(
                f'<pattern id="hatch{colour[1:]}" width="8" height="8" patternUnits="userSpaceOnUse" '
                f'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="8" stroke="{colour}" '
                'stroke-width="2"/></pattern>'
            )
        for shape in self.shapes:
            parts.append(getattr(self, "_svg_" + shape[0])(*shape[1:]))
        return "\n".join([*parts, "</svg>", ""])

    @staticmethod
    def _svg_rectangle(box, fill, stroke, thickness, hatch, tip):
        place = 'x="{:.6g}" y="{:.6g}" width="{:.6g}" height="{:.6g}"'.format(*box)
        inside = f"<title>{escape(tip)}</title>" if tip else ""
        edge = f'stroke="{stroke}" stroke-width="{thickness}"' if stroke else ""
        text = f'<rect {place} fill="{fill or "none"}" {edge}>{inside}</rect>'
        if hatch:
            text += f'<rect {place} fill="url(#hatch{hatch[1:]})">{inside}</rect>'
        return text

    @staticmethod
    def _svg_line(ends, stroke, thickness, tip):
        inside = f"<title>{escape(tip)}</title>" if tip else ""
        return (
            '<line x1="{:.6g}" y1="{:.6g}" x2="{:.6g}" y2="{:.6g}" '.format(*ends)
            + f'stroke="{stroke}" stroke-width="{thickness}">{inside}</line>'
        )

    @staticmethod
    def _svg_circle(circle, fill, tip):
        inside = f"<title>{escape(tip)}</title>" if tip else ""
        return (
            '<circle cx="{:.6g}" cy="{:.6g}" r="{:.6g}" '.format(*circle)
            + f'fill="{fill}">{inside}</circle>'
        )

    @staticmethod
    def _svg_text(at, text, size, anchor, bold, colour):
        weight = ' font-weight="bold"' if bold else ""
        return (
            '<text x="{:.6g}" y="{:.6g}" '.format(*at)
            + f'font-size="{size}" text-anchor="{anchor}" '
            f'dominant-baseline="central" fill="{colour}"{weight}>{escape(text)}</text>'
        )

    # PNG ------------------------------------------------------------------------------------------

    def image(self, scale=2):
        """The picture as a Pillow image of `scale` times its size."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (self.width * scale, self.height * scale), "#ffffff")
        draw = ImageDraw.Draw(image)
        for shape in self.shapes:
            getattr(self, "_png_" + shape[0])(image, draw, scale, *shape[1:])
        return image

    def png(self, path, scale=2):
        """Write a PNG file of `scale` times the picture's size."""
        with WRITERS["binary"](path, "the picture") as file:
            self.image(scale).save(file, "PNG")

    def save(self, path):
        """Write an SVG or a PNG file, by the name's suffix."""
        if str(path).endswith(".png"):
            self.png(path)
        elif str(path).endswith(".svg"):
            WRITERS["text"](path, self.svg(), "the picture")
        else:
            raise ValueError(f"cannot write {path}: a picture is saved as .png or .svg.")

    @staticmethod
    def _png_rectangle(image, draw, scale, box, fill, stroke, thickness, hatch, tip):
        x, y, width, height = (v * scale for v in box)
        if width <= 0 or height <= 0:
            return
        corners = round(x), round(y), round(x + width), round(y + height)
        if fill:
            draw.rectangle(corners, fill=fill)
        if hatch:
            from PIL import Image, ImageDraw

            wide, high = max(corners[2] - corners[0], 1), max(corners[3] - corners[1], 1)
            mask = Image.new("L", (wide, high), 0)
            lines = ImageDraw.Draw(mask)
            step = round(8 * 1.414 * scale)
            # neighbouring rectangles continue each other's lines
            phase = (corners[0] + corners[1]) % step
            for start in range(-phase, wide + high + step, step):
                lines.line((start, 0, start - high, high), fill=255, width=2 * scale)
            image.paste(hatch, (corners[0], corners[1]), mask)
        if stroke:
            draw.rectangle(corners, outline=stroke, width=max(1, round(thickness * scale)))

    @staticmethod
    def _png_line(image, draw, scale, ends, stroke, thickness, tip):
        draw.line([v * scale for v in ends], fill=stroke, width=max(1, round(thickness * scale)))

    @staticmethod
    def _png_circle(image, draw, scale, circle, fill, tip):
        x, y, r = (v * scale for v in circle)
        draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)

    @staticmethod
    def _png_text(image, draw, scale, at, text, size, anchor, bold, colour):
        place = {"start": "lm", "middle": "mm", "end": "rm"}[anchor]
        draw.text(
            (at[0] * scale, at[1] * scale),
            text,
            fill=colour,
            font=_font(size * scale, bold),
            anchor=place,
        )


@functools.cache
def _font(size, bold):
    """A sans-serif font of the system, or Pillow's own."""
    from PIL import ImageFont

    for name in FONTS[bold]:
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    return ImageFont.load_default(size)
