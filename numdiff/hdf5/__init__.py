"""The strict reader of HDF5 files, for datasets, checkpoints and model files.

    with open_hdf5(path) as file:
        images = file.array("images")              # an `Array`: shape and dtype, nothing read yet; None: absent
        rows = images.read(0, 64)
        names = file.strings("classes")            # an attribute of the root

h5py says where things are; the values themselves are read here, from the one open file, so that nothing outside it can
be read and nothing larger than what is stored is ever allocated:
    links        hard links alone: soft and external links, virtual datasets and external storage are refused (file.py)
    sizes        all that a shape claims must be stored: contiguous data lie within the file, every chunk exists, chunks
                 do not share bytes, and compressed ones unpack to exactly their size (array.py)
    filters      gzip, shuffle, Fletcher-32 and h5py's lzf; others would be loaded from the machine's libraries
    strings      variable strings lie in a heap whose damage makes HDF5 loop for ever: it is walked here (attributes.py)
A `Refused` says why, as part of a sentence.
"""
from .file import MAGIC, File, is_hdf5, open_hdf5

__all__ = ["MAGIC", "File", "is_hdf5", "open_hdf5"]
