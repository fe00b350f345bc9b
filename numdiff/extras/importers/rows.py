"""Rows of a file that is a header and one array."""

from .arrays import rows_per_block
from .source import damage_named, open_stream, read_exactly


def row_blocks(path, header_bytes, count, row_bytes):
    """The bytes after the header of a file, plain or gzip, a whole number of rows at a time."""
    with open_stream(path) as stream:
        read_exactly(stream, header_bytes, path)
        for start in range(0, count, rows_per_block(row_bytes)):
            yield read_exactly(
                stream, min(rows_per_block(row_bytes), count - start) * row_bytes, path
            )
        with damage_named(path):
            stream.read(1)  # at its end, gzip compares its checksum
