"""Time the autoencoder of Stable Diffusion's size, encoder and decoder, against diffusers' in
PyTorch.

    python -m numdiff.extras.measure.autoencoder                    both parts, 32 pictures of 256 × 256
    python -m numdiff.extras.measure.autoencoder --torch graphs     alternating with diffusers' AutoencoderKL in bf16
    python -m numdiff.extras.measure.autoencoder --profile          also the time by kernel and by layer
    python -m numdiff.extras.measure.autoencoder --data 4096        also `numdiff data encode` of a file of pictures
    python -m numdiff.extras.measure.autoencoder --parts decode     one part, so that the memory is its own

Both programs have the same random weights. `device` is the median time of a replay in a row of three, its inputs and
outputs on the card; `host` also has the copies from and to NumPy arrays. `error` is the relative
deviation from PyTorch's result in float32, TF32 off. Memory is the peak of what is allocated.
"""

import argparse
import cProfile
import pathlib
import pstats
import statistics
import tempfile
import time

import numpy as np

from numdiff.benchmark.clocks import NoClock, profiler_is_there, replayed
from numdiff.benchmark.profile import Profile, run_watched
from numdiff.data.writer import Writer
from numdiff.device import get_gpu, synchronize
from numdiff.device.roof import Roof
from numdiff.extras.convert.autoencoder_names import diffusers_names, public_arrays
from numdiff.extras.convert.autoencoders import write_autoencoder
from numdiff.extras.encode import latents
from numdiff.nn.autoencoder import Autoencoder, _Recorded
from numdiff.training.inference import inference_model

PARTS = "encode", "decode"
MODES = {"eager": None, "compile": "max-autotune-no-cudagraphs", "graphs": "reduce-overhead"}
ROWS = 24  # of a table of kernels
ROW = 3  # runs that are timed together


def seconds_in_turns(jobs, repeats):
    """[median seconds of each job], taken alternately after two warm-up runs."""
    times = [[] for _ in jobs]
    for turn in range(repeats + 2):
        for k, job in enumerate(jobs):
            start = time.perf_counter()
            job()
            if turn >= 2:
                times[k].append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


class Part:
    """One part of numdiff's autoencoder on a fixed input; a `step` for the profiler."""

    def __init__(self, model, name, x):
        self.model, self.name, self.x, self.backend = model, name, x, model.backend
        function = model.moments if name == "encode" else model.reconstruct
        with model.arithmetic(), self.backend.turn:
            self.recorded = _Recorded(function, x, self.backend)
            self.result = self.recorded(x)
            self.recorded(x)
        self.program, self.peak_bytes = "numdiff fp16", self.backend.peak_bytes

    def run(self):
        self.recorded._replayed()

    def wait(self):
        synchronize(self.backend)

    def run_eagerly(self):
        with self.backend.turn, self.backend.within(self.backend.inference_arena):
            self.recorded._launch()

    def on_device(self):
        for _ in range(ROW):
            self.run()
        self.wait()

    def on_host(self):
        self.model.encode(self.x) if self.name == "encode" else self.model.decode(self.x)

    def profile(self):
        """The tables by kernel and by layer, as text."""
        launches, spans = run_watched(self, NoClock())
        found, fault = replayed(self, [launch.kernel for launch in launches], 3)
        if not found:
            return f"no profile: {fault}"
        for launch, us in zip(launches, found[0], strict=True):
            launch.us = us
        profile = Profile(launches, spans, "", found[1] / 1e3, True, Roof(self.backend), "fp16", 0)
        lines = [f"{self.name}: {profile.total_us / 1e3:.2f} ms in {len(launches)} launches"]
        for table in profile.by_kernel(), profile.by_layer(4):
            for key, calls, us, share, moved, flops, _ in table[:ROWS]:
                name = key if isinstance(key, str) else " ".join(key)
                lines.append(
                    f"  {us:9.1f} µs {share:6.1%} {calls:4} {moved / us / 1e3 if us else 0:6.0f} GB/s "
                    f"{flops / us / 1e6 if us else 0:6.0f} TFLOP/s  {name}"
                )
        lines.append("  the longest launches")
        for launch in sorted(launches, key=lambda launch: -launch.us)[: 2 * ROWS]:
            lines.append(f"  {launch.us:9.1f} µs  {launch.layer}: {launch.kernel} {launch.grid}")
        return "\n".join(lines)


