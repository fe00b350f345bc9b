"""The strict reader of HDF5 files, for datasets, checkpoints and model files.

    with open_hdf5(path) as file:
        images = file.array("images")              # an `Array`: shape and dtype, nothing read yet; None: absent
        rows = images.read(0, 64)
        names = file.strings("classes")            # an attribute of the root

The HDF5 library, which h5py calls, trusts the structures of a file: one changed field can crash it,
make it loop for ever, or use all memory. So numdiff only writes with h5py. Files are read here in
Python, from the one open file: nothing outside it can be read, and nothing larger than what is
stored is ever allocated:
    structures   superblock, object headers, trees, heaps, of HDF5 1.8 to 2.0; their checksums are checked, their size
                 and what one question may take are limited (structure.py, trees.py, chunks.py)
    links        hard links alone: soft and external links, virtual datasets and external storage are refused (file.py)
    sizes        all that a shape claims must be stored: contiguous data are within the file, every chunk exists, chunks
                 do not share bytes, and compressed ones unpack to exactly their size (array.py)
    filters      gzip, shuffle, Fletcher-32 and h5py's lzf; others would be loaded from the machine's libraries
    strings      of one length, or of variable length in a heap (attributes.py)
A `Refused` says why, as part of a sentence.
"""

from .file import MAGIC, File, is_hdf5, open_hdf5

__all__ = ["MAGIC", "File", "is_hdf5", "open_hdf5"]
