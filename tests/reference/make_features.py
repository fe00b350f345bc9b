"""Write the stored values of the feature networks, in float64, from public code and from a twin.

python -m tests.reference.make_features      (PyTorch, torchvision, pytorch-fid, clean-fid, NumPy; a minute)

features_inception.npz   elements and norm of each layer of pytorch-fid's InceptionV3, and its features
features_distances.npz   Fréchet distances by pytorch-fid and clean-fid, of the sets in
                         `stored_features.DISTANCES`
features_resized.npz     images as pytorch-fid's network and the network of EDM and StyleGAN resize them
"""

import cleanfid.fid
import numpy as np
import pytorch_fid.fid_score
import pytorch_fid.inception
import torch
from torch.nn import functional as F

from tests.reference import stored, stored_features, twin_dinov2

torch.set_default_dtype(torch.float64)


def save(name, arrays):
    np.savez_compressed(stored.FOLDER / f"features_{name}.npz", **arrays)


def kept(name, array):
    """{…: float32} of some elements of an array in float64, and its norm."""
    flat = array.reshape(-1)
    some = flat[stored.positions(name, flat.size)].astype(np.float32)
    return {f"{name}/some": some, f"{name}/norm": np.float32(np.linalg.norm(flat))}


def with_drawn_weights(model):
    """The model with drawn weights, in float64."""
    drawn = {
        name: torch.from_numpy(np.asarray(stored_features.weight(name, tuple(each.shape))))
        for name, each in model.state_dict().items()
    }
    model.load_state_dict(drawn)
    return model.double().eval()


def channels_last(tensor):
    return np.ascontiguousarray(np.moveaxis(tensor.detach().numpy(), 1, -1))


def make_inception():
    module = pytorch_fid.inception
    # the file is not downloaded: the network is made without weights, which are drawn
    module.load_state_dict_from_url = lambda *_, **__: {}
    torch.nn.Module.load_state_dict, load = lambda *_, **__: None, torch.nn.Module.load_state_dict
    inception = module.fid_inception_v3()
    torch.nn.Module.load_state_dict = load
    with_drawn_weights(inception)
    module.fid_inception_v3 = lambda: inception
    network = module.InceptionV3(resize_input=False, normalize_input=False).eval()
    found, place = {}, 0
    pixels = torch.from_numpy(stored_features.pictures("inception").astype(np.float64))
    x = (pixels.permute(0, 3, 1, 2) - 128) / 128
    with torch.no_grad():
        for block in network.blocks:
            for layer in block:
                x = layer(x)
                found |= kept(f"{place:02d}", channels_last(x))
                place += 1
    save("inception", {**found, "pool3": x[:, :, 0, 0].numpy().astype(np.float32)})


def make_dinov2():
    state = {
        name: torch.from_numpy(stored_features.weight(name, shape).astype(np.float64))
        for name, shape in stored_features.dinov2_shapes().items()
    }
    pixels = torch.from_numpy(stored_features.pictures("dinov2", 1, 224).astype(np.float64))
    found = {}
    with torch.no_grad():
        for place, x in enumerate(twin_dinov2.layers(state, pixels.permute(0, 3, 1, 2), 12)):
            found |= kept(f"{place:02d}", x.numpy())
            if place in (1, 12):
                token = twin_dinov2.class_token(state, x).numpy()
                found[f"{place:02d}/token"] = token.astype(np.float32)
    save("dinov2", found)


def make_distances():
    found = {}
    for name, (count, dimensions) in stored_features.DISTANCES.items():
        a, b = (set.astype(np.float64) for set in stored_features.samples(name, count, dimensions))
        given = (np.mean(a, 0), np.cov(a, rowvar=False), np.mean(b, 0), np.cov(b, rowvar=False))
        found[f"{name}/pytorch-fid"] = float(
            pytorch_fid.fid_score.calculate_frechet_distance(*given)
        )
        found[f"{name}/clean-fid"] = float(cleanfid.fid.fid_from_feats(a, b))
        print(name, found)
    save("distances", found)


def make_resized():
    """Of 40 × 56 to 299 × 299 pixels, in float64, where the coordinates are exact."""
    size, found = 299, {}
    images = stored_features.pictures("resized", 1, 56)[:, :40]
    x = torch.from_numpy(images.astype(np.float64)).permute(0, 3, 1, 2)
    _, _, H, W = x.shape
    found |= kept("pytorch-fid", channels_last(F.interpolate(x, (size, size), mode="bilinear")))
    theta = torch.tensor([[1.0, 0, 1 / W - 1 / size], [0, 1, 1 / H - 1 / size]])
    grid = F.affine_grid(theta[None], [1, 3, size, size], align_corners=False)
    resized = F.grid_sample(x, grid, "bilinear", "border", align_corners=False)
    found |= kept("tensorflow", channels_last(resized))
    save("resized", found)


if __name__ == "__main__":
    make_inception()
    make_dinov2()
    make_distances()
    make_resized()
