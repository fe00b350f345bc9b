"""`numdiff convert`: weights of other programs, read and written.

reader.py is what the core calls for files that are not numdiff's. model_files.py and
autoencoders.py convert models, pipelines.py writes whole folders of diffusers. files.py reads and
writes state dicts, pickles.py is the reader of PyTorch's format, unet_cu.py that of unet.cu's.
containers.py finds the model in a training checkpoint. unet.py, dit.py and autoencoder_names.py
know the names and shapes of public models, guided.py the flags of guided-diffusion's scripts.
diffusers.py knows the folder layout of that library, layout.py permutes axes. kinds/ has a record
for each kind of model.
"""
