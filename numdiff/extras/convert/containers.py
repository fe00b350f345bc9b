"""Find the model's tensors in a foreign file: training checkpoints, averages, wrappers, other
buffers.

    {"model": {…}, "ema": {…}}                    a state dict each, by key
    {"ema": {"shadow_params": […]}, "model": …}   torch-ema and diffusers: without names, in the order of the parameters
    "model.time_embed.0.weight", …                a prefix, of Lightning, DataParallel, torch.compile, an EMA module
    "model_ema.time_embed0weight", …              an average in buffers, whose names may have no dots (LDM)
    "betas", "alphas_cumprod", …                  tables of the diffusion, which reveal the schedule
"""

import re

from ...errors import NumdiffError
from . import pickles

EMA_KEYS = ("ema", "ema_model", "model_ema", "ema_state_dict", "ema_params")
RAW_KEYS = ("model", "state_dict", "model_state_dict", "net", "params", "module")
DEPTH = 3  # containers within containers
# bytes that a file may hold beyond 4 for each of its own (repeated rows are stored once)
SPARE = 1 << 24
SHADOW = "shadow_params"
UNTRAINED = {"pos_embed", "freqs_cos", "freqs_sin"}  # fixed tables, which some averages leave out
ANCHORS = ("time_embed.0.weight", "x_embedder.proj.weight")  # of a UNet, of a DiT: show the prefix
TABLES = {  # of a diffusion that is a module: no weights
    "betas",
    "alphas",
    "alphas_cumprod",
    "alphas_cumprod_prev",
    "sqrt_alphas_cumprod",
    "sqrt_one_minus_alphas_cumprod",
    "log_one_minus_alphas_cumprod",
    "sqrt_recip_alphas_cumprod",
    "sqrt_recipm1_alphas_cumprod",
    "posterior_variance",
    "posterior_log_variance_clipped",
    "posterior_mean_coef1",
    "posterior_mean_coef2",
    "p2_loss_weight",
    "loss_weight",
    "lvlb_weights",
    "logvar",
    "snr",
}


def choose(found, path, weights):
    """{name: array} of the state dict in the contents of a `.pt` file."""
    keys = EMA_KEYS + RAW_KEYS if weights == "ema" else RAW_KEYS + EMA_KEYS
    tensors = _named(found, keys)
    if sum(t.nbytes for t in tensors.values()) > 4 * path.stat().st_size + SPARE:
        raise NumdiffError("its tensors are far larger than the file; save contiguous tensors")
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _named(found, keys):
    """{name: `pickles.Tensor`} of the first state dict that is found along the keys."""
    outer = found
    for _ in range(DEPTH + 1):
        if not isinstance(found, dict):
            break
        inside = next((key for key in keys if isinstance(found.get(key), dict)), None)
        if isinstance(found.get(SHADOW), (list, tuple)) and not (
            keys[0] in RAW_KEYS and inside in RAW_KEYS
        ):
            return _with_names(found[SHADOW], outer)
        tensors = {
            k: v
            for k, v in found.items()
            if isinstance(k, str) and isinstance(v, pickles.PickledTensor)
        }
        if tensors and inside is None:
            return tensors
        if inside is None:
            names = ", ".join(str(k)[:40] for k in list(found)[:5]) or "nothing"
            raise NumdiffError(
                f"no state dict was found in it (it holds {names}; looked for {', '.join(keys)})"
            )
        outer, found = found, found[inside]
    raise NumdiffError("it holds no dict of tensors; save model.state_dict()")


def _with_names(shadow, container):
    """The averaged parameters, a list in the model's order, under the names of the state dict
    stored with it."""
    remedy = (
        "save them by name (ema.copy_to(model.parameters()), then torch.save(model.state_dict(), …)), or take "
        "--weights raw"
    )
    try:
        raw = _named({k: v for k, v in container.items() if k in RAW_KEYS}, RAW_KEYS)
    except NumdiffError:
        raise NumdiffError(
            f"its averaged weights ({SHADOW}) have no names, and there is no state dict with them to "
            f"take names from: {remedy.rpartition(', or')[0]}"
        ) from None
    trained = [name for name in raw if _last(name) not in TABLES]
    for without in (set(), UNTRAINED - {"pos_embed"}, UNTRAINED):
        names = [name for name in trained if _last(name) not in without]
        if len(names) == len(shadow) and all(
            isinstance(t, pickles.PickledTensor) and t.shape == raw[name].shape
            for name, t in zip(names, shadow, strict=True)
        ):
            fixed = {name: raw[name] for name in trained if _last(name) in without}
            return {**dict(zip(names, shadow, strict=True)), **fixed}
    raise NumdiffError(
        f"its {len(shadow)} averaged weights ({SHADOW}) do not match, one by one, the shapes of the "
        f"{len(trained)} in the state dict stored with them: {remedy}"
    )


def weights_of_model(state_dict, weights="ema"):
    """(state dict without what wraps the model, {"betas": array} or {"alphas_cumprod": array} if
    the file has one).

    Only the names of one prefix are kept: if both are there, the averaged one for "ema", the other
    one for "raw".
    """
    tables = {}
    for name in sorted(state_dict):
        if _last(name) in ("betas", "alphas_cumprod") and not tables:
            tables = {_last(name): state_dict[name]}
    prefixes = {
        name[: -len(anchor)]
        for name in state_dict
        for anchor in ANCHORS
        if name == anchor or name.endswith("." + anchor)
    }
    if len(prefixes) > 8:
        raise NumdiffError("it holds more than eight models; save the state dict of one")
    averaged = {p for p in prefixes if "ema" in re.split(r"[._]", p.lower())}
    chosen = averaged or prefixes if weights == "ema" else prefixes - averaged or prefixes
    if len(chosen) > 1:
        listed = " and ".join(repr(p[:40]) for p in sorted(chosen)[:3])
        raise NumdiffError(
            f"it holds several models (their names begin with {listed}); save the state dict of one"
        )
    if chosen:
        prefix = chosen.pop()
        others = tuple(p for p in prefixes if p and not prefix.startswith(p))
        model = {
            name: array
            for name, array in state_dict.items()
            if name.startswith(prefix) and not (others and name.startswith(others))
        }
        if weights == "ema" and not averaged:
            model = _averaged_in_buffers(state_dict, model, prefix)
        state_dict = {name.removeprefix(prefix): array for name, array in model.items()}
    return {name: array for name, array in state_dict.items() if name not in TABLES}, tables


def _averaged_in_buffers(state_dict, model, prefix):
    """The model's weights, averaged if the file has them as `model_ema.` and the parameter's name
    without dots."""
    top, rest = (
        ("model.", prefix.removeprefix("model.")) if prefix.startswith("model.") else ("", prefix)
    )
    keys = {
        name: "model_ema." + name.removeprefix(top).replace(".", "")
        for name in model
        if name.startswith(top + rest)
    }
    missing = [name for name, key in keys.items() if key not in state_dict]
    if len(missing) == len(keys):
        return model
    missing = [name for name in missing if _last(name) not in TABLES | UNTRAINED]
    if missing:
        raise NumdiffError(
            f"its averaged weights (model_ema.) lack {len(missing)} of the model's, first {missing[0]}; "
            "take --weights raw"
        )
    return {name: state_dict.get(keys[name], array) for name, array in model.items()}


def _last(name):
    return name.rpartition(".")[2]
