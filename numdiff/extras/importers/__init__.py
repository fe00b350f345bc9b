"""`numdiff data import` and folders of pictures as datasets: what makes the one HDF5 format that
training reads (data/dataset.py).

| source | recognised by | file |
| --- | --- | --- |
| folder or zip of images | being one | tree.py; labels.py and classes.py find the classes |
| .npz, .npy | a zip of .npy files; NumPy's magic | arrays.py |
| numdiff's HDF5 | HDF5's magic | arrays.py |
| tar of images, folder of WebDataset shards | a tar's header | tar.py; tar_archive.py reads the headers |
| CIFAR-10 for Python, MNIST's idx, unet.cu's .bin | their first bytes | cifar.py, mnist.py, unet_cu.py |

importing.py recognises a format by the contents of a file, not by its name, and writes the images
one at a time. pictures.py opens picture files, with netpbm.py and profiles.py; fitting.py brings
them to one size. folders.py keeps a folder's pictures as a dataset in the cache. sheet.py draws a dataset for
`numdiff data info`.

An importer of another format is a module at the place `importer` of numdiff/extensions.py. It has
open_file(path, content, labels, order) and open_folder(path, names, labels, order), which return a
`Source` (source.py), or None for what is of another format. content: the first 512 bytes, unpacked
where the file is a gzip. The sizes that a file announces are checked against what it can hold
before memory is allocated for it.
"""