class TorchPart:
    """The same part of diffusers' AutoencoderKL, in bf16 and channels last."""

    def __init__(self, torch, vae, name, x, mode):
        self.torch, self.name, self.x = torch, name, x
        half = torch.bfloat16

        def encode(x):
            return vae.quant_conv(vae.encoder(x.to(half))).float()

        def decode(z):
            return vae.decoder(vae.post_quant_conv(z.to(half))).float()

        self.function = encode if name == "encode" else decode
        if MODES[mode]:
            self.function = torch.compile(self.function, mode=MODES[mode], fullgraph=True)
        elif mode != "eager":
            raise ValueError(f"mode {mode!r} must be one of {', '.join(MODES)}")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.input = self.upload()
        started = time.perf_counter()
        for _ in range(3):
            self.on_device()
        self.first_s = time.perf_counter() - started
        self.result = self.on_host()
        self.peak_bytes = torch.cuda.max_memory_allocated()
        self.program = f"PyTorch bf16 {mode}"

    def upload(self):
        return self.torch.from_numpy(self.x).cuda().permute(0, 3, 1, 2)

    def on_device(self):
        with self.torch.no_grad():
            for _ in range(ROW):
                self.function(self.input)
        self.torch.cuda.synchronize()

    def on_host(self):
        with self.torch.no_grad():
            return self.function(self.upload()).permute(0, 2, 3, 1).cpu().numpy()

    def profile(self):
        """The time by kernel, as text."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as found:
            self.on_device()
        times = {}
        for event in found.events():
            if event.device_type == self.torch.autograd.DeviceType.CUDA:
                us, calls = times.get(event.name, (0.0, 0))
                length = event.time_range.end - event.time_range.start
                times[event.name] = us + length / ROW, calls + 1
        rows = sorted(times.items(), key=lambda item: -item[1][0])
        lines = [f"PyTorch's {self.name}: {sum(us for us, _ in times.values()) / 1e3:.2f} ms"]
        lines += [
            f"  {us:9.1f} µs {calls // ROW:4}  {name[:120]}" for name, (us, calls) in rows[:ROWS]
        ]
        return "\n".join(lines)


def torch_autoencoder(torch, model):
    """diffusers' AutoencoderKL with the weights of `model`, in float32 on the card."""
    from diffusers import AutoencoderKL

    c = model.options
    widths = [c["model_channels"] * m for m in c["channel_mult"]]
    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * len(widths),
        up_block_types=["UpDecoderBlock2D"] * len(widths),
        block_out_channels=widths,
        layers_per_block=c["num_res_blocks"],
        latent_channels=c["latent_channels"],
        norm_num_groups=c["groups"],
    )
    state = {
        name: torch.from_numpy(np.ascontiguousarray(array))
        for name, array in diffusers_names(public_arrays(model.arrays())).items()
    }
    vae.load_state_dict(state)
    return vae.cuda().eval().requires_grad_(False)


