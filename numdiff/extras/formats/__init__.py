"""Further formats of `numdiff data import`, one file each. A module has open_file(path, content, labels,
order) and open_folder(path, names, labels, order), which return a `Source`
(data/importers/source.py), or None for what is of another format. content: the first 512 bytes,
unpacked where the file is a gzip.

tar.py       a tar of images, a folder of WebDataset shards; tar_archive.py reads the headers
cifar.py     CIFAR-10 for Python
mnist.py     MNIST's idx; unet_cu.py: unet.cu's .bin; rows.py: what both need
"""
