"""The files of this folder, installed next to numdiff so that the default dataset is found from any
folder."""