def torch_results(torch, vae, inputs):
    """{part: NumPy result of the first two pictures} in float32."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    found = {}
    with torch.no_grad():
        for name, x in inputs.items():
            few = torch.from_numpy(x[:2]).cuda().permute(0, 3, 1, 2)
            if name == "encode":
                y = vae.quant_conv(vae.encoder(few))
            else:
                y = vae.decoder(vae.post_quant_conv(few))
            found[name] = y.permute(0, 2, 3, 1).cpu().numpy()
    return found


def relative_error(got, want):
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def encode_rates(model, count, size, batch, top):
    """[(images/s of the whole call, images/s between the first block of latents and the last)] of
    two calls of `numdiff data encode` on `count` random pictures in a file, and a profile of the
    host's time in a third one, as text."""
    rates, times, write = [], [], latents._write_block

    def timed(*arguments):
        write(*arguments)
        times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        write_autoencoder(folder / "vae.h5", model.options, model.arrays())
        generator = np.random.default_rng(0)
        with Writer(folder / "photos.h5") as writer:
            for _ in range(count):
                writer.append(generator.integers(0, 256, (size, size, 3), np.uint8), 0)
            writer.finish(["picture"])

        def run(turn):
            latents.encode_dataset(
                folder / "photos.h5",
                folder / f"latents{turn}.h5",
                folder / "vae.h5",
                batch=batch,
                device="cuda",
                precision="fp16",
                echo=lambda text: None,
            )

        latents._write_block = timed
        for turn in range(2):
            times.clear()
            start = time.perf_counter()
            run(turn)
            taken = time.perf_counter() - start
            rates.append((count / taken, (len(times) - 1) * latents.CHUNK / (times[-1] - times[0])))
        latents._write_block = write
        if not top:
            return rates, ""
        profiler = cProfile.Profile()
        profiler.runcall(run, 2)
        with open(folder / "profile.txt", "w") as file:
            pstats.Stats(profiler, stream=file).sort_stats("tottime").print_stats(top)
        return rates, (folder / "profile.txt").read_text()


def show_encode_rates(model, options):
    rates, text = encode_rates(
        model, options.data, options.size, options.batch, options.profile * ROWS
    )
    for turn, (whole, within) in zip(("first", "second"), rates, strict=True):
        print(
            f"data encode, {options.data} pictures, the {turn} time: {within:.0f} images/s while it "
            f"encodes, {whole:.0f} with loading and joining",
            flush=True,
        )
    print(text)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--torch", choices=MODES, help="measure diffusers' in this mode, too")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--data", type=int, default=0, help="pictures of a file to encode")
    options = parser.parse_args()
    gpu, generator = get_gpu(), np.random.default_rng(0)
    start = Autoencoder(image_size=options.size, device="cpu", seed=0)
    model = inference_model(Autoencoder, start.options, gpu, start.arrays())
    torch = vae = None
    if options.torch:
        import torch

        torch.backends.cudnn.benchmark = True
        vae = torch_autoencoder(torch, start)
    model.compute_in_half(np.float16)
    model.parameters.release()
    inputs = {
        "encode": generator.uniform(-1, 1, (options.batch, options.size, options.size, 3)),
        "decode": generator.standard_normal(
            (options.batch, *[options.size // model.factor] * 2, model.latent_channels)
        ),
    }
    inputs = {name: x.astype(np.float32) for name, x in inputs.items()}
    wanted = {} if vae is None else torch_results(torch, vae, inputs)
    print(f"{gpu.device_name}, {options.batch} pictures of {options.size} × {options.size}")
    if options.data:
        show_encode_rates(start, options)
    print(
        f"{'part':8} {'program':20} {'device ms':>9} {'host ms':>8} {'peak GB':>8} {'error':>8} {'bits':>6}",
        flush=True,
    )
    for name in options.parts:
        part = Part(model, name, inputs[name])
        same = all((part.recorded(part.x) == part.result).all() for _ in range(2))
        jobs = [part]
        if vae is not None:
            vae.to(torch.bfloat16).to(memory_format=torch.channels_last)
            jobs.append(TorchPart(torch, vae, name, part.x, options.torch))
        device = seconds_in_turns([job.on_device for job in jobs], options.repeats)
        host = seconds_in_turns([job.on_host for job in jobs], options.repeats)
        for k, job in enumerate(jobs):
            error = relative_error(job.result[:2], wanted[name]) if wanted else np.nan
            print(
                f"{name:8} {job.program:20} {1e3 * device[k] / ROW:9.2f} {1e3 * host[k]:8.2f} "
                f"{job.peak_bytes / 1e9:8.2f} {error:8.1e} {('other', 'same')[same] if k == 0 else '':>6}",
                flush=True,
            )
        if len(jobs) > 1:
            print(f"{name:8} {'ratio':20} {device[1] / device[0]:9.2f} {host[1] / host[0]:8.2f}")
        if options.profile and profiler_is_there():
            for job in jobs:
                print(job.profile(), flush=True)
        del part, jobs, job


if __name__ == "__main__":
    main()
