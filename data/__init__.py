"""The files of this folder, installed beside numdiff so that the default dataset is found from anywhere."""
