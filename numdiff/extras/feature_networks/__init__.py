"""Feature networks: InceptionV3 as FID uses it, and DINOv2 ViT-B/14, forward only.

    numdiff convert pt_inception-2015-12-05-6726825d.pth inception.h5
    numdiff evaluate samples.npz reference.npz --features inception.h5

The weights are public files of other projects, which are not part of numdiff. `numdiff convert`
reads such a file without running anything in it, folds what can be folded, and writes a file of
numdiff. Everything is computed in float32, on a GPU and on the CPU alike, so that figures from all
machines compare.

Read the files in this order:

    kernels/       patches of a convolution, pooling, activations, resizing
    resizing.py    how public programs bring an image to a network's size: three methods as matrices
    inception.py   InceptionV3 of 2015-12-05: 2,048 features
    dinov2.py      DINOv2 ViT-B/14: 768 features
    folding.py, parts.py    the scaling of pixels within the first layer; a batch, a few images at a time
    files.py       conversion of the public weights, and the extractor that reads the result
    settings.py    the option of training runs
"""
